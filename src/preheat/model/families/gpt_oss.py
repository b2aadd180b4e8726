"""gpt-oss: attention with sinks, and experts with biases that a checkpoint stacks."""

from __future__ import annotations

from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.config import Config
from preheat.model.families.common import llama_like
from preheat.model.mlp_specs import STACKED, ExpertsSpec, MlpSpec, MoeSpec
from preheat.model.specs import LayerSpec, ModelSpec, Rename, attention_of
from preheat.model.tensor_specs import LinearSpec, VectorSpec

_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Constants of the activation, see :mod:`preheat.ops.activation`."""

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
}  # fmt: skip


def gpt_oss(config: Config) -> ModelSpec:
    """Every other layer has a window, from the first one on. All linear layers but the head have biases."""
    config = config.with_defaults(
        num_hidden_layers=36, num_local_experts=128, hidden_size=2880, intermediate_size=2880, head_dim=64,
        num_attention_heads=64, num_key_value_heads=8, sliding_window=128, max_position_embeddings=131072,
        rms_norm_eps=1e-5, num_experts_per_tok=4, attention_bias=True, rope_theta=150000.0,
        rope_parameters=_YARN,
    )  # fmt: skip
    for name, value in _CLAMPED.items():
        config.refuse(name, value)
    config.require_silu()
    bias, count = config.flag("attention_bias"), config.size("num_local_experts")
    top_k = config.size("num_experts_per_tok")
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, but there are only {count} experts")
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")

    def mlp(prefix: str, index: int) -> MlpSpec:
        at = f"{prefix}mlp.experts.{{}}."
        stacked = ExpertsSpec(
            gate=f"{at}gate_up_proj", up=f"{at}gate_up_proj", down=f"{at}down_proj", num_experts=count, hidden=hidden,
            inner=inner, bias=True, activation="clamped_silu_and_mul", format=STACKED,
        )  # fmt: skip
        router = LinearSpec(parts=((f"{prefix}mlp.router", count),), inputs=hidden, bias=True)
        return MoeSpec(router=router, experts=stacked, top_k=top_k, renormalize=True, round_weights=True)

    windows = config.windows(every=2)
    made = llama_like(config, windows=windows, qkv_bias=bias, o_bias=bias, mlp=mlp, renames=_STACKS)
    return replace(made, layers=tuple(_with_sinks(layer, index) for index, layer in enumerate(made.layers)))


def _with_sinks(layer: LayerSpec, index: int) -> LayerSpec:
    """Return ``layer`` with a sink for each head."""
    attention = attention_of(layer)
    sinks = VectorSpec(f"model.layers.{index}.self_attn.sinks", attention.num_heads)
    return replace(layer, attention=replace(attention, sinks=sinks))


_STACKS = (
    Rename(r"(.*\.self_attn\.sinks)", (r"\1.weight",)),
    Rename(r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj\w*)", (r"\1.{}.\2",)),
)
"""Names of sinks, and of each expert's part of a stack."""
