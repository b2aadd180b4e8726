"""Granite 4 H of IBM: most layers have the state of Mamba 2, the others attention; with experts or without."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from preheat.errors import ModelError
from preheat.model.attention_specs import AttentionSpec, RopeSpec
from preheat.model.config import Config
from preheat.model.families.common import LLAMA, attention, dense, model, multiplied, norm, with_logit_factor
from preheat.model.families.moe import experts
from preheat.model.families.states import layer_kinds, recurrence
from preheat.model.mlp_specs import MlpSpec, SharedSpec
from preheat.model.recurrence_specs import ConvSpec, DeltaSpec
from preheat.model.specs import LayerSpec, ModelSpec, Rename
from preheat.model.tensor_specs import LinearSpec, NormSpec, VectorSpec
from preheat.ops.values import Recurrence, StateRule

_STATES, _FULL = ("linear_attention", "mamba"), ("full_attention", "attention")
"""Kinds of layers: the names of transformers 5, and those of released models."""

_NAMES = replace(LLAMA, gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")
_MOE = r"(.*\.block_sparse_moe\.)"
_RENAMES = (
    Rename(r"(.*\.mamba\.(?:A_log|dt_bias|D))", (r"\1.weight",)),
    Rename(rf"{_MOE}input_linear\.weight", (r"\1experts.{}.gate.weight", r"\1experts.{}.up.weight")),
    Rename(rf"{_MOE}output_linear\.weight", (r"\1experts.{}.down.weight",)),
)
"""Numbers that are no module's weight, and experts in one tensor."""

_MAMBA = StateRule(unit=False, delta=False, betas=False, skip=True, gate_first=True)


def granite_hybrid(config: Config) -> ModelSpec:
    """Most layers have a state of Mamba 2; an MLP beside the experts, if there are any; layers need not turn."""
    config = config.with_defaults(
        max_position_embeddings=2048, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024,
        mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_head="auto", mamba_d_conv=4, mamba_expand=2,
        mamba_conv_bias=True, time_step_limit=[0.0, math.inf],
    )  # fmt: skip
    config.require_silu()
    config.refuse("normalization_function", "rmsnorm")
    config.refuse("position_embedding_type", "nope", "rope", "absolute")  # old libraries write "absolute"
    hidden, value, rope = config.size("hidden_size"), _recurrence(config), config.rope()
    turns = config.get("position_embedding_type") == "rope"
    factor = config.positive("residual_multiplier", 1.0)

    def layer(index: int, state: bool) -> LayerSpec:
        prefix = LLAMA.layer.format(index)
        made = LayerSpec(
            attention=_mamba(config, f"{prefix}mamba.", value) if state else _attention(config, prefix, rope, turns),
            mlp=_mlp(config, prefix),
            input_norm=norm(config, prefix + LLAMA.input_norm, hidden),
            post_norm=norm(config, prefix + LLAMA.post_norm, hidden),
        )
        return multiplied(made, factor)

    embedded = config.positive("embedding_multiplier", 1.0)
    made = model(
        config, LLAMA, tuple(layer(index, state) for index, state in enumerate(_kinds(config))),
        max_positions=config.max_positions(rope) if turns else config.size("max_position_embeddings"),
        scale=None if embedded == 1 else embedded, renames=_RENAMES,
    )  # fmt: skip
    return with_logit_factor(made, 1 / config.positive("logits_scaling", 1.0))


def _kinds(config: Config) -> list[bool]:
    """Return whether each layer has a state."""
    one, other = config.get("layer_types"), config.get("layers_block_type")
    if one is not None and other is not None and one != other:
        raise ModelError(
            "config.json has layer_types and layers_block_type with different values: set one of them to null with "
            "--hf-overrides"
        )
    kinds = [_STATES[0]] * config.num_layers() if one is None and other is None else one or other
    return layer_kinds(config, kinds, _STATES, _FULL)


def _attention(config: Config, prefix: str, rope: RopeSpec, turns: bool) -> AttentionSpec:
    """Return attention whose heads turn only if the config says so."""
    bias = config.flag("attention_bias")
    made = attention(config, LLAMA, prefix, None, rope, qkv_bias=bias, o_bias=bias, qk_norm=False)
    return replace(made, scale=config.positive("attention_multiplier", 1.0), rope=rope if turns else None)


def _mlp(config: Config, prefix: str) -> MlpSpec:
    """Return the MLP of all tokens, beside experts if there are any."""
    block = dense(config, _NAMES, prefix, bias=False, inner=config.size("shared_intermediate_size"))
    if config.get("num_local_experts") == 0:
        return block
    at = f"{prefix}block_sparse_moe."
    routed = experts(
        config, f"{at}router.layer", (f"{at}experts.{{}}.gate", f"{at}experts.{{}}.up", f"{at}experts.{{}}.down"),
        count=config.size("num_local_experts"), inner=config.size("intermediate_size"),
        top_k=config.size("num_experts_per_tok"), renormalize=True, round_weights=True,
    )  # fmt: skip
    return replace(routed, shared=SharedSpec(block=block))


def _recurrence(config: Config) -> Recurrence:
    """Return the sizes and the rule of a layer's state. Raises ModelError for sizes that do not fit."""
    names = {
        "key_heads": "mamba_n_groups", "value_heads": "mamba_n_heads", "key_dim": "mamba_d_state",
        "value_dim": "mamba_d_head", "taps": "mamba_d_conv",
    }  # fmt: skip
    inner, heads = config.size("mamba_expand") * config.size("hidden_size"), config.size("mamba_n_heads")
    dim = inner // heads if config.get("mamba_d_head") == "auto" else config.size("mamba_d_head")
    if dim * heads != inner:
        raise ModelError(
            f"config.json: mamba_n_heads {heads} times mamba_d_head {dim} must be mamba_expand times hidden_size, "
            f"{inner}"
        )
    rule = _MAMBA._replace(bias=config.flag("mamba_conv_bias"), limits=_limits(config))
    return recurrence(config, names, rule._replace(normed=heads // config.size("mamba_n_groups")), value_dim=dim)


def _limits(config: Config) -> tuple[float, float]:
    """Return the least and the greatest step of a state."""
    stated = config.get("time_step_limit")
    numbers = [_number(each) for each in stated] if isinstance(stated, list) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise ModelError(f"config.json: time_step_limit must be two numbers, the lower one first; got {stated!r}")
    return numbers[0], numbers[1]


def _number(value: object) -> float:
    """Return a number as transformers writes it: it has an object for infinity. NaN for anything else."""
    if isinstance(value, Mapping):
        value = math.inf if value.get("__float__") == "Infinity" else None
    return float(value) if isinstance(value, int | float) else math.nan


def _mamba(config: Config, at: str, value: Recurrence) -> DeltaSpec:
    """Return the recurrence of the module ``at``: queries are its C, keys its B, values its x."""
    hidden, heads, bias = config.size("hidden_size"), value.value_heads, config.flag("mamba_proj_bias")
    keys, values = value.key_size, value.value_size
    x, b, c = (0, values), (values, values + keys), (values + keys, value.channels)
    behind = values + value.channels  # the projection has gates, then x, B and C, then steps
    order = *((first + values, last + values) for first, last in (c, b, x)), (0, values), (behind, behind + heads)
    return DeltaSpec(
        value=value,
        qkv=LinearSpec(parts=((f"{at}in_proj", value.inputs),), inputs=hidden, bias=bias, order=order),
        o=LinearSpec(parts=((f"{at}out_proj", hidden),), inputs=values, bias=bias),
        conv=ConvSpec(f"{at}conv1d", value.channels, value.taps, value.rule.bias, (c, b, x)),
        rate=VectorSpec(f"{at}A_log", heads),
        bias=VectorSpec(f"{at}dt_bias", heads),
        norm=NormSpec(f"{at}norm", values, config.positive("rms_norm_eps", 1e-6)),
        skip=VectorSpec(f"{at}D", heads),
    )
