"""Specs of models of given sizes."""

from __future__ import annotations

from preheat.model.families import read_spec
from preheat.model.specs import ModelSpec


def llama(*, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> ModelSpec:
    return read_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
        }
    )


LLAMA_8B = llama(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256)
