"""MPT."""

from __future__ import annotations

from collections.abc import Mapping

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.config import Config
from preheat.model.families.common import Names, equal_heads, layer_norm, model, ungated
from preheat.model.kv_spec import KVSpec
from preheat.model.specs import LayerSpec, ModelSpec
from preheat.model.tensor_specs import LinearSpec

_MPT = Names(embedding="transformer.wte", layer="transformer.blocks.{}.", final_norm="transformer.norm_f")


def mpt(config: Config) -> ModelSpec:
    """ALiBi in place of positions, queries, keys and values that may be clipped, and no biases anywhere."""
    config = config.renamed(
        hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    ).with_defaults(tie_word_embeddings=True, no_bias=True, max_position_embeddings=2048)  # fmt: skip
    config.refuse("logit_scale")
    config.refuse("norm_type", "low_precision_layernorm", "layernorm")
    config.refuse("ffn_config", {"ffn_type": "mptmlp"})
    if not config.flag("no_bias"):
        raise ModelError("no_bias false is not supported")
    hidden, inner = config.size("hidden_size"), config.size("expansion_ratio", 4) * config.size("hidden_size")

    def layer(prefix: str) -> LayerSpec:
        up, down = f"{prefix}ffn.up_proj", f"{prefix}ffn.down_proj"
        return LayerSpec(
            attention=_attention(config, prefix),
            mlp=ungated(up, down, hidden=hidden, inner=inner, activation="gelu", bias=False),
            input_norm=layer_norm(config, f"{prefix}norm_1", bias=False),
            post_norm=layer_norm(config, f"{prefix}norm_2", bias=False),
        )

    layers = tuple(layer(_MPT.layer.format(index)) for index in range(config.num_layers()))
    return model(
        config, _MPT, layers, final_norm=layer_norm(config, _MPT.final_norm, bias=False),
        max_positions=config.size("max_position_embeddings"),
    )  # fmt: skip


def _attention(config: Config, prefix: str) -> AttentionSpec:
    values = config.get("attn_config") or {}
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: attn_config must be an object, got {values!r}")
    inner = Config(config.architecture, values, alibi=True, attn_type="multihead_attention")
    for name in ("qk_ln", "qk_gn", "prefix_lm", "rope"):
        inner.refuse(name)
    inner.refuse("attn_type", "multihead_attention")
    inner.refuse("sliding_window_size", -1)
    inner.refuse("kv_n_heads", config.size("num_attention_heads"))
    if not inner.flag("alibi"):
        raise ModelError("attn_config.alibi false is not supported: only ALiBi's positions are")
    hidden, (heads, dim) = config.size("hidden_size"), equal_heads(config)
    spec = AttentionSpec(
        num_heads=heads,
        kv=KVSpec(heads, dim),
        window=None,
        rope=None,
        qk_norm=None,
        qkv=LinearSpec(
            parts=((f"{prefix}attn.Wqkv", 3 * hidden),),
            inputs=hidden,
            clip=inner.positive("clip_qkv", 0) if inner.get("clip_qkv") else None,
        ),
        o=LinearSpec(parts=((f"{prefix}attn.out_proj", hidden),), inputs=hidden),
        scale=inner.positive("softmax_scale", dim**-0.5),
        alibi=alibi_slopes(heads, inner.positive("alibi_bias_max", 8)),
    )
    inner.refuse_unread("attn_config")
    return spec


def alibi_slopes(heads: int, bias_max: float) -> tuple[float, ...]:
    """Return ALiBi's slopes of ``heads`` heads.

    These are 2^(-i * bias_max / n) for i in 1..n, n the least power of two that is not below ``heads``. With fewer
    heads than n, every second slope, from the second on, comes first, then the others.
    """
    count = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * (i + 1) / count) for i in range(count)]
    return tuple(slopes if count == heads else (slopes[1::2] + slopes[::2])[:heads])
