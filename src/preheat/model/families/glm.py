"""GLM-4 of THUDM and Z.ai, dense."""

from __future__ import annotations

from dataclasses import replace

from preheat.model.config import Config
from preheat.model.families.common import LLAMA, llama_like, with_layers
from preheat.model.specs import LayerSpec, ModelSpec

_FUSED = replace(LLAMA, gate_up="mlp.gate_up_proj")


def glm(config: Config) -> ModelSpec:
    """Half of each head turns, in pairs; gate and up are one matrix; query, key and value biases by the config."""
    config = config.with_defaults(
        max_position_embeddings=131072, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-07,
        attention_bias=True, partial_rotary_factor=0.5, eos_token_id=[151329, 151336, 151338],
    )  # fmt: skip
    rope = config.rope(partial=True, interleaved=True)
    return llama_like(config, _FUSED, qkv_bias=config.flag("attention_bias"), rope=rope)


def glm4(config: Config) -> ModelSpec:
    """As GLM, with four norms a layer: before and after attention, and before and after the MLP."""
    hidden = config.size("hidden_size")

    def layer(index: int, made: LayerSpec) -> LayerSpec:
        prefix = LLAMA.layer.format(index)
        attention, mlp = (
            replace(made.input_norm, name=f"{prefix}post_{name}_layernorm", size=hidden)
            for name in ("self_attn", "mlp")
        )
        return replace(made, attention_out_norm=attention, mlp_out_norm=mlp)

    return with_layers(glm(config), layer)
