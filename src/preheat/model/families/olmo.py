"""OLMo 2 and 3, dense."""

from __future__ import annotations

from dataclasses import replace

from preheat.model.attention_specs import RopeSpec
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, llama_like, normed_whole, norms_after, with_layers
from preheat.model.specs import LayerSpec, ModelSpec, attention_of


def olmo2(config: Config) -> ModelSpec:
    """Norms after attention and MLP in place of before; queries and keys are normed over all heads."""
    config = config.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5)
    return _olmo(config, config.rope())


def olmo3(config: Config) -> ModelSpec:
    """As OLMo 2; most layers see a window, and these turn without scaling."""
    config = config.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096)
    whole = config.rope("full_attention", theta=500000.0)
    windows = config.windows(every=4)
    plain = RopeSpec(kind="default", theta=whole.theta, original_length=config.size("max_position_embeddings"))
    local = plain
    if "sliding_attention" in config.mapping("rope_parameters"):
        local = config.rope("sliding_attention", theta=500000.0)

    def turned(index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(attention_of(layer), rope=local if windows[index] else whole))

    return with_layers(_olmo(config, whole, windows), turned)


def _olmo(config: Config, rope: RopeSpec, windows: tuple[int | None, ...] | None = None) -> ModelSpec:
    bias = config.flag("attention_bias")

    def layer(index: int, made: LayerSpec) -> LayerSpec:
        prefix = LLAMA.layer.format(index)
        return norms_after(config, replace(made, attention=normed_whole(config, attention_of(made), prefix)), prefix)

    return with_layers(llama_like(config, windows=windows, qkv_bias=bias, o_bias=bias, rope=rope), layer)
