"""Qwen2 (and 2.5) and Qwen3, dense."""

from __future__ import annotations

from preheat.model.config import Config
from preheat.model.families.common import llama_like
from preheat.model.specs import ModelSpec

_DEFAULTS = {
    "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768,
}  # fmt: skip


def qwen2(config: Config) -> ModelSpec:
    """Query, key and value biases in every model."""
    config = config.with_defaults(**_DEFAULTS)
    return llama_like(config, windows=_windows(config), qkv_bias=True)


def qwen3(config: Config) -> ModelSpec:
    """Query and key heads are normed; attention's biases by the config."""
    config = config.with_defaults(**_DEFAULTS, head_dim=128)
    bias = config.flag("attention_bias")
    return llama_like(config, windows=_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _windows(config: Config) -> tuple[int | None, ...]:
    return config.windows(used=config.flag("use_sliding_window"), first_layer="max_window_layers")
