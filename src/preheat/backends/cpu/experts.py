"""Routed experts on a CPU, see :mod:`preheat.ops.matmul`.

Each expert that a step needs is computed by itself. Only the step knows the number of rows of an expert. The rows are
padded to one of a few sizes. The sizes are proven before ready, like the sizes of linear layers
(:mod:`preheat.backends.cpu.linear`). More rows than the largest size are computed in parts of it.

A step without adapters, of experts that no ranks share, is one operation; a compiler does not look into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.layers import ExpertsWeights, LayerContext
from preheat.backends.cpu.linear import REFERENCES, packed_linear, proven_size
from preheat.backends.cpu.lowrank import Shrunk, SlotTable, expand, shrink
from preheat.backends.cpu.products import products_of
from preheat.backends.cpu.quantized import fp8_linear
from preheat.backends.layer import Products, all_ranks, all_ranks_at_once, routed_by_ranks
from preheat.ops.activation import ACTIVATIONS
from preheat.ops.kinds import Activation, ActivationScales
from preheat.ops.matmul import NOTHING, add_delta, tree_sum
from preheat.ops.moe import combine, route, routed, routed_splits
from preheat.ops.opaque import opaque
from preheat.ops.quantization import QuantizedWeight
from preheat.ops.values import Experts, Matmul, Routing

LARGEST = max(REFERENCES)
SIZES = tuple(1 << power for power in range(LARGEST.bit_length()))

AFTER = (
    "str activation, Tensor? correction, Tensor? factors, int top_k, bool renormalize, bool round_weights, "
    "str scoring, int groups, int top_groups, int best, float factor"
)
"""The last arguments of an operation: the activation, the correction, the factors, and the fields of Routing."""


class ExpertsLayer:
    """The routed experts of ``value``."""

    def __init__(
        self, value: Experts, weights: ExpertsWeights, context: LayerContext, slots: SlotTable | None = None
    ) -> None:
        self._routing, self._count, self._ranks = value.routing, value.down.groups.experts, context.ranks
        self._correction, self._factors = weights.correction, weights.factors
        self.slots, self._split, self._coded = slots, value.down.order.is_split, value.down.input != "plain"
        self._activation = value.gate_up.finish.activation or "silu_and_mul"
        self._gate_up, self._down = (
            [products_of(of, each, bias, context.ranks) for each, bias in zip(matrices(given), biases, strict=True)]
            for of, given, biases in (
                (value.gate_up, weights.gate_up, _biases(weights.gate_up_bias, self._count)),
                (value.down, weights.down, _biases(weights.down_bias, self._count)),
            )
        )
        if not self._coded:
            _prove(value.gate_up)
            _prove(value.down)
        self._dealt = value.own is not None
        self._operation: Callable[..., Tensor] = _fp8_experts if self._coded else _experts
        self._operands = self._all_operands(value)

    def _all_operands(self, value: Experts) -> tuple[Any, ...]:
        """Return the operands of the single operation; none if ranks exchange."""
        if self._split or self._dealt:
            return ()
        more = self._activation, self._correction, self._factors, *value.routing
        layers = [[each.parts[0].operands for each in layer] for layer in (self._gate_up, self._down)]
        if not self._coded:
            packed = ([packed for packed, *_ in layer] for layer in layers)
            biases = ([bias for _, bias, _ in layer if bias is not None] for layer in layers)
            return *packed, *biases, value.down.inputs, *more
        found = list[Any]()
        for layer in layers:
            found += [each for parts, *_ in layer for each in parts], [scales for _, scales, *_ in layer]
        biases = ([bias for _, _, bias, *_ in layer if bias is not None] for layer in layers)
        return *found, *biases, [layer[0][3] for layer in layers], value.down.input, *more

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the output [tokens, hidden] of ``x`` [tokens, hidden] and ``logits`` [tokens, experts].

        The output is the same on all ranks.
        """
        adapted = self.slots is not None and bool(self.slots.groups)
        if self._operands and not adapted:
            return self._operation(x, logits, *self._operands)
        chosen, weights = route(logits, self._routing, self._correction, self._factors)
        shrunk = list[Shrunk]()

        def expert(number: int, slots: Tensor) -> list[Tensor]:
            return self._expert(number, x[slots // chosen.shape[1]], slots, shrunk)

        if self._dealt:
            assert self._ranks is not None, "there is at least one rank"
            return routed_by_ranks(x, (chosen, weights), self._ranks, self._count, lambda *of: expert(*of)[0])
        sums = routed_splits(x, chosen, weights, self._count, expert)
        if not self._split:
            return sums[0]
        if not adapted:
            return all_ranks(tree_sum(sums), self._ranks).to(x.dtype)
        total, *roots = all_ranks_at_once([tree_sum(sums), *(each.sums for each in shrunk)], self._ranks)
        more = torch.full((chosen.numel(), x.shape[1]), NOTHING)
        for each, root in zip(shrunk, roots, strict=True):
            more[each.rows] = each.factors.expand(root, each.slot, x.dtype)
        return add_delta(total.to(x.dtype), combine(more.view(len(x), chosen.shape[1], -1), weights))

    def _expert(self, number: int, x: Tensor, slots: Tensor, shrunk: list[Shrunk]) -> list[Tensor]:
        """Return the output of expert ``number`` for the rows ``x`` in ``slots``.

        It is [rows, hidden], or a tensor for each of its K splits. Sums of the expert's down adapter that ranks share
        are added to ``shrunk``.
        """
        terms = self.slots
        groups = [] if terms is None else terms.rows.groups_of(slots // self._routing.top_k)
        gate_up, down = ([], []) if terms is None else terms.of_expert(number)
        (y,) = _padded(self._gate_up[number], x)
        _add(y, shrink(x, gate_up, groups))
        inner = ACTIVATIONS[self._activation](y)
        found, more = _padded(self._down[number], inner), shrink(inner, down, groups)
        if self._split:
            shrunk += [each._replace(rows=slots[each.rows]) for each in more]
        else:
            _add(found[0], more)
        return found

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        yield from (each for layer in (self._gate_up, self._down) for one in layer for each in one.weights())
        yield from (each for each in (self._correction, self._factors) if each is not None)

    def state(self) -> Iterable[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return () if self.slots is None else self.slots.tensors()


def _biases(bias: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if bias is None else bias.unbind()


def matrices(weight: Tensor | QuantizedWeight) -> Iterator[Tensor | QuantizedWeight]:
    """Yield the matrix of each expert."""
    return (weight[at] if isinstance(weight, Tensor) else weight.part(at) for at in range(weight.shape[0]))


def _prove(value: Matmul) -> None:
    """Prove all sizes of the products of an expert's layer."""
    order, dtype = value.order, torch.float32 if value.order.is_split else getattr(torch, value.weight.dtype)
    for outputs in set(order.tiles or (value.outputs,)):
        for size in SIZES:
            proven_size(size, outputs, value.inputs // order.own_k_splits, dtype, torch.get_num_threads())


def _padded(products: Products, rows: Tensor) -> list[Tensor]:
    """Return the ``products`` of ``rows``, by numbers of rows that are proven."""
    parts = zip(*map(products, padded(rows)), strict=True)
    return [torch.cat(each)[: len(rows)] for each in parts]


def _add(y: Tensor, shrunk: Sequence[Shrunk]) -> None:
    expand(y, shrunk, [each.sums for each in shrunk])


def padded(rows: Tensor) -> Sequence[Tensor]:
    """Return ``rows`` in parts of proven sizes, with rows added."""
    count = len(rows)
    size = next((size for size in SIZES if size >= count), -(-count // LARGEST) * LARGEST)
    parts: Sequence[Tensor] = torch.split(F.pad(rows, (0, 0, 0, size - count)), LARGEST)
    return parts


@opaque(
    "(Tensor x, Tensor logits, Tensor[] gate_up, Tensor[] down, Tensor[] gate_up_bias, Tensor[] down_bias, int inner, "
    f"{AFTER}) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _experts(  # noqa: PLR0917 - arguments of torch's operations are told by their place
    x: Tensor, logits: Tensor, gate_up: list[Tensor], down: list[Tensor], gate_up_bias: list[Tensor],
    down_bias: list[Tensor], inner: int, activation: Activation, correction: Tensor | None, factors: Tensor | None,
    *routing: Any,
) -> Tensor:  # fmt: skip
    """Compute the experts; ``gate_up`` and ``down`` are oneDNN's copies of the matrices, without biases if none."""

    def expert(number: int, rows: Tensor) -> Tensor:
        return torch.cat([block(number, part) for part in padded(rows)])[: len(rows)]

    def block(number: int, rows: Tensor) -> Tensor:
        first, last = (biases[number] if biases else None for biases in (gate_up_bias, down_bias))
        inner_rows = ACTIVATIONS[activation](packed_linear(rows, gate_up[number], first, 2 * inner))
        return packed_linear(inner_rows, down[number], last, rows.shape[1])

    chosen, weights = route(logits, Routing(*routing), correction, factors)
    return routed(x, chosen, weights, len(gate_up), expert)


@opaque(
    "(Tensor x, Tensor logits, Tensor[] gate_up, Tensor[] gate_up_scales, Tensor[] down, Tensor[] down_scales, "
    f"Tensor[] gate_up_bias, Tensor[] down_bias, Tensor?[] statics, str kind, {AFTER}) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _fp8_experts(  # noqa: PLR0917 - as those of the operation above
    x: Tensor, logits: Tensor, gate_up: list[Tensor], gate_up_scales: list[Tensor], down: list[Tensor],
    down_scales: list[Tensor], gate_up_bias: list[Tensor], down_bias: list[Tensor], statics: list[Tensor | None],
    kind: ActivationScales, activation: Activation, correction: Tensor | None, factors: Tensor | None, *routing: Any,
) -> Tensor:  # fmt: skip
    """Compute the experts with float8 activations.

    ``gate_up`` and ``down`` are the parts of all experts, one expert after the other, without biases if none.
    ``statics`` are the static scales of their inputs.
    """
    layers = (gate_up, gate_up_scales, gate_up_bias), (down, down_scales, down_bias)

    def layer(at: int, rows: Tensor, number: int) -> Tensor:
        parts, scales, biases = layers[at]
        each, bias = len(parts) // len(scales), biases[number] if biases else None
        return fp8_linear(rows, parts[number * each : (number + 1) * each], scales[number], bias, statics[at], kind)

    def expert(number: int, rows: Tensor) -> Tensor:
        return layer(1, ACTIVATIONS[activation](layer(0, rows, number)), number)

    return routed(x, *route(logits, Routing(*routing), correction, factors), len(down_scales), expert)
