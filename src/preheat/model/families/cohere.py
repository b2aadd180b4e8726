"""Cohere's Command models: R, R+ and A, and Aya."""

from __future__ import annotations

from dataclasses import replace

from preheat.model.config import Config
from preheat.model.families.common import llama_like, with_layer_norms, with_layers, with_logit_factor
from preheat.model.specs import LayerSpec, ModelSpec, attention_of


def cohere(config: Config) -> ModelSpec:
    """Attention and MLP side by side after one norm that subtracts the mean; rope in pairs; logits have a factor."""
    config = _renamed(config).with_defaults(
        tie_word_embeddings=True, max_position_embeddings=8192, logit_scale=0.0625, rope_theta=500000.0
    )
    config.refuse("use_qk_norm")
    return _parallel(config, (None,) * config.num_layers())


def cohere2(config: Config) -> ModelSpec:
    """As Cohere; most layers see a window and turn, the others see everything and do not."""
    config = _renamed(config).with_defaults(
        tie_word_embeddings=True, max_position_embeddings=8192, logit_scale=0.0625, sliding_window=4096,
        sliding_window_pattern=4,
    )  # fmt: skip
    windows = config.windows(every=config.size("sliding_window_pattern"))

    def turned(index: int, layer: LayerSpec) -> LayerSpec:
        return layer if windows[index] else replace(layer, attention=replace(attention_of(layer), rope=None))

    return with_layers(_parallel(config, windows), turned)


def _renamed(config: Config) -> Config:
    return config.renamed(layer_norm_epsilon="layer_norm_eps")


def _parallel(config: Config, windows: tuple[int | None, ...]) -> ModelSpec:
    bias = config.flag("attention_bias")
    made = llama_like(config, windows=windows, qkv_bias=bias, o_bias=bias, rope=config.rope(interleaved=True))
    made = with_layer_norms(config, made, bias=False, parallel=True, shared=True)
    return with_logit_factor(made, config.positive("logit_scale", 1.0))
