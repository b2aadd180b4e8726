"""ModernBERT: an encoder with norms before its blocks, windows on both sides, and rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from preheat.model.attention_specs import RopeSpec
from preheat.model.config import Config
from preheat.model.families.common import Names, attention, dense, encoder
from preheat.model.specs import LayerSpec, ModelSpec, Rename
from preheat.model.tensor_specs import NormSpec

_NAMES = Names(layer="layers.{}.", qkv="attn.Wqkv", o="attn.Wo", gate_up="mlp.Wi", down="mlp.Wo")


def modern_bert(config: Config) -> ModelSpec:
    """Most layers see a window on both sides and turn by another base."""
    config = config.with_defaults(
        vocab_size=50368, hidden_size=768, num_hidden_layers=22, num_attention_heads=12, intermediate_size=1152,
        hidden_activation="gelu", max_position_embeddings=8192, norm_eps=1e-5, local_attention=128,
        global_attn_every_n_layers=3,
    )  # fmt: skip
    config.refuse("hidden_activation", "gelu")
    hidden, bias = config.size("hidden_size"), config.flag("attention_bias")
    ropes = {name: _rope(config, name) for name in ("full_attention", "sliding_attention")}
    window = config.size("local_attention") // 2 + 1

    def norm(name: str, *, replaces: bool = False) -> NormSpec:
        eps, own = config.positive("norm_eps", 1e-5), config.flag("norm_bias")
        return NormSpec(name, hidden, eps, kind="layer", bias=own, replaces=replaces)

    def layer(index: int, kind: str) -> LayerSpec:
        prefix = _NAMES.layer.format(index)
        sees = window if kind == "sliding_attention" else None
        made = attention(config, _NAMES, prefix, sees, ropes[kind], qkv_bias=bias, o_bias=bias, qk_norm=False)
        return LayerSpec(
            attention=replace(made, causal=False),
            mlp=dense(config, _NAMES, prefix, bias=config.flag("mlp_bias"), activation="gelu_and_mul"),
            input_norm=norm(f"{prefix}attn_norm") if index else norm("embeddings.norm", replaces=True),
            post_norm=norm(f"{prefix}mlp_norm"),
        )

    layers = tuple(layer(index, kind) for index, kind in enumerate(_kinds(config)))
    return encoder(
        config,
        "embeddings.tok_embeddings",
        layers,
        norm("final_norm"),
        max_positions=config.size("max_position_embeddings"),
        renames=(Rename(r"model\.(.+)", (r"\1",)),),
        ignored=(r"head\..*", r"decoder\..*"),
    )


def _kinds(config: Config) -> list[str]:
    """Return the kind of attention of each layer."""
    every, window = config.size("global_attn_every_n_layers"), config.size("local_attention")
    listed = config.updated({"sliding_window": window}).windows() if config.has("layer_types") else ()
    if listed:
        return ["full_attention" if each is None else "sliding_attention" for each in listed]
    return ["sliding_attention" if index % every else "full_attention" for index in range(config.num_layers())]


def _rope(config: Config, kind: str) -> RopeSpec:
    """Return the rope of a kind of layer; older configs state only its base."""
    old, usual = {
        "full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0),
    }[kind]  # fmt: skip
    params = config.get("rope_parameters")
    if isinstance(params, Mapping) and kind in params:
        return config.rope(kind, theta=usual)
    length = config.size("max_position_embeddings")
    return RopeSpec(kind="default", theta=config.positive(old, usual), original_length=length)
