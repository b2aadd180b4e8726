"""GTE, "NewModel" on the Hub: rotary positions, a gate, and norms of the sum of each block and its input."""

from __future__ import annotations

from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec, RopeSpec
from preheat.model.config import Config
from preheat.model.families.common import Names, attention, dense, encoder, gelu, normed_sums
from preheat.model.mlp_specs import DenseSpec
from preheat.model.specs import ModelSpec, Rename
from preheat.model.tensor_specs import EmbeddingSpec
from preheat.ops.kinds import Activation

_NAMES = Names(layer="layers.{}.")
_PREFIX = r"(?:(?:new|gte)\.)?"
_TYPES = "embeddings.token_type_embeddings"
_LAYER = rf"{_PREFIX}encoder\.layer\.(\d+)\."


def gte(config: Config) -> ModelSpec:
    """Token types if there are any, rotary positions, and a gate without biases."""
    config = config.with_defaults(
        vocab_size=30528 if config.architecture == "New" else 250048, hidden_size=768, num_hidden_layers=12,
        num_attention_heads=12, intermediate_size=3072, hidden_act="gelu", type_vocab_size=1,
        max_position_embeddings=2048 if config.architecture == "New" else 8192, layer_norm_eps=1e-12,
    )  # fmt: skip
    config.refuse("position_embedding_type", "rope")
    config.refuse("layer_norm_type", "layer_norm")
    config.refuse("logn_attention_scale")
    rope = _rope(config)
    activation: Activation = "gelu_and_mul" if gelu(config) == "gelu" else "gelu_tanh_and_mul"

    def block(prefix: str) -> tuple[AttentionSpec, DenseSpec]:
        own = attention(config, _NAMES, prefix, None, rope, qkv_bias=True, o_bias=True, qk_norm=False)
        mlp = dense(config, _NAMES, prefix, bias=False, activation=activation)
        return replace(own, causal=False), replace(mlp, down=replace(mlp.down, bias=True))

    prefixes = [_NAMES.layer.format(index) for index in range(config.num_layers())]
    layers, last = normed_sums(config, prefixes, block)
    typed = config.get("type_vocab_size") != 0
    return encoder(
        config,
        "embeddings.word_embeddings",
        layers,
        last,
        max_positions=config.size("max_position_embeddings"),
        types=EmbeddingSpec(_TYPES, config.size("type_vocab_size"), config.size("hidden_size")) if typed else None,
        renames=_renames(),
        ignored=(r"pooler\..*", r"lm_head\..*", r"embeddings\.position_ids"),
    )


def _rope(config: Config) -> RopeSpec:
    """Return the rope of the config, by default of transformers' base.

    The Hub's kind "ntk" is linear scaling: with d numbers of a head, frequency i of base b is multiplied by
    factor ** (-2 (i + 1) / d). This is the frequency of base b * factor, divided by factor ** (2 / d).
    """
    theta = 10000.0 if config.architecture == "New" else 160000.0
    scaling = config.mapping("rope_scaling")
    if scaling.get("type", scaling.get("rope_type")) != "ntk":
        return config.rope(theta=theta)
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or not 1 <= factor < 1e6 or scaling.get("mixed_b") is not None:
        raise ModelError(
            f"config.json: rope_scaling of type ntk needs a factor of at least 1 and no mixed_b: {scaling}"
        )
    dim = config.size("hidden_size") // config.size("num_attention_heads")
    base, length = config.positive("rope_theta", theta), config.size("max_position_embeddings")
    return RopeSpec(kind="linear", theta=base * factor, factor=factor ** (2 / dim), original_length=length)


def _renames() -> tuple[Rename, ...]:
    """Return the names of tensors on the Hub, with the prefix of a model with a head or without."""
    own = {
        "attention.o_proj": "self_attn.o_proj", "attn_ln": "post_attention_layernorm", "mlp_ln": "post_mlp_layernorm",
        "attention.q_proj": "self_attn.q_proj", "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.down_proj",
    }  # fmt: skip
    found = [Rename(rf"{_LAYER}{old}\.(weight|bias)", (rf"layers.\1.{new}.\2",)) for old, new in own.items()]
    qkv = tuple(rf"layers.\1.self_attn.{name}_proj.\2" for name in "qkv")
    up_gate = tuple(rf"layers.\1.mlp.{name}_proj.weight" for name in ("up", "gate"))
    found += [Rename(rf"{_LAYER}attention\.qkv_proj\.(weight|bias)", qkv)]
    return *found, Rename(rf"{_LAYER}mlp\.up_gate_proj\.weight", up_gate), Rename(r"(?:new|gte)\.(.+)", (r"\1",))
