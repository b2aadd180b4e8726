"""Jina embeddings v3: XLM-RoBERTa with rotary positions, and weights for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec
from preheat.model.config import Config
from preheat.model.families.bert import roberta
from preheat.model.families.common import Names, attention, encoder, gelu, normed_sums, ungated
from preheat.model.mlp_specs import DenseSpec
from preheat.model.specs import ModelSpec, Rename, TaskSpec
from preheat.model.tensor_specs import EmbeddingSpec

_NAMES = Names(layer="layers.{}.")
_START = r"(?:roberta\.)?"
_HUB = rf"{_START}encoder\.layers\.(\d+)\."


def xlm_roberta(config: Config) -> ModelSpec:
    """RoBERTa; with rotary positions, Jina embeddings v3."""
    if config.get("position_embedding_type") == "rotary":
        return jina_embeddings_v3(config)
    spec = roberta(config)
    heads = (f"attention.self.{name}" for name in ("query", "key", "value"))
    return replace(spec, renames=(*_of_the_hub(_ABSOLUTE, "encoder.layer", *heads), *spec.renames))


def jina_embeddings_v3(config: Config) -> ModelSpec:
    """RoBERTa with rotary positions and biases, without a gate."""
    config = config.with_defaults(
        vocab_size=250002, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        hidden_act="gelu", type_vocab_size=1, max_position_embeddings=8194, layer_norm_eps=1e-5,
    )  # fmt: skip
    config.refuse("position_embedding_type", "rotary")
    hidden, rope = config.size("hidden_size"), config.rope(theta=config.positive("rotary_emb_base", 20000.0))

    def block(prefix: str) -> tuple[AttentionSpec, DenseSpec]:
        own = attention(config, _NAMES, prefix, None, rope, qkv_bias=True, o_bias=True, qk_norm=False)
        mlp = ungated(
            f"{prefix}mlp.fc1", f"{prefix}mlp.fc2", hidden=hidden, inner=config.size("intermediate_size"),
            activation=gelu(config), bias=True,
        )  # fmt: skip
        return replace(own, causal=False), mlp

    prefixes = [_NAMES.layer.format(index) for index in range(config.num_layers())]
    layers, last = normed_sums(config, prefixes, block)
    spec = encoder(
        config,
        "embeddings.word_embeddings",
        layers,
        last,
        max_positions=config.max_positions(rope),
        types=EmbeddingSpec("embeddings.token_type_embeddings", config.size("type_vocab_size"), hidden),
        renames=(*_of_the_hub(_ROTARY, "layers", _NAMES.q, _NAMES.k, _NAMES.v), Rename(r"roberta\.(.+)", (r"\1",))),
        ignored=(r"pooler\..*", r"lm_head\..*", r"embeddings\.position_ids"),
    )
    return replace(spec, task=_task(config))


def _task(config: Config) -> TaskSpec | None:
    """Return the task of ``lora_task`` among the checkpoint's. Raises ModelError if none is chosen."""
    tasks, chosen = config.get("lora_adaptations"), config.get("lora_task")
    if tasks is None:
        return None
    if not isinstance(tasks, list) or chosen not in tasks:
        named = "none" if chosen is None else repr(chosen)
        raise ModelError(
            f"config.json has weights for the tasks {tasks}, and lora_task names {named} of them: choose one, as with "
            '--hf-overrides \'{"lora_task": "text-matching"}\''
        )
    return TaskSpec(tasks.index(chosen), config.positive("lora_alpha", 1.0) / config.size("lora_rank", 4))


_ROTARY = {
    "mixer.out_proj": "self_attn.o_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    "norm1": "post_attention_layernorm", "norm2": "post_mlp_layernorm",
}  # fmt: skip
_ABSOLUTE = {
    "mixer.out_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
    "norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm",
}  # fmt: skip
"""Names of modules by Jina's names, for positions of either kind."""


def _of_the_hub(names: Mapping[str, str], layer: str, *heads: str) -> tuple[Rename, ...]:
    """Return the ``names`` of tensors for the names of Jina's own code.

    ``heads`` are the names of query, key and value. Jina stores them in one tensor.
    """
    parts = tuple(rf"{layer}.\1.{each}.\2" for each in heads)
    own = (Rename(rf"{_HUB}{old}\.(weight|bias)", (rf"{layer}.\1.{new}.\2",)) for old, new in names.items())
    first = Rename(rf"{_START}emb_ln\.(.+)", (r"embeddings.LayerNorm.\1",))
    return Rename(rf"{_HUB}mixer\.Wqkv\.(weight|bias)", parts), first, *own
