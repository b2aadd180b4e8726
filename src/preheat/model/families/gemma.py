"""Gemma and Gemma 3, text only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from preheat.model.attention_specs import RopeSpec
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, attention, dense, llama_like, model, norm, with_layers
from preheat.model.mlp_specs import MlpSpec
from preheat.model.spec_tree import with_leaves
from preheat.model.specs import LayerSpec, ModelSpec
from preheat.model.tensor_specs import NormSpec

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def gemma(config: Config) -> ModelSpec:
    """Norms stored as factors minus one, scaled embeddings, and gates by GELU."""
    config = config.with_defaults(
        num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True
    )
    config.refuse("use_bidirectional_attention")
    config.refuse("hidden_activation", "gelu_pytorch_tanh")
    config.refuse("hidden_act", "gelu_pytorch_tanh", "gelu")
    bias, scale = config.flag("attention_bias"), config.size("hidden_size") ** 0.5

    def mlp(prefix: str, _: int) -> MlpSpec:
        return dense(config, LLAMA, prefix, bias=False, activation="gelu_tanh_and_mul")

    def layer(_: int, made: LayerSpec) -> LayerSpec:
        return with_leaves(made, lambda _, leaf: _plus_one(leaf) if isinstance(leaf, NormSpec) else leaf)

    made = with_layers(llama_like(config, qkv_bias=bias, o_bias=bias, mlp=mlp), layer)
    return replace(made, final_norm=_plus_one(made.final_norm), embedding=replace(made.embedding, scale=scale))


def _plus_one(norm: NormSpec) -> NormSpec:
    return replace(norm, kind="rms_plus_one")


def gemma3(config: Config) -> ModelSpec:
    """Four norms a layer, stored as factors minus one; most layers see a window and turn by another base."""
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, sliding_window=4096, rms_norm_eps=1e-6,
        tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh",
        sliding_window_pattern=6,
    )  # fmt: skip
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        config.refuse(name)
    config.refuse("hidden_activation", "gelu_pytorch_tanh")
    hidden, bias = config.size("hidden_size"), config.flag("attention_bias")
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    ropes = {True: _local_rope(config), False: config.rope(_GLOBAL, theta=1e6)}

    def plus_one(name: str, size: int = hidden) -> NormSpec:
        return _plus_one(norm(config, name, size))

    def layer(prefix: str, window: int | None) -> LayerSpec:
        made = attention(
            config, LLAMA, prefix, window, ropes[window is not None], qkv_bias=bias, o_bias=bias, qk_norm=True
        )
        q_norm, k_norm = (plus_one(f"{prefix}self_attn.{name}_norm", made.head_dim) for name in "qk")
        return LayerSpec(
            attention=replace(made, qk_norm=(q_norm, k_norm), scale=scale),
            mlp=dense(config, LLAMA, prefix, bias=False, activation="gelu_tanh_and_mul"),
            input_norm=plus_one(f"{prefix}input_layernorm"),
            post_norm=plus_one(f"{prefix}pre_feedforward_layernorm"),
            attention_out_norm=plus_one(f"{prefix}post_attention_layernorm"),
            mlp_out_norm=plus_one(f"{prefix}post_feedforward_layernorm"),
        )

    windows = config.windows(every=config.size("sliding_window_pattern"))
    layers = tuple(layer(LLAMA.layer.format(index), window) for index, window in enumerate(windows))
    return model(
        config, LLAMA, layers, final_norm=plus_one(LLAMA.final_norm), scale=hidden**0.5,
        max_positions=config.size("max_position_embeddings"),
    )  # fmt: skip


def _local_rope(config: Config) -> RopeSpec:
    """Return the rope of layers with a window.

    It is never scaled. Older configs state only its base.
    """
    params = config.get("rope_parameters")
    if isinstance(params, Mapping) and _LOCAL in params:
        return config.rope(_LOCAL, theta=10000.0)
    theta = config.positive("rope_local_base_freq", 10000.0)
    return RopeSpec(kind="default", theta=theta, original_length=config.size("max_position_embeddings"))
