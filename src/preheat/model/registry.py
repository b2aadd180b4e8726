"""Which architectures are supported, and how each differs from the others: data only.

A new architecture is one more row here; it needs code elsewhere only where its mathematics differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Flag = bool | str
"""A fact of the family, or the name of the config field that decides it (absent: false)."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets an architecture apart.

    ``window_switch`` names the config field without which ``sliding_window`` is not in force, and
    ``window_first_layer`` the one that tells the first layer that has it. ``defaults`` are what an absent config
    field means, and are those of the reference implementation's own config class.
    """

    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: bool = False
    sliding_window: bool = False
    window_switch: str | None = None
    window_first_layer: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        sliding_window=True,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        sliding_window=True,
        window_switch="use_sliding_window",
        window_first_layer="max_window_layers",
        defaults=_QWEN_DEFAULTS,
    ),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        sliding_window=True,
        window_switch="use_sliding_window",
        window_first_layer="max_window_layers",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
}
