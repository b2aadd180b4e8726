"""Four-bit floats: numbers and scales are exact, and files that cannot be read are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import ModelError
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import Reading, load_weights
from preheat.ops import fp4
from tests.cpu.checkpoints import save_checkpoint
from tests.cpu.quantized import quantize_checkpoint
from tests.cpu.test_model_families import logits_of, open_decoder, random_tokens
from tests.cpu.test_quantized_checkpoints import KINDS, MODEL

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(8, 32)


def test_codes_are_twice_the_numbers_of_the_library() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    right = unpack_fp4_from_uint8(BYTES, 8, 64, dtype=torch.float32)
    assert torch.equal(fp4.unpacked(BYTES) / 2, right)


def test_codes_are_packed_without_loss() -> None:
    codes = fp4.codes_of(torch.arange(16))
    assert torch.equal(fp4.codes_of(fp4.nibbles_of(codes)), codes)
    assert torch.equal(fp4.nearest(codes.float()), codes)


def test_exponents_are_exact_powers_halved() -> None:
    """The library's powers are bfloat16, which has no number for the least exponent's half."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale

    exponents = torch.arange(255, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(fp4.powers(exponents)[1:] * 2, decompress_mx_scale(exponents)[1:].float())
    assert fp4.powers(exponents)[0] == 2.0**-128


def changed(folder: Path, name: str, number: int) -> Path:
    """Write another ``number`` to the first place of a tensor of the checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fp4")
    for name in ("mxfp4", "nvfp4"):
        save_checkpoint(MODEL, made / "plain")
        quantize_checkpoint(made / "plain", KINDS[name], made / name)
    return made


@pytest.mark.parametrize(("name", "tensor", "number", "message"), [
    ("mxfp4", "weight_scale", 255, "weight_scale holds 255, which is no scale"),
    ("nvfp4", "weight_global_scale", 0, "weight_global_scale must be positive, got 0.0"),
])  # fmt: skip
def test_a_scale_that_is_none_is_named(name: str, tensor: str, number: int, message: str, folder: Path) -> None:
    changed(folder / name, f"model.layers.0.self_attn.q_proj.{tensor}", number)
    with pytest.raises(ModelError, match=message):
        open_decoder(folder / name)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("group_size", 64, "group_size 64 is not supported; supported: 32"),
    ("symmetric", False, "symmetric False is not supported"),
    ("strategy", "channel", "strategy 'channel' is not supported; supported: group"),
])  # fmt: skip
def test_other_blocks_are_refused(field: str, value: object, message: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "mxfp4" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["a"]["weights"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        open_decoder(tmp_path)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_dummy_weights_have_the_size_of_other_dummy_weights(name: str, folder: Path) -> None:
    spec = read_spec(read_config(folder / name))
    weights = load_weights(spec, folder / name, torch.float32, CpuBackend(), Reading("dummy"))
    numbers, _ = weights.layers[0].mlp.down.stored()
    assert 0 < float(numbers.abs().max()) <= 6 * 2.0**-10


def test_a_scale_of_another_block_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(MODEL, tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", KINDS["mxfp4"], tmp_path / "codes")
    right = logits_of(open_decoder(tmp_path / "plain"), random_tokens(8))
    powers = fp4.powers
    monkeypatch.setattr(fp4, "powers", lambda exponents: powers(exponents.roll(1, 1)))
    assert not torch.allclose(logits_of(open_decoder(tmp_path / "codes"), random_tokens(8)), right)
