"""Phi-1, Phi-2, Phi-3, Phi-3.5 and Phi-4, dense."""

from __future__ import annotations

from dataclasses import replace

from preheat.model.config import Config
from preheat.model.families.common import LLAMA, gelu, llama_like, ungated, with_layer_norms
from preheat.model.mlp_specs import MlpSpec
from preheat.model.specs import ModelSpec

_PHI = replace(LLAMA, o="self_attn.dense", up="mlp.fc1", down="mlp.fc2", final_norm="model.final_layernorm")
_FUSED = replace(LLAMA, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def phi(config: Config) -> ModelSpec:
    """Attention and MLP side by side after one norm that subtracts the mean; a part of each head turns; all biases."""
    config = config.renamed(layer_norm_epsilon="layer_norm_eps").with_defaults(
        max_position_embeddings=2048, partial_rotary_factor=0.5, hidden_act="gelu_new"
    )
    config.refuse("qk_layernorm")
    config.refuse("tie_word_embeddings")  # the head has a bias, and the table of embeddings none
    hidden, inner, activation = config.size("hidden_size"), config.size("intermediate_size"), gelu(config)

    def mlp(prefix: str, _: int) -> MlpSpec:
        up, down = prefix + _PHI.up, prefix + _PHI.down
        return ungated(up, down, hidden=hidden, inner=inner, activation=activation, bias=True)

    made = llama_like(config, _PHI, qkv_bias=True, o_bias=True, mlp=mlp, rope=config.rope(partial=True))
    made = with_layer_norms(config, made, _PHI, bias=True, parallel=True, shared=True)
    assert made.head is not None
    return replace(made, head=replace(made.head, bias=True))


def phi3(config: Config) -> ModelSpec:
    """One matrix for queries, keys and values, another for gate and up; a part of each head may turn, by longrope."""
    config = config.with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    rope = config.rope(partial=True, also={"su": "longrope", "yarn": "longrope"})
    return llama_like(config, _FUSED, windows=config.windows(), rope=rope)
