"""PEFT's adapters are read back with PEFT's factors and scales.

An adapter that does not fit is refused.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from functools import partial
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from preheat.errors import AdapterError
from preheat.lora import adapter
from preheat.lora.adapter import FEW_TENSORS, HEADER_BYTES, read_adapter
from preheat.lora.config import AdapterConfig
from preheat.lora.matrix import largest_magnitude
from preheat.model.families import read_spec
from tests.cpu.checkpoints import MODELS, SMALL
from tests.llava import save_llava

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
# of PEFT

MAX_RANK = 16


def model_of(name):
    """Return a small model and its spec."""
    import transformers  # here: it takes seconds, and most processes of a run need it never

    family, changes = MODELS[name]
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**SMALL | changes | {"num_hidden_layers": 2, "layer_types": None, "vocab_size": 40})
    torch.manual_seed(0)
    return kind(config), read_spec({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]})


def write(folder, model, *, seed=0, **fields):
    """Save an adapter with random matrices, and return PEFT's layers of it by module.

    The layers are read back by PEFT, since it sorts the patterns of a config when it saves them.
    """
    import peft  # here: it takes seconds, and most processes of a run need it never

    torch.manual_seed(seed)
    made = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "init_lora_weights": False, **fields}))
    made.save_pretrained(folder)
    wrapped = peft.PeftModel.from_pretrained(made.unload(), folder)
    layers = {
        name.removeprefix("base_model.model."): (
            (layer.lora_A["default"].weight if layer.lora_A else layer.lora_embedding_A["default"]).detach(),
            (layer.lora_B["default"].weight if layer.lora_B else layer.lora_embedding_B["default"]).detach(),
            layer.scaling["default"],
        )
        for name, layer in wrapped.named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    }
    wrapped.unload()
    return layers


def read(folder, spec, *, max_rank=MAX_RANK, dtype=torch.float32):
    return read_adapter("tuned", str(folder), spec, max_rank, dtype)


def same(adapter, layers):
    return adapter.factors.keys() == layers.keys() and all(
        torch.equal(factors.a, a) and torch.equal(factors.b, b) and factors.scale == scale
        for factors, (a, b, scale) in ((adapter.factors[name], layers[name]) for name in layers)
    )


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("llama", {"target_modules": ALL}),
    "alpha": ("llama", {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 24}),
    "rslora": ("llama", {"target_modules": ["up_proj"], "use_rslora": True, "r": 8}),
    "all linear": ("llama", {"target_modules": "all-linear"}),
    "output head": ("llama", {"target_modules": ["lm_head", "o_proj"]}),
    "one layer": ("llama", {"target_modules": ["k_proj"], "layers_to_transform": [1]}),
    "regex": ("llama", {"target_modules": r".*\.1\.(mlp|self_attn)\..*(gate|o)_proj"}),
    "excluded": ("llama", {"target_modules": ATTENTION, "exclude_modules": ["model.layers.0.self_attn.q_proj"]}),
    "patterns": (
        "llama",
        {
            "target_modules": ALL,
            "rank_pattern": {r"layers\.1\..*": 2, "q_proj": 16, "^model.layers.0.mlp.up_proj": 1},
            "alpha_pattern": {"self_attn.q_proj": 3, r"layers\.0\..*": 64, "q_proj": 99},
        },
    ),
    "patterns with rslora": (
        "llama", {"target_modules": ALL, "rank_pattern": {"v_proj": 9}, "alpha_pattern": {"v_proj": 5},
                  "use_rslora": True},
    ),
    "gaussian": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
    "orthogonal": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}),
    "tied": ("llama tied", {"target_modules": "all-linear"}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "fused with rows in another order": ("gpt bigcode with a key head each", {"target_modules": ["c_attn", "c_proj"]}),
    "starcoder2": ("starcoder2", {"target_modules": [*ATTENTION, "c_fc", "c_proj"]}),
    "qwen3": ("qwen3", {"target_modules": "all-linear"}),
    "gemma 3": ("gemma 3 with one key head", {"target_modules": ALL}),
    "mpt": ("mpt", {"target_modules": ["Wqkv", "out_proj", "up_proj", "down_proj"]}),
    "experts' attention": ("mixtral", {"target_modules": ATTENTION}),
    "shared expert": ("qwen2 moe", {"target_modules": [*ATTENTION, "shared_expert.up_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_equals_the_one_peft_saved(case, tmp_path):
    name, fields = CASES[case]
    model, spec = model_of(name)
    layers = write(tmp_path, model, **fields)
    adapter = read(tmp_path, spec)
    assert same(adapter, layers)
    assert adapter.rank == max(len(a) for a, _, _ in layers.values())
    assert (adapter.name, adapter.path) == ("tuned", str(tmp_path))


PARTS = ["q_proj", "up_proj", "self_attn.v_proj", "layers.1", "1", "model.layers.0.mlp.up_proj", "lm_head", "mlp"]
PATTERNS = [*PARTS, r"layers\.[12]\..*", ".*", "^model.*v_proj", ".*_proj", r"(q|v)_proj", "mlp..*"]
MODULES = [f"model.layers.{at}.{name}" for at in (0, 1, 12) for name in ("self_attn.q_proj", "self_attn.v_proj",
           "mlp.up_proj", "mlp.experts.1.up_proj")] + ["lm_head"]  # fmt: skip
NAMES = st.lists(st.sampled_from(PARTS), max_size=3) | st.sampled_from(PATTERNS)
FIELDS = st.fixed_dictionaries(
    {
        "target_modules": st.lists(st.sampled_from(PARTS), min_size=1, max_size=3) | st.sampled_from(PATTERNS),
        "exclude_modules": NAMES,
        "rank_pattern": st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 64), max_size=4),
        "alpha_pattern": st.dictionaries(st.sampled_from(PATTERNS), st.integers(0, 64), max_size=4),
        "layers_to_transform": st.sampled_from([None, 0, 1, [], [1], [0, 12]]),
        "layers_pattern": st.none() | st.sampled_from(["layers", ["layers"], ["experts", "layers"], [], ["h"]]),
    }
)


@given(FIELDS)
@settings(max_examples=75, deadline=None)
def test_configs_mean_the_same_as_in_peft(fields):
    import peft
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
    from peft.utils.other import get_pattern_key

    if isinstance(fields["target_modules"], str) or fields["layers_to_transform"] is None:
        fields |= {"layers_to_transform": None, "layers_pattern": None}  # PEFT refuses anything else
    theirs = peft.LoraConfig(r=8, lora_alpha=4, **fields)
    ours = AdapterConfig.of({"r": 8, "lora_alpha": 4, **fields}).about(MODULES)
    for module in MODULES:
        rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, module), 8)
        alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern, module), 4)
        assert (ours.rank_of(module), ours.scale_of(module)) == (rank, alpha / rank)
        found = check_target_module_exists(theirs, module)
        assert ours.names(module) == (bool(found) and not isinstance(found, _ExcludedModule))


@pytest.fixture(scope="module")
def llama():
    return model_of("llama")


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """Return an adapter of all layers but the head, with PEFT's layers of it."""
    folder = tmp_path_factory.mktemp("adapter")
    return folder, write(folder, llama[0], target_modules=ALL)


def test_a_patterned_rank_is_no_other(llama, saved):
    """Control: the comparison notices one changed scale and one changed number."""
    adapter, (_, layers) = read(saved[0], llama[1]), saved
    name, (a, b, scale) = next(iter(layers.items()))
    assert same(adapter, layers)
    assert not same(adapter, layers | {name: (a, b, scale * 2)})
    assert not same(adapter, layers | {name: (a, b * 1.0001, scale)})
    assert not same(adapter, layers | {f"{name}2": (a, b, scale)})


def test_factors_are_in_the_dtype_of_the_adapters(llama, saved):
    adapter, (_, layers) = read(saved[0], llama[1], dtype=torch.bfloat16), saved
    assert same(adapter, {name: (a.bfloat16(), b.bfloat16(), scale) for name, (a, b, scale) in layers.items()})


@pytest.fixture
def edit(llama, saved, tmp_path):
    """Return a function that reads a changed copy of ``saved``.

    It changes ``fields`` of the config, and ``tensors`` (None: dropped).
    """
    places = (tmp_path / str(number) for number in count())

    def edited(fields=None, tensors=None, **options):
        folder = shutil.copytree(saved[0], next(places))
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **(fields or {})}))
        changed = {**load_file(folder / "adapter_model.safetensors"), **(tensors or {})}
        kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
        save_file(kept, folder / "adapter_model.safetensors")
        return read(folder, llama[1], **options)

    return edited


Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


def test_the_digest_depends_only_on_computed_numbers(edit, saved):
    own = edit().digest
    tensor = load_file(saved[0] / "adapter_model.safetensors")[B]
    nudged = tensor.clone()
    nudged[-1, -1] *= 1 + 2.0**-20
    assert edit({"lora_dropout": 0.5}).digest == own == edit(tensors={B: tensor.clone()}).digest
    others = [
        edit({"lora_alpha": 9}), edit({"use_rslora": True}), edit({"alpha_pattern": {"q_proj": 4}}),
        edit(tensors={B: nudged}), edit({"exclude_modules": [Q[17:]]}, {A: None, B: None}),
    ]  # fmt: skip
    assert len({own, *(each.digest for each in others)}) == 6
    assert edit(dtype=torch.bfloat16).digest == own


WRONG = {
    "half missing": ({}, {B: None}, "q_proj has no lora_B.weight"),
    "no tensors": ({}, {A: None, B: None}, "target_modules names modules that have no tensors: model.layers.0.self_a"),
    "not named": ({"target_modules": ["k_proj"]}, {}, "target_modules does not name it"),
    "not in this layer": ({"layers_to_transform": [0]}, {}, "layers.1.*target_modules does not name it"),
    "unknown module": (
        {}, {f"{Q}x.lora_A.weight": torch.ones(4, 96), f"{Q}x.lora_B.weight": torch.ones(128, 4)},
        "projx cannot be adapted.*down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj",
    ),
    "unknown layer": (
        {}, {A.replace("0", "7"): torch.ones(4, 96), B.replace("0", "7"): torch.ones(128, 4)},
        "layers.7.*cannot be adapted",
    ),
    "rank of the config": ({"r": 8}, {}, r"has shape \[4, 160\], but .* rank 8 of the config need \[8, 160\]"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 3}}, {}, "rank 3 of the config"),
    "rank of one half": ({}, {B: torch.ones(128, 5)}, r"q_proj.lora_B.weight has shape \[128, 5\]"),
    "inputs": ({}, {A: torch.ones(4, 95)}, r"need \[4, 96\]"),
    "outputs": ({}, {B: torch.ones(127, 4)}, r"need \[128, 4\]"),
    "transposed": ({}, {A: torch.ones(96, 4)}, r"need \[4, 96\]"),
    "one dimension": ({}, {A: torch.ones(0)}, r"has shape \[0\]"),
    "NaN": ({}, {B: torch.full((128, 4), torch.nan)}, "lora_B.weight is not finite"),
    "infinity": ({}, {A: torch.full((4, 96), torch.inf)}, "lora_A.weight is not finite"),
    "a scale": ({"lora_alpha": 1e300}, {}, r"lora_alpha 1e\+300 scales .* by 2.5e\+299, beyond the range"),
    "a scale of a pattern": ({"alpha_pattern": {"q_proj": -2e39}}, {}, r"lora_alpha -2e\+39 scales .* by -5e\+38"),
    "a scale of large numbers": ({"lora_alpha": 4e4}, {B: torch.full((128, 4), 1e35)}, "lora_alpha 40000 scales"),
    "whole numbers": ({}, {A: torch.ones(4, 96, dtype=torch.int8)}, "is of type I8"),
    "DoRA": ({}, {f"{Q}.lora_magnitude_vector": torch.ones(128)}, "belongs to DoRA"),
    "bias of B": ({}, {f"{Q}.lora_B.bias": torch.ones(128)}, "lora_B.bias is a bias"),
    "bias of the base": ({}, {f"{Q}.base_layer.bias": torch.ones(128)}, "is a whole weight"),
    "whole weight": ({}, {"base_model.model.lm_head.weight": torch.ones(40, 96)}, "is a whole weight"),
    "larger vocabulary": (
        {}, {"base_model.model.lm_head.base_layer.weight": torch.ones(48, 96)}, "resized vocabulary",
    ),
    "half of an embedding": (
        {"target_modules": ["embed_tokens"]},
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 199)},
        "embed_tokens has no lora_embedding_B",
    ),
    "adapter's name in names": ({}, {f"{Q}.lora_A.default.weight": torch.ones(4, 96)}, "not named as PEFT names it"),
    "without the prefix": ({}, {A.replace("base_model.model.", ""): torch.ones(4, 96)}, "lora_A.weight is not named"),
    "DoRA in the config": ({"use_dora": True}, {}, "adapter_config.json: use_dora is set: DoRA"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_do_not_fit_are_refused(case, edit):
    fields, tensors, message = WRONG[case]
    with pytest.raises(AdapterError, match=f"adapter 'tuned' in .*{message}") as error:
        edit(fields, tensors)
    assert (error.value.status, error.value.param) == (400, "lora_path")


def test_the_largest_rank(edit):
    assert edit(max_rank=4).rank == 4
    with pytest.raises(AdapterError, match=r"rank 4, but at most 3 is served \(--max-lora-rank\)"):
        edit(max_rank=3)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_not_opened(name, llama, saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    (folder / "adapter_model.safetensors").rename(folder / name)
    with pytest.raises(AdapterError, match=f"{name} is a pickle"):
        read(folder, llama[1])


def test_folders_that_hold_no_adapter(llama, saved, tmp_path):
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        read(tmp_path, llama[1])
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    (folder / "adapter_model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(AdapterError, match="adapter 'tuned' in"):
        read(folder, llama[1])
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"holds no adapter_model\.safetensors"):
        read(folder, llama[1])


def tensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "cut off": b"\x09",
    "a header longer than the file": tensors({}, length=2**63),
    "the longest header that may be": tensors({"a": F32}, bytes(8), length=HEADER_BYTES + 1),
    "numbers in two tensors": tensors({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12)),
    "a negative shape": tensors({"a": F32 | {"shape": [-2]}}, bytes(8)),
    "a shape that overflows": tensors({"a": F32 | {"shape": [2**40, 2**40]}}, bytes(8)),
    "offsets backwards": tensors({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8)),
    "offsets beyond the end": tensors({"a": F32}),
    "more than tensors": tensors({"a": F32}, bytes(80)),
    "a hundred thousand dimensions": tensors({"a": F32 | {"shape": [1] * 100_000, "data_offsets": [0, 4]}}, bytes(4)),
    "a name without an end": tensors({"a" * 1_000_000: F32}, bytes(8)),
    "no object": tensors([1]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_headers_that_lie_are_errors_of_the_adapter(what, llama, saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    (folder / "adapter_model.safetensors").write_bytes(HOSTILE[what])
    with pytest.raises(AdapterError, match="adapter 'tuned' in") as refused:
        read(folder, llama[1])
    assert len(refused.value.message) <= 2000


def test_more_names_than_a_model_has_are_not_listed(llama, saved, tmp_path, monkeypatch):
    """A refusal does not list more names than a model has: the list would hold up all requests."""
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    names = {f"base_model.model.a.{number}": F32 | {"data_offsets": [0, 0]} for number in range(FEW_TENSORS)}
    (folder / "adapter_model.safetensors").write_bytes(tensors(names))
    monkeypatch.setattr(adapter, "open_tensors", None)
    with pytest.raises(AdapterError, match=r"names up to 10,001 tensors; an adapter of this model has 10,000 at most"):
        read(folder, llama[1])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_pipes_devices_and_folders_are_not_opened(name, kind, llama, saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    (folder / name).unlink()
    {"a pipe": os.mkfifo, "a device": partial(os.symlink, "/dev/zero"), "a folder": os.mkdir}[kind](folder / name)
    with pytest.raises(AdapterError, match=f"{name} cannot be read: it is {kind}"):
        read(folder, llama[1])


@pytest.mark.parametrize(
    "fields",
    [{"lora_alpha": 10**400}, {"r": 10**30}, {"target_modules": ["x" * 3_000_000, 5]}, {"x" * 1_000_000: 1},
     {"padding": "x" * (5 << 20)}, {"rank_pattern": {"(" * 3000: 4}}],
    ids=lambda fields: next(iter(fields))[:20],
)  # fmt: skip
def test_configs_without_an_end_are_short_errors(fields, llama, saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    with pytest.raises(AdapterError, match="adapter 'tuned' in") as refused:
        read(folder, llama[1])
    assert len(refused.value.message) <= 2000


def test_a_file_written_to_later_changes_nothing(llama, saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    adapter = read(folder, llama[1])
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    assert same(adapter, saved[1])


def stacked(folder, **fields):
    """Save an adapter of the stacked experts of a small model.

    Returns the model's spec, and PEFT's change of each parameter.
    """
    import peft

    model, spec = model_of("mixtral")
    torch.manual_seed(0)
    made = peft.get_peft_model(model, peft.LoraConfig(**{"r": 3, "init_lora_weights": False, **fields}))
    made.save_pretrained(folder)
    wrappers = [each for each in made.modules() if isinstance(each, peft.tuners.lora.ParamWrapper)]
    return spec, {
        (wrapper.parameter_name, layer): wrapper.get_delta_weight("default").detach()
        for name in ("gate_up_proj", "down_proj")
        for layer, wrapper in enumerate(each for each in wrappers if each.parameter_name == name)
    }


STACKS = {
    "both": {"target_modules": [], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
    "one layer": {"target_modules": ["q_proj"], "target_parameters": ["model.layers.0.mlp.experts.gate_up_proj"]},
    "patterns": {
        "target_modules": [], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
        "rank_pattern": {"experts.down_proj": 7}, "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 5},
    },
    "old names": {"target_modules": ["w1", "w2", "w3"]},
}  # fmt: skip


@pytest.mark.parametrize("case", STACKS)
def test_a_stack_of_experts_adds_the_deltas_of_peft(case, tmp_path):
    spec, deltas = stacked(tmp_path, **STACKS[case])
    factors, checked = read(tmp_path, spec).factors, 0
    for (parameter, layer), expected in deltas.items():
        for expert, right in enumerate(expected):
            names = ("w1", "w3") if parameter == "gate_up_proj" else ("w2",)
            parts = [factors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"] for name in names]
            found = torch.cat([part.b @ part.a * part.scale for part in parts])
            torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
            checked += len(parts)
    assert checked == sum("experts" in name for name in factors) > 0


def test_a_weight_that_is_listed_as_a_parameter(tmp_path):
    """PEFT lists the router so if all linear layers of a model with experts are adapted."""
    patterns = {"rank_pattern": {"gate.weight": 2}, "alpha_pattern": {r"layers\.1\.mlp\.gate\.weight": 5}}
    spec, _ = stacked(tmp_path, target_modules=["q_proj"], target_parameters=["gate.weight"], **patterns)
    found = read(tmp_path, spec).factors
    routers = [part for name, part in found.items() if name.endswith("block_sparse_moe.gate")]
    assert [part.a.shape[0] for part in routers] == [2] * len(routers)
    assert [part.scale for part in routers[:2]] == [8 / 2, 5 / 2]
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}, file)
    with pytest.raises(AdapterError, match=r"have no tensors: model.layers.1.block_sparse_moe.gate.weight"):
        read(tmp_path, spec)


def test_stacks_that_do_not_fit_are_refused(tmp_path):
    spec, _ = stacked(tmp_path, **STACKS["both"])
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, fields = load_file(file), json.loads(config.read_text())
    with pytest.raises(AdapterError, match="experts are not served with this device"):
        read_adapter("tuned", str(tmp_path), spec, MAX_RANK, torch.float32, without_experts="with this device")
    with pytest.raises(AdapterError, match="rank 3, but at most 2 is served"):
        read(tmp_path, spec, max_rank=2)
    config.write_text(json.dumps(fields | {"target_parameters": ["experts.down_proj"]}))
    with pytest.raises(AdapterError, match=r"gate_up_proj has tensors, but .* target_parameters does not name it"):
        read(tmp_path, spec)
    config.write_text(json.dumps(fields | {"target_parameters": [*fields["target_parameters"], "router.weight"]}))
    with pytest.raises(AdapterError, match=r"target_parameters names parameters that have no tensors: router\.weight"):
        read(tmp_path, spec)
    config.write_text(json.dumps(fields))
    save_file({name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}, file)
    with pytest.raises(AdapterError, match=r"have no tensors: model.layers.1.mlp.experts.down_proj"):
        read(tmp_path, spec)
    swapped = {name: tensor.T.contiguous() for name, tensor in tensors.items()}
    save_file(swapped, file)
    with pytest.raises(AdapterError, match="but the model needs"):
        read(tmp_path, spec)


def test_modules_are_found_by_names_of_code_and_checkpoint(tmp_path):
    import transformers

    save_llava(tmp_path / "base")
    model = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    spec = read_spec(json.loads((tmp_path / "base" / "config.json").read_text()))
    layers = write(tmp_path / "text", model, target_modules=r".*language_model.*(q_proj|down_proj)|lm_head")
    names = {name: name.replace("model.language_model.", "model.") for name in layers}
    assert len(names) == 5 and names.keys() != {*names.values()}
    assert same(read(tmp_path / "text", spec), {names[name]: layer for name, layer in layers.items()})
    write(tmp_path / "both", model, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match="belongs to the vision tower"):
        read(tmp_path / "both", spec)


def test_a_tied_head_and_its_table_have_separate_factors(tmp_path):
    """A tied head and the table have factors of their own.

    PEFT saves the base model's table beside them.
    """
    model, spec = model_of("llama tied")
    layers = write(tmp_path, model, target_modules=["q_proj", "lm_head", "embed_tokens"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert any(name.endswith("embed_tokens.base_layer.weight") for name in tensors)
    assert {"lm_head", "model.embed_tokens"} <= layers.keys()
    assert same(read(tmp_path, spec), layers)


def test_ensured_ties_are_refused_by_name(tmp_path):
    model, spec = model_of("llama tied")
    write(tmp_path, model, target_modules=["embed_tokens"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "ensure_weight_tying": True}))
    with pytest.raises(AdapterError, match="ensure_weight_tying is set"):
        read(tmp_path, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_magnitude_is_found_by_its_bits(dtype):
    """The reference is torch's; a number that is not finite is never missed, wherever it is."""
    numbers = torch.randn(64, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    numbers[0, 0] = -0.0
    assert largest_magnitude(numbers) == float(numbers.abs().max())
    assert largest_magnitude(-numbers) == float(numbers.abs().max())
    for bad in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        changed = numbers.clone()
        changed[-1, -1] = bad
        assert not math.isfinite(largest_magnitude(changed))
