"""The parts that families share, from one attention block to a whole model.

A family that differs in one part builds that part itself and takes the others from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.specs import (
    AttentionSpec,
    DenseSpec,
    EmbeddingSpec,
    KVSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    NormSpec,
)


@dataclass(frozen=True, kw_only=True)
class Names:
    """A checkpoint's module names; those of a layer have the prefix ``layer``, with its number."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    final_norm: str = "model.norm"
    head: str = "lm_head"


LLAMA = Names()


def llama_like(
    config: Config,
    names: Names = LLAMA,
    *,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """A model of Llama's architecture; ``windows`` are the layers' sliding windows, None for full attention in all."""
    hidden = config.size("hidden_size")

    def layer(prefix: str, window: int | None) -> LayerSpec:
        return LayerSpec(
            attention=attention(config, names, prefix, window, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm),
            mlp=dense(config, names, prefix, bias=mlp_bias),
            input_norm=norm(config, prefix + names.input_norm, hidden),
            post_norm=norm(config, prefix + names.post_norm, hidden),
        )

    windows = windows or (None,) * config.size("num_hidden_layers")
    layers = tuple(layer(names.layer.format(index), window) for index, window in enumerate(windows))
    return model(config, names, layers)


def attention(
    config: Config, names: Names, prefix: str, window: int | None, *, qkv_bias: bool, o_bias: bool, qk_norm: bool
) -> AttentionSpec:
    """Grouped-query attention with rotary embedding, from separate query, key and value projections."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv = KVSpec(config.size("num_key_value_heads", heads), config.size("head_dim", hidden // heads))
    if heads % kv.num_kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv.num_kv_heads} key/value heads evenly")
    if kv.head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary embedding, got {kv.head_dim}")
    q_size, kv_size = heads * kv.head_dim, kv.num_kv_heads * kv.head_dim
    parts = ((prefix + names.q, q_size), (prefix + names.k, kv_size), (prefix + names.v, kv_size))
    norms = norm(config, prefix + names.q_norm, kv.head_dim), norm(config, prefix + names.k_norm, kv.head_dim)
    return AttentionSpec(
        num_heads=heads,
        kv=kv,
        window=window,
        rope=config.rope(),
        qk_norm=norms if qk_norm else None,
        qkv=LinearSpec(parts=parts, inputs=hidden, bias=qkv_bias),
        o=LinearSpec(parts=((prefix + names.o, hidden),), inputs=q_size, bias=o_bias),
        scale=kv.head_dim**-0.5,
    )


def dense(config: Config, names: Names, prefix: str, *, bias: bool) -> DenseSpec:
    """The feed-forward block with SwiGLU, from separate gate and up projections."""
    config.require_silu()
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    gate_up = ((prefix + names.gate, inner), (prefix + names.up, inner))
    return DenseSpec(
        gate_up=LinearSpec(parts=gate_up, inputs=hidden, bias=bias, activation="silu_and_mul"),
        down=LinearSpec(parts=((prefix + names.down, hidden),), inputs=inner, bias=bias),
    )


def norm(config: Config, name: str, size: int) -> NormSpec:
    """A root-mean-square norm."""
    return NormSpec(name, size, config.positive("rms_norm_eps", 1e-6))


def model(config: Config, names: Names, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    """A whole model around its ``layers``."""
    vocab_size, hidden = config.size("vocab_size"), config.size("hidden_size")
    head = names.embedding if config.flag("tie_word_embeddings") else names.head
    return ModelSpec(
        architecture=config.architecture,
        embedding=EmbeddingSpec(names.embedding, vocab_size, hidden),
        layers=layers,
        final_norm=norm(config, names.final_norm, hidden),
        head=LinearSpec(parts=((head, vocab_size),), inputs=hidden),
        max_position_embeddings=config.max_positions(config.rope()),
        eos_ids=config.token_ids("eos_token_id"),
        bos_id=next(iter(config.token_ids("bos_token_id")), None),
        dtype=config.dtype(),
    )
