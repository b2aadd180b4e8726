"""GPTBigCode (StarCoder, SantaCoder, Granite Code) and StarCoder2."""

from __future__ import annotations

from preheat.model.attention_specs import AttentionSpec
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, Names, attention, equal_heads, gelu, layer_norm, model, ungated
from preheat.model.kv_spec import KVSpec
from preheat.model.specs import LayerSpec, ModelSpec
from preheat.model.tensor_specs import EmbeddingSpec, LinearSpec

_BIGCODE = Names(embedding="transformer.wte", layer="transformer.h.{}.", final_norm="transformer.ln_f")


def gpt_bigcode(config: Config) -> ModelSpec:
    """One key head for all query heads, or one for each; positions are learned, and there are no others."""
    config = config.renamed(
        hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer", intermediate_size="n_inner",
        max_position_embeddings="n_positions", hidden_act="activation_function",
    ).with_defaults(
        multi_query=True, scale_attn_weights=True, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=1024,
    )  # fmt: skip
    config.refuse("add_cross_attention")
    hidden, length = config.size("hidden_size"), config.size("max_position_embeddings")
    inner = config.size("intermediate_size", 4 * hidden)

    def layer(prefix: str) -> LayerSpec:
        up, down = f"{prefix}mlp.c_fc", f"{prefix}mlp.c_proj"
        return LayerSpec(
            attention=_attention(config, prefix),
            mlp=ungated(up, down, hidden=hidden, inner=inner, activation=gelu(config), bias=True),
            input_norm=layer_norm(config, f"{prefix}ln_1", bias=True),
            post_norm=layer_norm(config, f"{prefix}ln_2", bias=True),
        )

    layers = tuple(layer(_BIGCODE.layer.format(index)) for index in range(config.num_layers()))
    return model(
        config, _BIGCODE, layers, max_positions=length, final_norm=layer_norm(config, _BIGCODE.final_norm, bias=True),
        positions=EmbeddingSpec("transformer.wpe", length, hidden),
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    )  # fmt: skip


def _attention(config: Config, prefix: str) -> AttentionSpec:
    """Return the attention of a layer.

    With a key head for each query head, a head's rows of query, key and value lie together.
    """
    hidden, (heads, dim) = config.size("hidden_size"), equal_heads(config)
    kv = KVSpec(1 if config.flag("multi_query") else heads, dim)
    starts = [] if config.flag("multi_query") else [part + 3 * dim * head for part in (0, dim, 2 * dim)
                                                    for head in range(heads)]  # fmt: skip
    parts = ((f"{prefix}attn.c_attn", hidden + kv.values),)
    order = tuple((start, start + dim) for start in starts)
    return AttentionSpec(
        num_heads=heads,
        kv=kv,
        window=None,
        rope=None,
        qk_norm=None,
        qkv=LinearSpec(parts=parts, inputs=hidden, bias=True, order=order),
        o=LinearSpec(parts=((f"{prefix}attn.c_proj", hidden),), inputs=hidden, bias=True),
        scale=dim**-0.5 if config.flag("scale_attn_weights") else 1.0,
    )


def starcoder2(config: Config) -> ModelSpec:
    """Layer norms and a feed-forward block without a gate; biases in all linear layers by the config."""
    config = config.renamed(layer_norm_epsilon="norm_epsilon").with_defaults(
        use_bias=True, tie_word_embeddings=True, num_key_value_heads=2, max_position_embeddings=4096,
        hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    bias, hidden, inner = config.flag("use_bias"), config.size("hidden_size"), config.size("intermediate_size")
    rope = config.rope()

    def layer(prefix: str, window: int | None) -> LayerSpec:
        up, down = f"{prefix}mlp.c_fc", f"{prefix}mlp.c_proj"
        return LayerSpec(
            attention=attention(config, LLAMA, prefix, window, rope, qkv_bias=bias, o_bias=bias, qk_norm=False),
            mlp=ungated(up, down, hidden=hidden, inner=inner, activation=gelu(config), bias=bias),
            input_norm=layer_norm(config, prefix + LLAMA.input_norm, bias=True),
            post_norm=layer_norm(config, prefix + LLAMA.post_norm, bias=True),
        )

    layers = tuple(layer(LLAMA.layer.format(index), window) for index, window in enumerate(config.windows()))
    final_norm = layer_norm(config, LLAMA.final_norm, bias=True)
    return model(config, LLAMA, layers, max_positions=config.max_positions(rope), final_norm=final_norm)
