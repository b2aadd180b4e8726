"""Layers of given weights, by the protocol of backends: the value is read off the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor

from preheat.backends.base.layers import ExpertsLayer, ExpertsWeights, Layer, LayerContext, LayerWeights
from preheat.ops import matmul
from preheat.ops.kinds import Activation
from preheat.ops.proof import noise
from preheat.ops.quantization import QuantizedWeight
from preheat.ops.values import (
    ONE_SUM,
    Dtype,
    Experts,
    Finish,
    Groups,
    LowRank,
    Matmul,
    Routing,
    SumOrder,
    WeightFormat,
)

Weight = Tensor | QuantizedWeight


def name_of(dtype: Any) -> Dtype:
    return cast(Dtype, str(dtype).removeprefix("torch."))


def value_of(weight: Weight, order: SumOrder = ONE_SUM, **more: Any) -> Matmul:
    """Return the value of a layer of ``weight`` [..., outputs, inputs of this rank]."""
    scheme = weight.scheme if isinstance(weight, QuantizedWeight) else None
    stored = WeightFormat(name_of(weight.dtype), scheme)
    read = (scheme.activations if scheme else None) or "plain"
    return Matmul(outputs=weight.shape[-2], inputs=weight.shape[-1], weight=stored, input=read, order=order, **more)


def splits(own: int, rank: int = 0, count: int = 4) -> SumOrder:
    """Return the sum order of a layer with ``own`` of ``count`` K splits on each rank."""
    return SumOrder(count, (rank * own, (rank + 1) * own))


def linear(
    backend: Any,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    clip: float | None = None,
    order: SumOrder = ONE_SUM,
    context: LayerContext = LayerContext(),  # noqa: B008 - it has no state
    terms: tuple[LowRank, ...] = (),
) -> Layer:
    value = value_of(weight, order, finish=Finish(bias is not None, activation, clip), terms=terms)
    made: Layer = backend.layer(value, LayerWeights(weight, bias), context)
    return made


def experts_value(gate_up: Weight, down: Weight, routing: Routing, order: SumOrder = ONE_SUM) -> Experts:
    groups = Groups(down.shape[0], routing.top_k)
    inner = down.shape[-1]
    halves = SumOrder(tiles=(inner // order.own_k_splits,) * (2 * order.own_k_splits)) if order.is_split else ONE_SUM
    return Experts(
        gate_up=value_of(gate_up, halves, groups=groups, finish=Finish(activation="silu_and_mul")),
        down=value_of(down, order, groups=groups),
        routing=routing,
    )


GATED: tuple[Activation, ...] = ("silu_and_mul", "clamped_silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul")
ROUTERS = (
    Routing(2, True, False),
    Routing(3, False, True),
    Routing(2, True, False, "sigmoid", groups=2, top_groups=1, best=2, factor=2.5),
)


class AnyExperts(NamedTuple):
    """Experts of any value, a step's ``x`` and router ``logits``, and the reference's output ``right``."""

    value: Experts
    weights: ExpertsWeights
    x: Tensor
    logits: Tensor
    right: Tensor


def any_experts(
    gate_up: Weight, down: Weight, routing: Routing, tokens: int, *,
    activation: Activation = "silu_and_mul", biased: bool = False, corrected: bool = False, weighted: bool = False,
) -> AnyExperts:  # fmt: skip
    """Return experts of these matrices; all other numbers are random."""
    (count, hidden, inner), dtype = down.shape, gate_up.dtype
    x, logits = noise(tokens, hidden, seed=5).to(dtype), noise(tokens, count, seed=6).to(dtype)
    biases = noise(count, 2 * inner, seed=7).to(dtype), noise(count, hidden, seed=8).to(dtype)
    correction, factors = (noise(count, seed=seed) if has else None for seed, has in ((9, corrected), (10, weighted)))
    value = experts_value(gate_up, down, routing)
    value = replace(
        value,
        gate_up=replace(value.gate_up, finish=Finish(bias=biased, activation=activation)),
        down=replace(value.down, finish=Finish(bias=biased)),
        corrected=corrected,
        weighted=weighted,
    )
    given = biases if biased else None
    right = matmul.experts(
        value, x, logits, (gate_up, down), biases=given, correction=correction, factors=factors
    )  # fmt: skip
    weights = ExpertsWeights(gate_up, down, *(given or (None, None)), correction, factors)
    return AnyExperts(value, weights, x, logits, right)


def with_room(value: Experts, slots: int, rank: int, dtype: Any) -> Experts:
    """Return ``value`` with room for adapters."""
    name, inner, split = name_of(dtype), value.down.inputs, value.down.order.is_split
    first = LowRank((inner, inner), slots, rank, name)
    last = LowRank((value.down.outputs,), slots, rank, name)
    if split:
        last = replace(last, shared="inputs", joins="combined")
    return replace(value, gate_up=replace(value.gate_up, terms=(first,)), down=replace(value.down, terms=(last,)))


def experts(
    backend: Any,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    *,
    order: SumOrder = ONE_SUM,
    context: LayerContext = LayerContext(),  # noqa: B008 - it has no state
) -> ExpertsLayer:
    value = experts_value(gate_up, down, routing, order)
    made: ExpertsLayer = backend.experts(value, ExpertsWeights(gate_up, down), context)
    return made


def product(layer: Any, x: Any) -> Tensor:
    """The product of a layer of the CUDA backend, before its terms and its activation."""
    found: Tensor = layer.by(layer.configs(layer.shape._replace(gated=False), len(x)), x, gated=False)
    return found


def without_terms(layer: Any, x: Any) -> Tensor:
    """What a layer of the CUDA backend gives in a step in which no row has an adapter."""
    found: Tensor = layer.by(layer.configs(layer.shape, len(x)), x)
    return found
