"""Layers of given weights, by the protocol of backends: the value is read off the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from preheat.backends.base.layers import ExpertsLayer, ExpertsWeights, Layer, LayerContext, LayerWeights
from preheat.ops.kinds import Activation
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
