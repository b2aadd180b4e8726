"""StableLM and Jais 2: Llama with norms that subtract a mean and add a bias."""

from __future__ import annotations

from preheat.model.config import Config
from preheat.model.families.common import llama_like, squared_mlp, with_layer_norms
from preheat.model.specs import ModelSpec


def stablelm(config: Config) -> ModelSpec:
    """Norms that subtract the mean; a part of each head turns; attention and MLP may lie side by side."""
    config = config.renamed(layer_norm_epsilon="layer_norm_eps").with_defaults(
        max_position_embeddings=4096, num_key_value_heads=32, partial_rotary_factor=0.25
    )
    config.refuse("qk_layernorm")
    parallel = config.flag("use_parallel_residual")
    made = llama_like(config, qkv_bias=config.flag("use_qkv_bias"), rope=config.rope(partial=True))
    return with_layer_norms(config, made, bias=True, parallel=parallel, shared=parallel)


def jais2(config: Config) -> ModelSpec:
    """Norms that subtract the mean, and an MLP without a gate, by the square of ReLU; biases by the config."""
    config = config.renamed(layer_norm_epsilon="layer_norm_eps").with_defaults(
        max_position_embeddings=8192, attention_bias=True, mlp_bias=True
    )
    bias = config.flag("attention_bias")
    made = llama_like(config, qkv_bias=bias, o_bias=bias, mlp=squared_mlp(config))
    return with_layer_norms(config, made, bias=True)
