"""Llama (2, 3, 3.1 and later) and Mistral."""

from __future__ import annotations

from preheat.model.config import Config
from preheat.model.families.common import llama_like
from preheat.model.specs import ModelSpec


def llama(config: Config) -> ModelSpec:
    """No sliding windows; all biases by the config."""
    config = config.with_defaults(max_position_embeddings=2048)
    bias = config.flag("attention_bias")
    return llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(config: Config) -> ModelSpec:
    """No biases; a sliding window by the config."""
    config = config.with_defaults(sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131072)
    return llama_like(config, windows=config.windows())
