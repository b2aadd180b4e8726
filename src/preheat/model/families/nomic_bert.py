"""NomicBERT: an encoder with rotary positions, a gate, and norms of the sum of each block and its input."""

from __future__ import annotations

from dataclasses import replace

from preheat.model.attention_specs import AttentionSpec
from preheat.model.config import Config
from preheat.model.families.common import Names, attention, dense, encoder, normed_sums
from preheat.model.mlp_specs import DenseSpec
from preheat.model.specs import ModelSpec, Rename
from preheat.model.tensor_specs import EmbeddingSpec

_NAMES = Names(layer="layers.{}.")
_OLD = r"(?:nomic_bert\.)?(?:encoder\.)?(layers\.\d+\.)"


def nomic_bert(config: Config) -> ModelSpec:
    """Token types, rotary positions, and a gate."""
    if config.has("n_embd"):
        config = _of_the_hub(config)
    config = config.with_defaults(
        vocab_size=30528, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        hidden_act="silu", max_position_embeddings=2048, type_vocab_size=2, layer_norm_eps=1e-12,
    )  # fmt: skip
    for name in ("moe_every_n_layers", "num_experts", "prenorm", "parallel_block", "causal", "use_rms_norm",
                 "rotary_emb_interleaved", "rotary_emb_scale_base", "qkv_proj_bias", "mlp_fc1_bias",
                 "mlp_fc2_bias"):  # fmt: skip
        config.refuse(name)
    config.refuse("rotary_emb_fraction", 1.0)
    config.refuse("activation_function", "swiglu")
    hidden, rope = config.size("hidden_size"), config.rope(theta=config.positive("rotary_emb_base", 1000.0))

    def block(prefix: str) -> tuple[AttentionSpec, DenseSpec]:
        own = attention(config, _NAMES, prefix, None, rope, qkv_bias=False, o_bias=False, qk_norm=False)
        return replace(own, causal=False), dense(config, _NAMES, prefix, bias=False)

    prefixes = [_NAMES.layer.format(index) for index in range(config.num_layers())]
    layers, last = normed_sums(config, prefixes, block)
    return encoder(
        config,
        "embeddings.word_embeddings",
        layers,
        last,
        max_positions=config.max_positions(rope),
        types=EmbeddingSpec("embeddings.token_type_embeddings", config.size("type_vocab_size"), hidden),
        renames=_renames(),
        ignored=(r"embeddings\.position_ids", r"pooler\..*", r"cls\..*"),
    )


def _of_the_hub(config: Config) -> Config:
    """Return the config of a model of the Hub, which has names of its own."""
    return config.renamed(
        hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head", intermediate_size="n_inner",
        max_position_embeddings="n_positions", layer_norm_eps="layer_norm_epsilon",
    )  # fmt: skip


def _renames() -> tuple[Rename, ...]:
    """Return the names of tensors on the Hub."""
    own = {
        "attn.out_proj": "self_attn.o_proj", "mlp.fc11": "mlp.up_proj", "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj", "norm1": "post_attention_layernorm", "norm2": "post_mlp_layernorm",
    }  # fmt: skip
    found = [Rename(rf"{_OLD}{old}\.(weight|bias)", (rf"\1{new}.\2",)) for old, new in own.items()]
    parts = tuple(rf"\1self_attn.{name}_proj.weight" for name in "qkv")
    found += [Rename(rf"{_OLD}attn\.Wqkv\.weight", parts), Rename(r"emb_ln\.(.+)", (r"embeddings.LayerNorm.\1",))]
    return *found, Rename(r"nomic_bert\.(.+)", (r"\1",))
