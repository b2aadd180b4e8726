"""Linear layers on Gaudi: y = x W^T + b by the matrix engine.

The finish of a layer is in the same recipe.

Contract. As on a CPU (:mod:`preheat.backends.cpu.linear`): one dot product for each output, in the device's order, plus
the bias, rounded once. A row's bits do not depend on the number of rows. A proof at boot finds the numbers of rows that
the device computes alike, for the plan's numbers of rows. Its products are exactly zero unless the order of additions
differs. Rows are computed as they are, with rows added, or in parts of the reference's number of rows. Without batch
invariance they are always computed as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.hpu.bridge import Bridge
from preheat.backends.layer import Splits, Tiles
from preheat.ops.matmul import finished
from preheat.ops.proof import cancelling_rows, cancelling_weight, rows_compared
from preheat.ops.quantization import QuantizedWeight, plain
from preheat.ops.values import NOTHING_MORE, Finish, Matmul

REFERENCES = (64, 32, 16)
PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEPS = (1, 2, 4, 8, 16, 32, 64)


class Shape(NamedTuple):
    """Shape and dtype of a linear layer, the key of its proof."""

    outputs: int
    inputs: int
    dtype: torch.dtype


class Sizes:
    """Numbers of rows to compute at once, by shape and rows."""

    def __init__(self, bridge: Bridge, *, invariant: bool) -> None:
        self.bridge, self._invariant = bridge, invariant
        self._found: dict[tuple[Shape, int], int] = {}
        self._references: dict[Shape, int] = {}
        self._operands: dict[Shape, tuple[Tensor, Tensor]] = {}

    def of(self, shape: Shape, rows: int) -> int:
        """Return the number of rows to compute at once.

        It is at most the reference, for parts of it, if no size of at least ``rows`` has the reference's bits.
        """
        if not self._invariant:
            return rows
        size = self._found.get((shape, rows))
        if size is None:
            size = self._found[shape, rows] = self._prove(shape, rows)
        return size

    def select_kernels(self, shape: Shape, rows: Sequence[int]) -> None:
        """Prove all of ``rows``, then drop the operands of the proofs."""
        for count in rows:
            self.of(shape, count)
        self._operands.pop(shape, None)

    def _prove(self, shape: Shape, rows: int) -> int:
        reference = self._reference(shape)
        padded = dict.fromkeys(-(-rows // step) * step for step in STEPS)
        sizes = [size for size in padded if size < 2 * rows + reference]
        return next((size for size in sizes if self._agrees(shape, size, reference)), reference)

    def _reference(self, shape: Shape) -> int:
        """Return the one of `REFERENCES` that most `PROBES` agree with.

        Of equals it is the largest.
        """
        if shape not in self._references:
            votes = {
                rows: sum(self._agrees(shape, probe, rows) for probe in PROBES)
                for rows in REFERENCES
                if self._agrees(shape, rows, rows)
            }
            self._references[shape] = max(votes, key=lambda rows: votes[rows], default=REFERENCES[0])
        return self._references[shape]

    def _agrees(self, shape: Shape, size: int, reference: int) -> bool:
        """Return whether products of ``size`` rows have the reference's bits.

        The reference's bits are of parts of ``reference`` rows, in reverse order.
        """
        rows, weight = self._operands.get(shape) or self._make(shape)
        count = rows_compared(shape.outputs, size)
        repeats = -(-count // len(rows))
        expected = in_parts(rows.flip(0), weight, None, reference).flip(0).repeat(repeats, 1)[:count]
        found = in_parts(rows.repeat(repeats, 1)[:count], weight, None, size)
        return torch.equal(found.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))

    def _make(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return rows and a weight with products that are exactly zero."""
        count = rows_compared(shape.outputs, max(REFERENCES))
        rows = cancelling_rows(count, shape.inputs)
        weight = cancelling_weight(shape.outputs, shape.inputs)
        device = self.bridge.device
        made = rows.to(shape.dtype).to(device), weight.to(shape.dtype).to(device)
        self._operands[shape] = made
        return made


def in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Return ``x`` W^T in products of ``rows`` rows each."""
    padded = F.pad(x, (0, 0, 0, -len(x) % rows))
    return torch.cat([F.linear(part, weight, bias) for part in torch.split(padded, rows)])[: len(x)]


class SizedProduct:
    """Product with ``weight`` [outputs, inputs] and ``bias`` [outputs], then the rest of ``finish``."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        sizes: Sizes,
        *,
        finish: Finish = NOTHING_MORE,
    ) -> None:
        self.shape = Shape(weight.shape[0], weight.shape[1], weight.dtype)
        self._weight, self._bias, self._sizes = weight, bias, sizes
        self._finish = finish._replace(bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, outputs] of ``x`` [rows, inputs], a new tensor."""
        if torch.compiler.is_compiling():
            return self._run(x)
        with self._sizes.bridge.unit():
            return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        rows = len(x)
        size = self._sizes.of(self.shape, rows)
        if size >= rows:
            y = F.linear(F.pad(x, (0, 0, 0, size - rows)) if size > rows else x, self._weight, self._bias)[:rows]
        else:
            y = in_parts(x, self._weight, self._bias, size)
        return y if self._finish == NOTHING_MORE else finished(y.contiguous(), self._finish)

    def select_kernels(self, rows: Sequence[int]) -> None:
        self._sizes.select_kernels(self.shape, rows)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        yield self._weight
        yield from () if self._bias is None else (self._bias,)


def products_of(
    value: Matmul, weight: Tensor | QuantizedWeight, bias: Tensor | None, sizes: Sizes
) -> tuple[Tiles[SizedProduct] | Splits[SizedProduct], Finish]:
    """Return the products of a matrix, and the rest of its finish.

    A whole layer is one recipe with its activation.
    """

    def make(weight: Tensor, bias: Tensor | None) -> SizedProduct:
        return SizedProduct(weight, bias, sizes)

    finish, matrix = value.finish, plain(weight)
    if value.order.is_split:
        return Splits(make, matrix, value.order), finish
    if value.order.tiles:
        return Tiles.of(make, matrix, bias, value.order.tiles), finish
    whole = SizedProduct(matrix, bias, sizes, finish=finish)
    return Tiles([whole]), NOTHING_MORE
