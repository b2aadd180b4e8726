"""Every format of quantized checkpoints, written by others' rules, says what transformers says of what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat.errors import ModelError
from tests.cpu import quantized
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.quantized import Kind, awq, compressed, fp8, gptq, inputs_of, scheme
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that write the checkpoints

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
    """A quantized checkpoint, and in "plain" what it stands for."""
    save_checkpoint(model, folder / "plain")
    return quantized.quantize_checkpoint(folder / "plain", kind, folder / "quantized", config)


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_what_the_checkpoint_stands_for(name: str, tmp_path: Path) -> None:
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
        assert error_at_each_position(unrounded, right).median() > 1e-2  # what rounding does is not what is let pass


@pytest.mark.parametrize("name", ["gptq, desc_act", "compressed-tensors, weights only", "awq"])
def test_bfloat16_has_the_bits_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    made(tmp_path, KINDS[name])
    models = [open_decoder(tmp_path / folder, torch.bfloat16) for folder in ("quantized", "plain")]
    one, other = (logits_of(model, random_tokens(40)) for model in models)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["compressed-tensors, weights only", "compressed-tensors, int4", "awq", "gptq"])
def test_experts_of_every_format(name: str, tmp_path: Path) -> None:
    kind, tokens = KINDS[name], random_tokens(40)
    assert len(made(tmp_path, kind, MOE)) == 2 * (4 + 4 * 3)
    right = quantized.reference_logits(tmp_path / "plain", tokens, kind, [])
    got = logits_of(open_decoder(tmp_path / "quantized"), tokens)
    assert error_at_each_position(got, right).max() <= 1e-5


@pytest.mark.parametrize("name", ["fp8, block", "fp8, static", "compressed-tensors, channel"])
def test_experts_in_float8_are_close_to_what_they_stand_for(name: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["fp8", "gptq"])
def test_rows_that_are_loaded_in_another_order(name: str, tmp_path: Path) -> None:
    """Of Phi-4-mini, a part of whose heads turns; its parts are stored fused."""
    kind, tokens = KINDS[name], random_tokens(40)
    modules = made(tmp_path, kind, MODELS["phi4 mini"])
    assert {module.rpartition(".")[2] for module in modules} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
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
    with pytest.raises(ModelError, match=r"0\.self_attn\.k_proj\.g_idx: it differs"):
        open_decoder(tmp_path / "quantized")
    made(tmp_path, gptq())
    changed(tmp_path, "model.layers.1.mlp.up_proj.g_idx", lambda index: index.flip(0))
    with pytest.raises(ModelError, match=r"up_proj\.g_idx: it is not in order, though desc_act is false"):
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
