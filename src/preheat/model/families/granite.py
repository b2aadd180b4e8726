"""Granite 3 and 4 of IBM, dense."""

from __future__ import annotations

from dataclasses import replace

from preheat.model.config import Config
from preheat.model.families.common import llama_like, multiplied, with_layers, with_logit_factor
from preheat.model.specs import LayerSpec, ModelSpec, attention_of


def granite(config: Config) -> ModelSpec:
    """Llama with factors of embeddings, scores, additions to the residual stream, and logits."""
    config = config.with_defaults(max_position_embeddings=2048)
    bias = config.flag("attention_bias")
    scale, factor = config.positive("attention_multiplier", 1.0), config.positive("residual_multiplier", 1.0)

    def layer(_: int, made: LayerSpec) -> LayerSpec:
        return multiplied(replace(made, attention=replace(attention_of(made), scale=scale)), factor)

    made = with_layers(llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias")), layer)
    embedded = config.positive("embedding_multiplier", 1.0)
    made = replace(made, embedding=replace(made.embedding, scale=None if embedded == 1 else embedded))
    return with_logit_factor(made, 1 / config.positive("logits_scaling", 1.0))
