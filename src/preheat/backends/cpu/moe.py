"""Routed experts on a CPU, see :mod:`preheat.ops.moe`: each expert that a step needs is computed by itself.

How many rows an expert gets is known only in the step. They are padded to one of a few sizes, which are proven before
ready as those of linear layers are (:mod:`preheat.backends.cpu.linear`); above the largest, in parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.cpu.linear import REFERENCES, check_kernel, packed_linear, proven_size
from preheat.ops.activation import silu_and_mul
from preheat.ops.moe import route, routed
from preheat.ops.opaque import opaque
from preheat.ops.values import Routing

LARGEST = max(REFERENCES)
SIZES = tuple(1 << power for power in range(LARGEST.bit_length()))


class CpuExperts:
    """The experts of ``gate_up`` [experts, 2 * inner, hidden] and ``down`` [experts, hidden, inner], of which nothing
    is kept but oneDNN's copies.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, routing: Routing) -> None:
        check_kernel(gate_up.dtype)
        self._gate_up, self._down = (
            [torch.ops.mkldnn._reorder_linear_weight.default(weight) for weight in weights]
            for weights in (gate_up, down)
        )
        self._inner, self.routing = down.shape[2], routing
        self._hidden = down.shape[1]
        for size in SIZES:
            for weights in (gate_up, down):
                proven_size(size, *weights.shape[1:], weights.dtype, torch.get_num_threads())

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], a new tensor."""
        return _experts(x, logits, self._gate_up, self._down, self._inner, *self.routing)

    def gate_up(self, number: int, rows: Tensor) -> Tensor:
        """What expert ``number`` gives for ``rows`` [one of the sizes, hidden] before its activation."""
        return packed_linear(rows, self._gate_up[number], None, 2 * self._inner)

    def down(self, number: int, rows: Tensor) -> Tensor:
        """The same of its last product, for ``rows`` [one of the sizes, inner]."""
        return packed_linear(rows, self._down[number], None, self._hidden)


def padded(rows: Tensor) -> Sequence[Tensor]:
    """``rows`` with some added, in parts of sizes that are proven before ready."""
    count = len(rows)
    size = next((size for size in SIZES if size >= count), -(-count // LARGEST) * LARGEST)
    parts: Sequence[Tensor] = torch.split(F.pad(rows, (0, 0, 0, size - count)), LARGEST)
    return parts


@opaque(
    "(Tensor x, Tensor logits, Tensor[] gate_up, Tensor[] down, int inner, int top_k, bool renormalize, "
    "bool round_weights) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _experts(  # noqa: PLR0917 - arguments of torch's operations are told by their place
    x: Tensor, logits: Tensor, gate_up: list[Tensor], down: list[Tensor], inner: int,
    top_k: int, renormalize: bool, round_weights: bool,
) -> Tensor:  # fmt: skip  # fmt: skip
    """``gate_up`` and ``down`` are oneDNN's."""

    def expert(number: int, rows: Tensor) -> Tensor:
        parts = [block(part, gate_up[number], down[number]) for part in padded(rows)]
        return torch.cat(parts)[: len(rows)]

    def block(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        inner_rows = silu_and_mul(packed_linear(rows, gate_up, None, 2 * inner))
        return packed_linear(inner_rows, down, None, rows.shape[1])

    chosen, weights = route(logits, Routing(top_k, renormalize, round_weights))
    return routed(x, chosen, weights, len(gate_up), expert)
