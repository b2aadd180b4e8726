"""Routed experts on Gaudi: every expert sees every token.

A graph's shapes are static. A token's choice of experts decides only the results that it takes. The work equals a dense
block's with all experts. The contract's order of additions is kept, and the host waits for nothing. See
:mod:`preheat.ops.matmul`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from preheat.backends.base.layers import ExpertsWeights, LayerContext
from preheat.backends.hpu.linear import SizedProduct, Sizes, products_of
from preheat.backends.layer import all_ranks
from preheat.ops.matmul import finished, tree_sum
from preheat.ops.moe import combine, route
from preheat.ops.quantization import plain
from preheat.ops.values import Experts


class ExpertsLayer:
    """The routed experts of ``value``; ranks may share the inner numbers."""

    slots = None

    def __init__(self, value: Experts, weights: ExpertsWeights, context: LayerContext, sizes: Sizes) -> None:
        self._routing, self._order, self._ranks = value.routing, value.down.order, context.ranks
        gate_up, down = (plain(each) for each in weights[:2])
        self._gate_up = [products_of(value.gate_up, each, None, sizes) for each in gate_up]
        self._down = [products_of(value.down, each, None, sizes)[0] for each in down]

    @property
    def parts(self) -> Sequence[SizedProduct]:
        """One product of each shape, for the backend to prepare."""
        return self._gate_up[0][0].parts[0], self._down[0].parts[0]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the output [tokens, hidden] of ``x`` [tokens, hidden] and ``logits`` [tokens, experts].

        The output is the same on all ranks.
        """
        chosen, weights = route(logits, self._routing)
        dtype = torch.float32 if self._order.is_split else x.dtype
        splits = [x.new_zeros(*chosen.shape, x.shape[1], dtype=dtype)] * self._order.own_k_splits
        for number, ((gate_up, finish), down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            mine = (chosen == number).unsqueeze(-1)
            parts = down(finished(gate_up(x)[0], finish))
            splits = [torch.where(mine, part.unsqueeze(1), rows) for part, rows in zip(parts, splits, strict=True)]
        sums = [combine(rows, weights) for rows in splits]
        return all_ranks(tree_sum(sums), self._ranks).to(x.dtype) if self._order.is_split else sums[0]

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        for gate_up, _ in self._gate_up:
            yield from gate_up.weights()
        for down in self._down:
            yield from down.weights()

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        return ()
