"""Quantized checkpoints made by rounding to nearest.

They show the least cost of a format, without anyone's calibration.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Rounded = dict[str, Tensor]


def _whole(bits: int, group: int, symmetric: bool) -> Callable[[Tensor], Rounded]:
    """Return the rounding of compressed-tensors' pack-quantized.

    A group of 0 is a whole row.
    """

    def module(weight: Tensor) -> Rounded:
        outputs, inputs = weight.shape
        parts, half = weight.float().view(outputs, -1, group or inputs), 1 << (bits - 1)
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = (torch.maximum(-low, high) / (half - 0.5)) if symmetric else (high - low) / (2 * half - 1)
        scales = scales.clamp(min=1e-8).to(torch.bfloat16)
        zeros = torch.zeros_like(low) if symmetric else (-half - low / scales.float()).round().clamp(-half, half - 1)
        codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(-half, half - 1)
        stored = {
            "weight_packed": _packed(codes.view(outputs, inputs) + half, bits), "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }  # fmt: skip
        return stored if symmetric else stored | {"weight_zero_point": _packed(zeros.t() + half, bits).t().contiguous()}

    return module


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Return whole numbers from 0 on, [rows, n], in int32 words, lowest bits first."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).view(len(numbers), -1, each)
    words = (padded << (torch.arange(each) * bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _blocks(weight: Tensor) -> Rounded:
    """Round to DeepSeek's float8: a scale for each 128 x 128."""
    wide = weight.float()
    scales = torch.stack([
        torch.stack([block.abs().amax() / 448 for block in torch.split(rows, 128, 1)])
        for rows in torch.split(wide, 128, 0)
    ])  # fmt: skip
    spread = scales.repeat_interleave(128, 0)[: wide.shape[0]].repeat_interleave(128, 1)[:, : wide.shape[1]]
    return {"weight": (wide / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _int_config(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


KINDS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Rounded]]] = {
    "fp8-block": (
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "mlp.gate"],
        },
        _blocks,
    ),
    "int8": (_int_config(8, 0, True), _whole(8, 0, True)),
    "int4-g128": (_int_config(4, 128, False), _whole(4, 128, False)),
    "int4-g32": (_int_config(4, 32, False), _whole(4, 32, False)),
}  # fmt: skip
"""By name: the ``quantization_config``, and a function from a module's weight to its tensors."""


def quantize_checkpoint(folder: Path, kind: str, out: Path) -> Path:
    """Write the checkpoint of ``folder``, quantized, to ``out``.

    Linear layers are quantized as ``kind``. Returns ``out``. ``folder`` has one file of tensors.
    """
    config, module = KINDS[kind]
    out.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if tensor.dim() != 2 or "embed" in name or base.endswith(("lm_head", "mlp.gate")):
            stored[name] = tensor
        else:
            stored |= {f"{base}.{key}": value for key, value in module(tensor).items()}
    save_file(stored, out / "model.safetensors")
    for path in folder.glob("*.json"):
        shutil.copy(path, out / path.name)
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(whole, indent=1))
    return out
