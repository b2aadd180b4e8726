"""Every format of quantized checkpoints, written by other libraries' rules, gives transformers' logits.

transformers runs the dequantized weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from preheat.errors import ModelError
from tests.cpu import quantized
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.quantized import Kind, awq, compressed, fp4, fp8, gptq, inputs_of, scheme, symmetric
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens
from tests.pure.test_quantization_spec import ct, spec_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

TOKEN, GROUP = inputs_of("token"), {"group_size": 32}
KINDS: dict[str, Kind] = {
    "compressed-tensors, tensor": compressed("float-quantized", scheme(8, "float", "tensor", inputs_of("tensor"))),
    "compressed-tensors, channel": compressed("float-quantized", scheme(8, "float", "channel", TOKEN)),
    "compressed-tensors, static": compressed(
        "float-quantized", scheme(8, "float", "channel", inputs_of("tensor", False))
    ),
    "compressed-tensors, block": compressed(
        "float-quantized",
        scheme(8, "float", "block", inputs_of("group", group_size=128), block_structure=[128, 128]),
    ),
    "compressed-tensors, weights only": compressed("float-quantized", scheme(8, "float", "channel")),
    "compressed-tensors, int4": compressed("pack-quantized", scheme(4, "int", "group", **GROUP)),
    "compressed-tensors, int4 asymmetric": compressed(
        "pack-quantized", scheme(4, "int", "group", actorder="weight", **GROUP | {"symmetric": False})
    ),
    "compressed-tensors, int8": compressed("pack-quantized", scheme(8, "int", "channel")),
    "mxfp4": fp4("mxfp4-pack-quantized"),
    "nvfp4": fp4("nvfp4-pack-quantized"),
    "fp8": fp8(),
    "fp8, static": fp8(static=True),
    "fp8, block": fp8(block=True),
    "awq": awq(),
    "gptq": gptq(),
    "gptq, version 2": gptq(version=2),
    "gptq, desc_act": gptq(desc_act=True),
    "gptq, int8 per channel": gptq(bits=8, group_size=-1),
}
MODEL = ("Llama", {"num_hidden_layers": 2, "num_key_value_heads": 2})
MOE = ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2})


def made(folder: Path, kind: Kind, model: Any = MODEL, config: dict[str, Any] | None = None) -> list[str]:
    """Write a quantized checkpoint, and its dequantized weights in "plain"."""
    save_checkpoint(model, folder / "plain")
    return quantized.quantize_checkpoint(folder / "plain", kind, folder / "quantized", config)


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_the_dequantized_reference(name: str, tmp_path: Path) -> None:
    kind, tokens, modules = KINDS[name], random_tokens(40), made(tmp_path, KINDS[name])
    assert len(modules) == 2 * 7
    right = quantized.reference_logits(tmp_path / "plain", tokens, kind, modules)
    got = logits_of(open_decoder(tmp_path / "quantized"), tokens)
    error = error_at_each_position(got, right)
    if kind.inputs is None:
        assert error.max() <= 1e-5
        assert torch.equal(got, logits_of(open_decoder(tmp_path / "plain"), tokens))
    else:  # a sum in another order may round an activation to the code beside it
        assert error.median() <= 2e-3
        assert error.max() <= 3e-2
        unrounded = logits_of(open_decoder(tmp_path / "plain"), tokens)
        assert error_at_each_position(unrounded, right).median() > 1e-2  # the tolerance is below the effect of rounding


@pytest.mark.parametrize("name", ["gptq, desc_act", "compressed-tensors, weights only", "awq", "nvfp4"])
def test_bfloat16_has_the_bits_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    made(tmp_path, KINDS[name])
    models = [open_decoder(tmp_path / folder, torch.bfloat16) for folder in ("quantized", "plain")]
    one, other = (logits_of(model, random_tokens(40)) for model in models)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["compressed-tensors, weights only", "mxfp4", "awq", "gptq"])
def test_experts_of_every_format(name: str, tmp_path: Path) -> None:
    kind, tokens = KINDS[name], random_tokens(40)
    assert len(made(tmp_path, kind, MOE)) == 2 * (4 + 4 * 3)
    right = quantized.reference_logits(tmp_path / "plain", tokens, kind, [])
    got = logits_of(open_decoder(tmp_path / "quantized"), tokens)
    assert error_at_each_position(got, right).max() <= 1e-5


@pytest.mark.parametrize("name", ["fp8, block", "fp8, static", "compressed-tensors, channel"])
def test_float8_experts_are_close_to_their_unquantized_model(name: str, tmp_path: Path) -> None:
    made(tmp_path, KINDS[name], MOE)
    tokens = random_tokens(40)
    models = [open_decoder(tmp_path / folder) for folder in ("quantized", "plain")]
    one, other = (logits_of(model, tokens) for model in models)
    assert error_at_each_position(one, other).median() < 0.2


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    stored = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    made(tmp_path, fp8(static=True))
    by_config = logits_of(open_decoder(tmp_path / "quantized"), random_tokens(40))
    config = tmp_path / "quantized" / "config.json"
    whole = json.loads(config.read_text())
    del whole["quantization_config"]
    config.write_text(json.dumps(whole))
    (tmp_path / "quantized" / "hf_quant_config.json").write_text(json.dumps({"quantization": stored}))
    assert torch.equal(logits_of(open_decoder(tmp_path / "quantized"), random_tokens(40)), by_config)


NAMES = [
    "lm_head", "Linear", "model.layers.1", "model.layers.0.mlp", "model.layers.0.mlp.down_proj", "down_proj",
    "mlp.down_proj", "re:.*down_proj", "re:model.layers.1", "re:layers", "re:.*_proj$", "*down_proj",
    "model.layers.1.self_attn.o_proj",
]  # fmt: skip


@given(st.lists(st.sampled_from(NAMES), max_size=3), st.sampled_from(NAMES))
def test_patterns_of_names_match_as_in_the_library(ignored: list[str], target: str) -> None:
    from compressed_tensors.utils.match import (
        is_match,  # here: it takes seconds, and most processes of a run need it never
    )

    linear = torch.nn.Linear(1, 1)
    others = ["re:.*(q|k|v|gate|up)_proj", "lm_head"]
    config = ct(ignore=[*ignored, *others], targets=[target])
    for layer, end in ((layer, end) for layer in (0, 1) for end in ("self_attn.o_proj", "mlp.down_proj")):
        spec = spec_of(config).layers[layer]
        found = (spec.mlp.down if "mlp" in end else spec.attention.o).scheme  # type: ignore[union-attr]
        means = is_match(f"model.layers.{layer}.{end}", linear, target, ignored)
        assert (found is not None) == means, (layer, end)


BESIDE = {
    "quantize_config.json": gptq(),
    "quant_config.json": awq(),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_quantization_file_beside_the_config_is_read(name: str, tmp_path: Path) -> None:
    """A file beside the config, as AutoGPTQ and AutoAWQ write it, sets the method.

    The config comes first. The file does not name the method.
    """
    kind = BESIDE[name]
    made(tmp_path, kind)
    by_config = logits_of(open_decoder(tmp_path / "quantized"), random_tokens(40))
    config, beside = tmp_path / "quantized" / "config.json", tmp_path / "quantized" / name
    beside.write_text(json.dumps({"quant_method": "bitsandbytes"}))
    assert torch.equal(logits_of(open_decoder(tmp_path / "quantized"), random_tokens(40)), by_config)
    whole = json.loads(config.read_text())
    del whole["quantization_config"]
    config.write_text(json.dumps(whole))
    beside.write_text(json.dumps({key: value for key, value in kind.config.items() if key != "quant_method"}))
    assert torch.equal(logits_of(open_decoder(tmp_path / "quantized"), random_tokens(40)), by_config)


SYMMETRIC = {
    f"{bits} bits, {stored} stored, {said}": symmetric(bits, stored, **said)
    for bits, stored, said in [
        (4, 8, {"sym": True}), (4, 7, {"sym": True}), (4, 8, {"sym": True, "checkpoint_format": "gptq"}),
        (4, 7, {"sym": True, "checkpoint_format": "gptq_v2"}), (4, 8, {"group_size": -1}),
        (4, 8, {"sym": True, "desc_act": True}), (8, 128, {"sym": True, "group_size": 16}),
        (8, 127, {"checkpoint_format": "gptq_v2"}),
    ]
}  # fmt: skip


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_zero_point_of_a_symmetric_file_is_the_half(name: str, tmp_path: Path) -> None:
    """A symmetric file's zero point is the half of its range.

    That holds for each version of files, and for files without a version.
    """
    made(tmp_path, SYMMETRIC[name])
    one, other = (logits_of(open_decoder(tmp_path / folder), random_tokens(40)) for folder in ("quantized", "plain"))
    assert torch.equal(one, other)


def test_symmetric_experts(tmp_path: Path) -> None:
    made(tmp_path, symmetric(4, 8, sym=True), MOE)
    one, other = (logits_of(open_decoder(tmp_path / folder), random_tokens(40)) for folder in ("quantized", "plain"))
    assert torch.equal(one, other)


def test_a_zero_point_that_no_symmetric_file_has_is_named(tmp_path: Path) -> None:
    """A symmetric file with one other zero point is refused by name.

    An asymmetric file is read as it is.
    """
    zeros, kind = "model.layers.1.mlp.up_proj.qzeros", symmetric(4, 7, sym=True)
    made(tmp_path, kind)
    changed(tmp_path, zeros, lambda words: words.index_fill(1, torch.tensor([0]), 0x77777779))
    with pytest.raises(ModelError, match=r"up_proj.qzeros holds 9, .* symmetric: .* 7 .*gptq.* or 8 .*sym to false"):
        open_decoder(tmp_path / "quantized")
    asymmetric = {"quantization_config": kind.config | {"sym": False}}
    made(tmp_path, kind, config=asymmetric)
    before = logits_of(open_decoder(tmp_path / "quantized"), random_tokens(40))
    changed(tmp_path, zeros, lambda words: words.index_fill(1, torch.tensor([0]), 0x77777779))
    assert not torch.equal(logits_of(open_decoder(tmp_path / "quantized"), random_tokens(40)), before)


ORDERED = {
    "phi4 mini": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "qwen3.5": {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj",
                "o_proj", "gate_proj", "up_proj", "down_proj"},
    "granite 4 h": {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"},
}  # fmt: skip
"""Models with rows in another order, and their modules."""

WIDER: dict[str, dict[str, int]] = {
    "qwen3.5": {"linear_num_value_heads": 8},
    "granite 4 h": {"mamba_n_heads": 24, "mamba_d_head": 8, "shared_intermediate_size": 64},
}  # fmt: skip
"""Sizes for words of eight numbers."""


@pytest.mark.parametrize("model", ORDERED)
@pytest.mark.parametrize("name", ["fp8", "gptq"])
def test_rows_that_are_loaded_in_another_order(name: str, model: str, tmp_path: Path) -> None:
    """Fused parts are loaded in another order of rows.

    The models rotate a part of each head; Qwen3.5 has gates beside the queries, and layers with states; Granite 4 H has
    one module for all inputs of a state.
    """
    kind, tokens = KINDS[name], random_tokens(40)
    family, sizes = MODELS[model]
    modules = made(tmp_path, kind, (family, sizes | WIDER.get(model, {})))
    assert {module.rpartition(".")[2] for module in modules} == ORDERED[model]
    right = quantized.reference_logits(tmp_path / "plain", tokens, kind, modules)
    error = error_at_each_position(logits_of(open_decoder(tmp_path / "quantized"), tokens), right)
    assert error.median() <= (2e-3 if kind.inputs else 1e-5)


def changed(folder: Path, name: str, change: Any) -> None:
    tensors = load_file(folder / "quantized" / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "quantized" / "model.safetensors")


def test_an_index_that_cannot_be_is_named(tmp_path: Path) -> None:
    made(tmp_path, gptq(desc_act=True))
    changed(tmp_path, "model.layers.0.self_attn.k_proj.g_idx", lambda index: index.flip(0))
    with pytest.raises(ModelError, match=r"0\.self_attn\.k_proj\.g_idx must equal"):
        open_decoder(tmp_path / "quantized")
    made(tmp_path, gptq())
    changed(tmp_path, "model.layers.1.mlp.up_proj.g_idx", lambda index: index.flip(0))
    with pytest.raises(ModelError, match=r"up_proj\.g_idx is not in order, though desc_act is false"):
        open_decoder(tmp_path / "quantized")


def test_a_code_that_is_no_number_is_named(tmp_path: Path) -> None:
    made(tmp_path, fp8())
    bad = "model.layers.1.mlp.up_proj.weight"
    changed(
        tmp_path, bad, lambda codes: torch.cat((torch.full_like(codes[:1].float(), torch.nan).to(codes), codes[1:]))
    )
    with pytest.raises(ModelError, match=f"{bad} .* is not finite: 96 of"):
        open_decoder(tmp_path / "quantized")


@pytest.mark.parametrize("name", ["fp8, block", "gptq, desc_act", "compressed-tensors, int4 asymmetric", "awq"])
def test_dummy_weights(name: str, tmp_path: Path) -> None:
    made(tmp_path, KINDS[name])
    logits = logits_of(open_decoder(tmp_path / "quantized", load_format="dummy"), random_tokens(40))
    assert logits.isfinite().all()
    assert logits.std() > 0.1
