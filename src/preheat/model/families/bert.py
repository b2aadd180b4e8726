"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT: encoders that norm the sum of each block and its input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.config import Config
from preheat.model.families.common import encoder, equal_heads, normed_sums, ungated
from preheat.model.kv_spec import KVSpec
from preheat.model.mlp_specs import DenseSpec
from preheat.model.specs import ModelSpec, Rename
from preheat.model.tensor_specs import DistanceSpec, EmbeddingSpec, LinearSpec
from preheat.ops.kinds import Activation
from preheat.pooling.encoders import SPARE

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True)
class Names:
    """Tensor names of an encoder; {} is the number of a layer.

    ``prefix`` begins the names in a checkpoint of a model with a head. ``unused`` begin the names of tensors that no
    embedding needs.
    """

    prefix: str
    layer: str = "encoder.layer.{}."
    q: str = "attention.self.query"
    k: str = "attention.self.key"
    v: str = "attention.self.value"
    o: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"
    unused: tuple[str, ...] = ("pooler", "cls", "lm_head")


def bert(config: Config) -> ModelSpec:
    """Token types, and an embedding for each position."""
    return _encoder(_bert_config(config), Names(prefix="bert"))


def roberta(config: Config) -> ModelSpec:
    """BERT with positions that begin behind the id of padding."""
    config = _bert_config(config)
    padding = config.get("pad_token_id")
    if type(padding) is not int or padding < 0:
        raise ModelError(f"config.json: pad_token_id must be a token id, as positions begin behind it, got {padding!r}")
    return _encoder(config, Names(prefix="roberta"), skipped=padding + 1)


def mpnet(config: Config) -> ModelSpec:
    """RoBERTa without token types, with a bias of attention for each distance, the same in all layers."""
    config = _bert_config(config, vocab_size=30527, relative_attention_num_buckets=32)
    buckets = config.size("relative_attention_num_buckets")
    if buckets % 4:
        raise ModelError(f"config.json: relative_attention_num_buckets must be a multiple of 4, got {buckets}")
    names = Names(
        prefix="mpnet", q="attention.attn.q", k="attention.attn.k", v="attention.attn.v", o="attention.attn.o",
        attention_norm="attention.LayerNorm", unused=("pooler", "lm_head"),
    )  # fmt: skip
    spec = _encoder(config, names, typed=False, skipped=2)  # positions begin behind 1, whatever the id of padding
    heads = config.size("num_attention_heads")
    return replace(spec, distances=DistanceSpec("encoder.relative_attention_bias", buckets, heads, MOST_DISTANCE))


MOST_DISTANCE = 128
"""The distance from which on all are alike in MPNet (source: transformers)."""


def distilbert(config: Config) -> ModelSpec:
    """BERT without token types."""
    config = config.renamed(
        hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers", intermediate_size="hidden_dim",
        hidden_act="activation",
    ).with_defaults(
        vocab_size=30522, hidden_size=768, num_attention_heads=12, num_hidden_layers=6, intermediate_size=3072,
        hidden_act="gelu", max_position_embeddings=512, layer_norm_eps=1e-12,
    )  # fmt: skip
    names = Names(
        prefix="distilbert", layer="transformer.layer.{}.", q="attention.q_lin", k="attention.k_lin",
        v="attention.v_lin", o="attention.out_lin", attention_norm="sa_layer_norm", up="ffn.lin1", down="ffn.lin2",
        output_norm="output_layer_norm", unused=("vocab_.*",),
    )  # fmt: skip
    return _encoder(config, names, typed=False)


def _bert_config(config: Config, **own: int) -> Config:
    """Return ``config`` with the defaults of BERT and RoBERTa, or its ``own``. Raises ModelError for a decoder."""
    usual: dict[str, Any] = {
        "vocab_size": 30522, "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "pad_token_id": 0 if config.architecture == "Bert" else 1,
    }  # fmt: skip
    config = config.with_defaults(**usual | own)
    config.refuse("is_decoder")
    config.refuse("add_cross_attention")
    config.refuse("position_embedding_type", "absolute")
    return config


def _encoder(config: Config, names: Names, *, typed: bool = True, skipped: int = 0) -> ModelSpec:
    """Return an encoder with an embedding for each position, from position ``skipped`` of the table on."""
    hidden, length, count = config.size("hidden_size"), config.size("max_position_embeddings"), config.num_layers()
    if length <= skipped:
        raise ModelError(f"config.json: max_position_embeddings is {length}, and the first {skipped} are unused")

    def block(prefix: str) -> tuple[AttentionSpec, DenseSpec]:
        return _attention(config, names, prefix), _mlp(config, names, prefix)

    prefixes = [names.layer.format(index) for index in range(count)]
    layers, last = normed_sums(config, prefixes, block, middle=names.attention_norm, last=names.output_norm)
    types = EmbeddingSpec("embeddings.token_type_embeddings", config.size("type_vocab_size"), hidden) if typed else None
    return encoder(
        config,
        "embeddings.word_embeddings",
        layers,
        last,
        max_positions=length - skipped,
        positions=EmbeddingSpec("embeddings.position_embeddings", length, hidden, unused=skipped, spare=SPARE),
        types=types,
        renames=_renames(names.prefix),
        ignored=(r"embeddings\.position_ids", *(rf"{name}\..*" for name in names.unused)),
    )


def _renames(prefix: str) -> tuple[Rename, ...]:
    """Return the other names of tensors: with the ``prefix``, and norms with the names of old checkpoints."""
    whole = rf"(?:{prefix}\.)?(.+LayerNorm)"
    return (
        Rename(rf"{whole}\.gamma", (r"\1.weight",)),
        Rename(rf"{whole}\.beta", (r"\1.bias",)),
        Rename(rf"{prefix}\.(.+)", (r"\1",)),
    )


def _attention(config: Config, names: Names, prefix: str) -> AttentionSpec:
    hidden, (heads, dim) = config.size("hidden_size"), equal_heads(config)
    parts = tuple((prefix + name, hidden) for name in (names.q, names.k, names.v))
    return AttentionSpec(
        num_heads=heads,
        kv=KVSpec(heads, dim),
        window=None,
        rope=None,
        qk_norm=None,
        qkv=LinearSpec(parts=parts, inputs=hidden, bias=True),
        o=LinearSpec(parts=((prefix + names.o, hidden),), inputs=hidden, bias=True),
        scale=dim**-0.5,
        causal=False,
    )


def _mlp(config: Config, names: Names, prefix: str) -> DenseSpec:
    name = config.get("hidden_act")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported, only {', '.join(_ACTIVATIONS)} are")
    return ungated(
        prefix + names.up, prefix + names.down, hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"), activation=_ACTIVATIONS[name], bias=True,
    )  # fmt: skip
