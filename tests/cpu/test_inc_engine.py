"""Intel Neural Compressor's whole flow: measure ranges, then serve them.

Weights are prepared on the host.
"""

from __future__ import annotations

import json
import weakref
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.backends.base.facts import QuantizedKernel
from preheat.backends.cpu.backend import CpuBackend
from preheat.cli.main import main
from preheat.errors import ModelError, SettingsError
from preheat.extras.calibration import OPTIONS_KEPT, calibrate
from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH
from preheat.model.files import read_config as read_model
from preheat.model.inc import SCHEME
from preheat.model.inc_files import read_config, read_ranges
from preheat.model.loader import Reading, load_weights
from preheat.model.quantize import quantize
from preheat.model.spec_tree import leaves
from preheat.model.weight_loader import WeightLoader
from preheat.ops.float8 import simulate
from preheat.settings import Settings

pytestmark = pytest.mark.usefixtures("eager")  # the layers of the plain model are called one by one

PLAIN = {"model": "bundled", "device": "cpu", "cache_dir": "off", "dtype": "float32", "max_model_len": 200}
COLD = {"skip_warmup": True, "boot_check": "off", "on_cold": "off", "max_num_seqs": 4}
PROMPT = [(7 * place) % 4000 + 8 for place in range(60)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    said = calibrate(Settings.load(PLAIN, {}), str(folder), [PROMPT, "def add(a, b):"])
    return folder, said


def answer(**options):
    llm = LLM(**{**PLAIN, **COLD, **options})
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)
    return llm, llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].logprobs


def test_measured_ranges_hold_the_models_numbers(measured):
    """The measured ranges hold the numbers of the model, run by hand.

    The numbers are the first layer's inputs, and the first keys and values.
    """
    folder, said = measured
    assert f"QUANT_CONFIG={folder / 'maxabs_quant.json'} preheat serve bundled --quantization inc" in said
    ranges = read_ranges(read_config(str(folder / "maxabs_quant.json")))
    assert len(ranges) == 7 * 6  # the head is the table of embeddings
    llm, _ = answer()
    weights, first = llm.loop.executor.decoder.weights, "model.layers.0.self_attn."
    ids = torch.tensor([*PROMPT, *llm.frontend.tokenizer.encode("def add(a, b):", True)])
    with torch.inference_mode():
        normed = weights.layers[0].input_norm(weights.embedding[ids])
        qkv = weights.layers[0].attention.qkv(normed).view(len(ids), -1, 64)
    most = ranges[f"{first}qkv_proj"].inputs[0]
    assert most >= float(normed.abs().max()) * (1 - 1e-6)
    assert most < 3 * float(normed.abs().max())
    values = ranges[f"{first}attn.impl.v_cache"].inputs[0]
    assert values >= float(qkv[:, 6:].abs().max()) * (1 - 1e-5)
    assert ranges["model.layers.6.mlp.down_proj"].weight > 0


def test_the_npz_is_incs_pickle_of_the_same(measured):
    """The npz holds an object array of one dict, as numpy writes it.

    Its numbers equal the JSON file's. Every number is an array of two dimensions.
    """
    folder, _ = measured
    with zipfile.ZipFile(folder / "inc_output_hooks_maxabs_0_1.npz") as file:
        assert file.namelist() == ["arr_0.npy"]
    content = np.load(folder / "inc_output_hooks_maxabs_0_1.npz", allow_pickle=True)["arr_0"].item()
    listed = json.loads((folder / "inc_output_hooks_maxabs_0_1.json").read_text())
    assert content.keys() == listed.keys() == {"GlobalRank", "LocalRank", "Mode", "Nodes"}
    name = "model.layers.0.mlp.down_proj"
    node, same = content["Nodes"][name], listed["Nodes"][name]
    assert np.array_equal(node["inputs"], np.float32(same["inputs"]))
    assert node["params"]["weight"].shape == node["inputs"][0].shape == (1, 1)
    assert set(json.loads((folder / "inc_output_hooks_maxabs_0_1_mod_list.json").read_text())) == set(listed["Nodes"])


def test_measured_ranges_are_served(measured, monkeypatch):
    folder, _ = measured
    monkeypatch.setenv("QUANT_CONFIG", str(folder / "maxabs_quant.json"))
    llm, rounded = answer(quantization="inc", kv_cache_dtype="fp8_inc")
    spec, weights = llm.loop.executor.decoder.spec, llm.loop.executor.decoder.weights
    assert {layer.kv.dtype for layer in spec.layers} == {"fp8_e4m3"}
    assert all(
        scale != 1.0 and scale == 2.0 ** round(np.log2(scale)) for layer in spec.layers for scale in layer.kv.scales
    )
    qkv = weights.layers[3].attention.qkv
    assert qkv.value.input == "rounded"
    plain, expected = answer()
    assert expected != rounded
    # A rounded layer against float64 over the rounded inputs and weights.
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    weight = torch.empty(512, 256)
    with torch.inference_mode():
        found = qkv(x)
        exact = plain.loop.executor.decoder.weights.layers[3].attention.qkv(torch.eye(256)).T.double()
    weight_scale = read_config(str(folder / "maxabs_quant.json")).weight_scale(float(exact.abs().max()))
    weight = simulate(exact.float(), torch.tensor([weight_scale]), 448.0).double()
    wanted = simulate(x, qkv._rounding, 448.0).double() @ weight.T
    assert (found.double() - wanted).norm() / wanted.norm() < 1e-6
    assert answer(quantization="inc", kv_cache_dtype="fp8_inc", weights_load_device="cpu")[1] == rounded


def test_multiplied_codes_equal_the_simulation(measured):
    """A backend that multiplies codes gives the simulation's numbers, and its layers are of W8A8."""
    folder, _ = measured
    options = {"quantization": "inc", "quant_config": str(folder / "maxabs_quant.json"), "kv_cache_dtype": "fp8_inc"}
    settings, x = Settings.load({**PLAIN, **options}, {}), torch.randn(5, 256)
    spec = read_spec(read_model(BUNDLED_PATH))

    def qkv(facts):
        found, quantized = quantize(settings, spec, facts)
        layers = load_weights(found, BUNDLED_PATH, torch.float32, CpuBackend(), formats=quantized.formats).layers
        return found.layers[2].attention.qkv.scheme, layers[2].attention.qkv

    scheme, simulated = qkv(CpuBackend().facts)
    assert scheme is None
    assert simulated.value.input == "rounded"
    scheme, coded = qkv(replace(CpuBackend().facts, quantized={SCHEME.kind: QuantizedKernel("codes")}))
    assert scheme == SCHEME
    with torch.inference_mode():
        assert (coded(x) - simulated(x)).norm() / simulated(x).norm() < 1e-6
        assert (coded(x * 64) - simulated(x * 64)).norm() / simulated(x * 64).norm() < 1e-6  # most of it is cut


@pytest.mark.parametrize("method", ["maxabs_pow2_opt_weight", "unit_scale"])
def test_other_methods_load(measured, tmp_path, method):
    folder, _ = measured
    values = {**json.loads((folder / "maxabs_quant.json").read_text()), "scale_method": method}
    values["blocklist"] = {"names": [r"layers\.[1-6]\."], "types": []}
    (tmp_path / "quant.json").write_text(json.dumps(values))
    llm, _ = answer(quantization="inc", quant_config=str(tmp_path / "quant.json"))
    linears = llm.loop.executor.decoder.weights.linears()
    rounded = [path for path, each in linears if each.value.input == "rounded"]
    assert len(rounded) == 4


def test_the_command_follows_a_configuration_that_measures(tmp_path, monkeypatch, capsys):
    """The lists of a measuring configuration count, and it names the folder of the ranges.

    No engine serves it.
    """
    stats = f"{tmp_path}/g3/inc_output"
    config = {"method": "HOOKS", "mode": "MEASURE", "observer": "maxabs", "dump_stats_path": stats,
              "allowlist": {"types": [], "names": []}, "blocklist": {"types": [], "names": ["mlp"]},
              "quantize_weight": False, "calibration_sample_interval": 1}  # fmt: skip
    (tmp_path / "measure.json").write_text(json.dumps(config))
    (tmp_path / "prompts").write_text("def add(a, b):\n")
    monkeypatch.setenv("QUANT_CONFIG", str(tmp_path / "measure.json"))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in PLAIN.items()]
    assert main(["calibrate", *flags, "--prompts", str(tmp_path / "prompts")]) == 0
    assert "28 modules were measured" in capsys.readouterr().out
    assert read_config(str(tmp_path / "g3" / "maxabs_quant.json")).device == "gaudi3"
    with pytest.raises(SettingsError, match="run preheat calibrate"):
        answer(quantization="inc")
    monkeypatch.delenv("QUANT_CONFIG")
    assert main(["calibrate", *flags]) == 2
    assert "calibrate needs --output DIR" in capsys.readouterr().err


def test_a_quantized_checkpoint_is_not_measured(tmp_path):
    """Its weights are codes: the greatest of them says nothing without the scales."""
    config = json.loads((BUNDLED_PATH / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    settings = Settings.load({**PLAIN, "model": str(tmp_path)}, {})
    with pytest.raises(ModelError, match=r"is quantized already \(fp8\), and calibrate measures only") as refused:
        calibrate(settings, str(tmp_path / "out"), [PROMPT])
    assert refused.value.param == "model"
    assert not (tmp_path / "out").exists()


def test_weights_are_prepared_on_the_host_one_matrix_at_a_time(monkeypatch):
    """The device gets only the tensors that stay there.

    The host holds at most the largest matrix.
    """
    spec = read_spec(json.loads((BUNDLED_PATH / "config.json").read_text()))
    backend, empty, live, most = Elsewhere(), WeightLoader.empty, [], [0]

    def watched(self, *shape):
        found = empty(self, *shape)
        live.append(weakref.ref(found))
        here = [each for ref in live if (each := ref()) is not None and each.device.type == "cpu"]
        most[0] = max(most[0], sum(each.nbytes for each in here))
        return found

    monkeypatch.setattr(WeightLoader, "empty", watched)
    load_weights(spec, BUNDLED_PATH, torch.float32, backend, Reading("dummy", on_host=True))
    largest = max(leaf.params for _, leaf in leaves(spec))
    assert most[0] <= 4 * largest
    assert backend.given == 4 * spec.num_params
    with pytest.raises(SettingsError, match="is not one of cpu"):
        Settings(weights_load_device="cuda")


class Elsewhere(CpuBackend):
    """Backend with a device that is not the host.

    It counts the bytes ``given`` to the device.
    """

    device = torch.device("meta")

    def __init__(self):
        self.given = 0

    def layer(self, value, weights, context):
        return self.norm(weights.weight, 0.0)

    def norm(self, weight, eps, kind="rms", bias=None):
        assert weight.device == self.device
        self.given += weight.nbytes
        return weight


def test_calibration_keeps_the_options_that_find_a_checkpoint():
    assert {"model", "tokenizer", "revision", "download_dir", "hf_token"} <= set(OPTIONS_KEPT)
