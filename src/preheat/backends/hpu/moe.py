"""Routed experts on Gaudi, see :mod:`preheat.ops.moe`: a graph's shapes are static, so every expert sees every token.

Which expert a token chose decides only which of the results it takes. The work is that of a dense block with all
experts; the contract's order of additions is kept, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from preheat.backends.hpu.linear import HpuLinear, Shape, Sizes
from preheat.ops.moe import combine, route
from preheat.ops.values import Routing


class HpuExperts:
    """The experts of ``gate_up`` [experts, 2 * inner, hidden] and ``down`` [experts, hidden, inner]."""

    def __init__(self, gate_up: Tensor, down: Tensor, routing: Routing, sizes: Sizes) -> None:
        self._routing = routing
        self._experts = [
            (
                HpuLinear(up, None, sizes, activation="silu_and_mul"),
                HpuLinear(out, None, sizes),
            )
            for up, out in zip(gate_up, down, strict=True)
        ]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden]."""
        chosen, weights = route(logits, self._routing)
        rows = x.new_zeros(*chosen.shape, x.shape[1])
        for number, (gate_up, down) in enumerate(self._experts):
            mine = (chosen == number).unsqueeze(-1)
            rows = torch.where(mine, down(gate_up(x)).unsqueeze(1), rows)
        return combine(rows, weights)

    @property
    def shape(self) -> tuple[Shape, Shape]:
        """Those of the two linear layers of an expert."""
        first, second = self._experts[0]
        return first.shape, second.shape

    def settle(self, rows: Sequence[int]) -> None:
        for layer in self._experts[0]:
            layer.settle(rows)
