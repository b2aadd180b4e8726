"""Adapters of random numbers, as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write an adapter of ``modules`` into ``folder``.

    ``modules`` are outputs and inputs by name. Returns the folder. The adapter's terms are about as large as the
    outputs of the layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, (outputs, inputs) in modules.items():
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            numbers = torch.empty(shape).uniform_(-1, 1, generator=draw) * (3 / shape[1]) ** 0.5
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = numbers.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
