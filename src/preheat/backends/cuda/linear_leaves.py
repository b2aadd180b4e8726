"""Row-parallel linear layers on CUDA: leaves of the inputs, see :mod:`preheat.ops.matmul`.

A leaf is :func:`preheat.backends.cuda.linear.in_order` over a range of the inputs: one fp32 accumulator, in order. A
program adds the leaves that its rank has in the tree's order, in registers. What it writes is their fp32 sum or, where
one rank has all of them, the layer's output. Tiles say which program computes an output and change no bits.

Leaves of quantized weights are those of :mod:`preheat.backends.cuda.linear_quantized`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.cuda.collective import RankSums
from preheat.backends.cuda.matmul.gemm import multiply
from preheat.backends.cuda.matmul.weights import DeviceWeight, codes_of, dequantized, tensors_of
from preheat.backends.cuda.quantize import quantize_parts
from preheat.backends.cuda.tuning import (
    MANY_ROWS,
    REFERENCE,
    SHARED_BYTES,
    Expanded,
    LinearShape,
    Tile,
    codes_bytes,
    codes_rule,
    reference,
)
from preheat.ops.kinds import Scheme
from preheat.ops.quantization import QuantizedRows


class LeafShape(NamedTuple):
    """What the choice of tiles depends on, but for the number of rows. ``inputs`` are this rank's; ``scheme`` says how
    weights are quantized, if they are.
    """

    outputs: int
    inputs: int
    leaves: int
    dtype: torch.dtype
    scheme: Scheme | None = None

    @property
    def of_leaf(self) -> LinearShape:
        """The layer of one leaf."""
        return LinearShape(self.outputs, self.inputs // self.leaves, dtype=self.dtype, scheme=self.scheme)


LeafChoice = Tile | Expanded
"""Tiles; of weights that are dequantized into memory first, those of plain ones."""


def leaf_tile(shape: LeafShape, rows: int) -> LeafChoice:
    """Tiles for ``rows`` rows. The copy engine cannot stop inside a tile, so it needs leaves that its tiles divide."""
    if shape.scheme is None:
        return _plain_tile(shape, rows)
    if shape.scheme.activations is None and rows >= MANY_ROWS:
        return Expanded(_plain_tile(shape, rows))
    return _codes_tile(shape.of_leaf, rows)


def _codes_tile(shape: LinearShape, rows: int) -> Tile:
    """About those of a layer, but the sums of other leaves wait in registers, of which a thread has 255."""
    assert shape.scheme is not None
    if shape.scheme.activations is not None:
        tile = codes_rule(shape, rows)
        return tile if tile.outputs < 128 else Tile(128, 64, 128, 8, 4)
    height = max(16, min(1 << (rows - 1).bit_length(), 64))
    room = SHARED_BYTES // codes_bytes(shape, 64, height, 128)
    return Tile(64, height, 128, 4, max(2, min(room, 8 if height < 64 else 4)))


def _plain_tile(shape: LeafShape, rows: int) -> Tile:
    if shape.dtype != torch.bfloat16:
        return REFERENCE[shape.dtype]
    size = shape.inputs // shape.leaves
    deep = 128 if size % 128 == 0 else 64
    bulk = size % deep == 0
    if rows <= 16:
        return Tile(64, 16, deep, 4, 6 if deep == 128 else 8, bulk)
    if rows <= 32:
        return Tile(64, 32, deep, 4, 5, bulk)
    if rows <= 64:
        return Tile(64, 64, deep, 4, 4, bulk)
    if rows <= 256:
        return Tile(128, 64, 64, 4, 4, bulk)
    return Tile(128, 128, 64, 8, 4, bulk)


def plain_leaf_tile(shape: LeafShape) -> LeafChoice:
    """The tiles whose order is beyond doubt."""
    found = reference(shape.of_leaf)
    assert isinstance(found, Tile | Expanded)
    return found


class LeafTiles:
    """From row-parallel layers and numbers of rows to tiles."""

    def __init__(self) -> None:
        self._made: dict[tuple[LeafShape, int], LeafChoice] = {}

    def __call__(self, shape: LeafShape, rows: int) -> LeafChoice:
        made = self._made.get((shape, rows))
        if made is None:
            made = self._made[shape, rows] = leaf_tile(shape, rows)
        return made

    def reject(self, shape: LeafShape, rows: int) -> None:
        """From now on serve ``rows`` rows with the tiles whose order is beyond doubt."""
        self._made[shape, rows] = plain_leaf_tile(shape)


def sum_leaves(
    choice: LeafChoice,
    x: Tensor | QuantizedRows,
    weight: Tensor | DeviceWeight,
    bias: Tensor | None,
    leaves: int,
    y: Tensor,
) -> Tensor:
    """``y`` [rows, outputs] of ``x`` [rows, inputs] and ``weight`` [outputs, inputs] in ``leaves``, all contiguous:
    fp32 sums, or outputs in the dtype of the layer.
    """
    if isinstance(weight, DeviceWeight):
        assert weight.splits == leaves
        if weight.scheme.activations is not None:
            assert isinstance(choice, Tile)
            multiply(choice, codes_of(x, weight), weight, bias, False, y, leaves)
            return y
        assert isinstance(x, Tensor)
        if isinstance(choice, Tile):
            multiply(choice, x, weight, bias, False, y, leaves)
            return y
        assert isinstance(choice.choice, Tile)
        choice, weight = choice.choice, dequantized(weight)
    assert isinstance(choice, Tile) and isinstance(x, Tensor)
    multiply(choice, x, weight, bias, False, y, leaves)
    return y


class CudaLeafLinear:
    """``weight`` [outputs, inputs of this rank], plain or quantized, in ``leaves``, and ``bias`` [outputs]; ``ranks``
    add what each has.
    """

    slots = None

    def __init__(
        self, weight: Tensor | DeviceWeight, bias: Tensor | None, leaves: int, ranks: RankSums, tiles: LeafTiles
    ) -> None:
        self.weight, self.bias, self.ranks, self.tiles = weight, bias, ranks, tiles
        scheme = weight.scheme if isinstance(weight, DeviceWeight) else None
        self.shape = LeafShape(len(weight), weight.shape[1], leaves, weight.dtype, scheme)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank] -> [rows, outputs], a new tensor of its dtype, the same on all ranks."""
        size = len(x), self.shape.outputs
        if self.ranks.world == 1:
            return self._sum(x, self.bias, x.new_empty(size))
        return self.ranks.sum(self.partial(x, x.new_empty(size, dtype=torch.float32)), self.bias, x.dtype)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return tensors_of(self.weight, self.bias)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return ()

    def partial(self, x: Tensor, y: Tensor) -> Tensor:
        """``y`` fp32 [rows, outputs], this rank's sum, without the bias."""
        return self._sum(x, None, y)

    def _sum(self, x: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        rows: Tensor | QuantizedRows = x
        if self.shape.scheme is not None and self.shape.scheme.activations == "token" and self.ranks.world > 1:
            rows = quantize_parts(x, self.ranks)
        return sum_leaves(self.tiles(self.shape, len(x)), rows, self.weight, bias, self.shape.leaves, y)
