"""Adapters with random numbers, as PEFT would save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from preheat.model.families import read_spec
from preheat.model.files import BUNDLED_PATH, read_config


def write_adapter(folder: Path, seed: int, rank: int = 4, model: Path = BUNDLED_PATH, **fields: Any) -> Path:
    """Write an adapter of a model's attention, strong enough to change the model's answers."""
    from preheat.lora.adapter import adapted_modules

    draw = torch.Generator().manual_seed(seed)
    targets, tensors = ("q_proj", "v_proj", "o_proj"), {}
    for module, (outputs, inputs) in adapted_modules(read_spec(read_config(model))).items():
        if module.endswith(targets):
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw)
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.1 * rank, "target_modules": list(targets), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
