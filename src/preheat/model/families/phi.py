"""Phi-3, Phi-3.5 and Phi-4, dense."""

from __future__ import annotations

from dataclasses import replace

from preheat.model.config import Config
from preheat.model.families.common import LLAMA, llama_like
from preheat.model.specs import ModelSpec

_FUSED = replace(LLAMA, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def phi3(config: Config) -> ModelSpec:
    """One matrix for queries, keys and values, another for gate and up; a part of each head may turn, by longrope."""
    config = config.with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    rope = config.rope(partial=True, also={"su": "longrope", "yarn": "longrope"})
    return llama_like(config, _FUSED, windows=config.windows(), rope=rope)
