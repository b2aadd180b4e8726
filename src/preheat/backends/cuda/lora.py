"""Linear layers with places for adapters on CUDA, see :mod:`preheat.ops.lora`.

The rows of each adapter are cut into blocks of ``ROWS``, filled up with none. One launch shrinks: a program has a block
of rows, a part of the inputs and one of the layer's matrices, and writes its sums, which no other adds to. One launch
expands: a program adds up the sums of its block in order, multiplies them by B and adds the product to its rows of the
layer's output, in place. Rows without an adapter are in no block, so nothing of them is touched.

How many blocks there are at most follows from the number of rows and of places, and so do both grids; programs of
blocks that a step has not end at once. Every row goes through products of one shape, whatever the number of rows.

With bfloat16 matrices the shrunk rows are cut into three bfloat16 numbers each, whose sum they are, so that the matrix
unit loses nothing of them; the three products and those of all tiles of ranks are added in one fp32 accumulator. Other
matrices are held and multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base import HOST_COPIES, AdapterStep, Linear
from preheat.backends.cuda.activation import activate, clip
from preheat.backends.cuda.launch import begin, options
from preheat.backends.cuda.linear import CudaLinear
from preheat.ops.kinds import Activation
from preheat.ops.lora import PART, TILE

ROWS = 16
"""Rows of a block: what the matrix unit multiplies at once."""

CHUNK = 128
"""Inputs of a part that are loaded at once."""

FEW_BLOCKS = 2
"""Up to so many blocks, expanding takes narrow tiles: there are processors left."""


@triton.jit(do_not_specialize=["rows", "slots"])
def _shrink(
    x,
    a,
    sums,
    places,
    members,
    tiles,
    rows,
    inputs,
    slots,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    EVEN: tl.constexpr,
    overlap: tl.constexpr,
):
    """Sums [part, tile of ranks, split of the inputs, slot, rank] of one block, split and part. A slot is a row's place
    among all blocks.
    """
    block, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, rank, k = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, CHUNK)
    place = tl.load(places + block)
    row = tl.load(members + block * ROWS + lane)
    begin(overlap)
    if place >= 0:
        there = ((row >= 0) & (row < rows))[:, None]
        at = x + row.to(tl.int64)[:, None] * inputs
        for tile in range(tl.load(tiles + place * PARTS + part)):
            of = a + (((place * PARTS + part) * TILES + tile) * RANKS + rank).to(tl.int64)[:, None] * inputs
            acc = tl.zeros([ROWS, RANKS], tl.float32)
            for first in range(0, WIDTH, CHUNK):
                here = split * WIDTH + first + k[None, :]
                if EVEN:
                    xs = tl.load(at + here, mask=there, other=0.0)
                    ws = tl.load(of + here)
                else:
                    xs = tl.load(at + here, mask=there & (here < inputs), other=0.0)
                    ws = tl.load(of + here, mask=here < inputs, other=0.0)
                acc = tl.dot(xs.to(ws.dtype), ws.T, acc, input_precision="ieee")
            to = ((part * TILES + tile) * SPLITS + split) * slots + block * ROWS + lane
            tl.store(sums + to.to(tl.int64)[:, None] * RANKS + rank[None, :], acc)


@triton.jit
def _times(shrunk, ws, acc):
    """``acc`` plus fp32 ``shrunk`` times ``ws``, as if both were of fp32."""
    if ws.dtype == tl.float32:
        return tl.dot(shrunk, ws, acc, input_precision="ieee")
    high = shrunk.to(ws.dtype)
    rest = shrunk - high.to(tl.float32)
    middle = rest.to(ws.dtype)
    low = (rest - middle.to(tl.float32)).to(ws.dtype)
    acc = tl.dot(low, ws, acc)
    acc = tl.dot(middle, ws, acc)
    return tl.dot(high, ws, acc)


@triton.jit(do_not_specialize=["rows", "slots"])
def _expand(
    y,
    b,
    sums,
    places,
    members,
    tiles,
    scales,
    bounds,
    rows,
    outputs,
    slots,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    overlap: tl.constexpr,
):
    """Add to y what the adapter of one block expands to, in COLUMNS outputs of one part, which has those between two
    ``bounds``.
    """
    block, part = tl.program_id(0), tl.program_id(2)
    lane, rank = tl.arange(0, ROWS), tl.arange(0, RANKS)
    place = tl.load(places + block)
    row = tl.load(members + block * ROWS + lane)
    column = tl.load(bounds + part) + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(bounds + part + 1)
    begin(overlap)
    if place >= 0:
        count = tl.load(tiles + place * PARTS + part)
        if (count > 0) & (tl.min(column) < end):
            inside = column < end
            scale = tl.load(scales + place * PARTS + part)
            stored = ((row >= 0) & (row < rows))[:, None] & inside[None, :]
            to = y + row.to(tl.int64)[:, None] * outputs + column[None, :]
            before = tl.load(to, mask=stored, other=0.0)
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for tile in range(count):
                at = (part * TILES + tile) * SPLITS * slots + block * ROWS + lane
                own = sums + at.to(tl.int64)[:, None] * RANKS + rank[None, :]
                shrunk = tl.load(own)
                for split in tl.static_range(1, SPLITS):
                    shrunk += tl.load(own + split * slots * RANKS)
                of = ((place * TILES + tile).to(tl.int64) * outputs + column)[:, None] * RANKS + rank[None, :]
                ws = tl.load(b + of, mask=inside[:, None], other=0.0)
                acc = _times(shrunk * scale, ws.T, acc)
            tl.store(to, (before.to(tl.float32) + acc).to(y.dtype.element_ty), mask=stored)


class Blocks:
    """The blocks of a step's rows on the device, for at most ``tokens`` rows and ``places`` adapters."""

    def __init__(self, tokens: int, places: int, device: torch.device) -> None:
        self._count = most_blocks(tokens, places)
        self._device = torch.full((self._count * (1 + ROWS),), -1, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._host = [torch.full_like(self._device, -1, device="cpu", pin_memory=cuda) for _ in range(HOST_COPIES)]
        self._copied = [torch.cuda.Event() for _ in range(HOST_COPIES)] if cuda else []
        self._there = np.empty(0, np.int32)
        self.places, self.members = self._device[: self._count], self._device[self._count :]

    def send(self, turn: int, places: np.ndarray) -> None:
        """Let the device have the blocks of rows with these ``places``, by host copy ``turn``, unless it has them."""
        if np.array_equal(places, self._there):
            return
        if self._copied:
            self._copied[turn].synchronize()  # long since done, unless one step describes rows twice
        write_blocks(self._host[turn].numpy(), self._count, places)
        self._device.copy_(self._host[turn], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
        self._there = places.copy()


def most_blocks(rows: int, places: int) -> int:
    """Blocks that so many rows can have: all but one of each adapter are full."""
    return min(rows, rows // ROWS + places)


def write_blocks(words: np.ndarray, count: int, places: np.ndarray) -> None:
    """Write ``words`` int32 [count * (1 + ROWS)]: the place of each block, then the rows of each, in the order of
    places; -1 stands for none.
    """
    words.fill(-1)
    rows = np.flatnonzero(places >= 0)
    rows = rows[np.argsort(places[rows], kind="stable")]
    sizes = np.bincount(places[rows])
    blocks = -(-sizes // ROWS)
    words[: blocks.sum()] = np.arange(len(sizes)).repeat(blocks)
    skipped = (blocks.cumsum() - blocks) * ROWS - (sizes.cumsum() - sizes)
    words[count + np.arange(len(rows)) + skipped.repeat(sizes)] = rows


class CudaAdapterRows:
    """Which adapter each row of a step has, see :class:`preheat.backends.base.AdapterRows`."""

    def __init__(self, tokens: int, places: int, device: torch.device) -> None:
        self._kinds: dict[AdapterStep, Blocks] = {
            "tokens": Blocks(tokens, places, device), "sampled": Blocks(tokens, places, device)
        }  # fmt: skip
        self.blocks: Blocks | None = None

    def describe(self, turn: int, step: AdapterStep, places: np.ndarray) -> None:
        self._kinds[step].send(turn, places)

    def use(self, step: AdapterStep | None) -> None:
        self.blocks = self._kinds[step] if step else None


class CudaAdapters:
    """See :class:`preheat.backends.base.AdapterOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, tokens: int, places: int) -> CudaAdapterRows:
        return CudaAdapterRows(tokens, places, self._device)

    def linear(
        self,
        linear: Linear,
        inputs: int,
        outputs: Sequence[int],
        rows: CudaAdapterRows,
        *,
        places: int,
        max_rank: int,
        dtype: torch.dtype,
        activation: Activation | None,
        clip: float | None,
    ) -> AdaptedLinear:
        assert isinstance(linear, CudaLinear)
        factors = Factors(inputs, outputs, places, max_rank, matrix_dtype(linear.shape.dtype, dtype), self._device)
        return AdaptedLinear(linear, factors, rows, activation, clip)


def matrix_dtype(model: torch.dtype, adapters: torch.dtype) -> torch.dtype:
    """In which matrices of adapters are held: what the matrix unit multiplies, if that is what all of them are."""
    return torch.bfloat16 if model == adapters == torch.bfloat16 else torch.float32


class AdaptedLinear:
    """``inner``, then what the adapters of its rows add to each of its parts, then its activation. In steps without
    adapters it is ``plain``, the layer that an engine without adapters has.
    """

    def __init__(
        self,
        linear: CudaLinear,
        factors: Factors,
        rows: CudaAdapterRows,
        activation: Activation | None,
        limit: float | None,
    ) -> None:
        self.inner, self.plain = linear, linear.finished(activation, limit)
        self._factors, self._rows, self._activation, self._limit = factors, rows, activation, limit
        self.write, self.clear, self.bytes = factors.write, factors.clear, factors.bytes

    @property
    def linears(self) -> tuple[CudaLinear, CudaLinear]:
        """The layers whose kernels are chosen by shape and number of rows."""
        return self.plain, self.inner

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs]."""
        blocks = self._rows.blocks
        if blocks is None:
            return self.plain(x, out)
        finished = self._activation is None and self._limit is None
        y = self.inner(x, out if finished else None)
        self._factors.add(x, y, blocks)
        if self._activation is not None:
            y = activate(y, self._activation)
        return y if self._limit is None else clip(y, self._limit)


class Factors:
    """Both matrices of the adapters in all ``places``, for all parts of a layer, in tiles of ranks, of which ``tiles``
    [places, parts] are in use.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        places: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts, self._tiles_each = len(outputs), -(-max_rank // TILE)
        self._inputs, self._widest, self._places = inputs, max(outputs), places
        self._bounds = np.cumsum([0, *outputs]).tolist()
        self._width = min(PART, max(triton.next_power_of_2(inputs), TILE))
        self._splits = -(-inputs // self._width)
        self._a = torch.zeros(places, parts, self._tiles_each, TILE, inputs, dtype=dtype, device=device)
        self._b = torch.zeros(places, self._tiles_each, self._bounds[-1], TILE, dtype=dtype, device=device)
        self._host_tiles, self._host_scales = torch.zeros(places, parts, dtype=torch.int32), torch.zeros(places, parts)
        self._tiles, self._scales = self._host_tiles.to(device, copy=True), self._host_scales.to(device, copy=True)
        self._bounds_there = torch.tensor(self._bounds, dtype=torch.int32, device=device)

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def write(self, place: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Put ``a`` [rank, inputs] and ``b`` [outputs, rank] into ``place``."""
        rank, tiles = len(a), -(-len(a) // TILE)
        more, first, last = tiles * TILE - rank, self._bounds[part], self._bounds[part + 1]
        downs = F.pad(a.to(self._a.dtype), (0, 0, 0, more)).view(tiles, TILE, self._inputs)
        ups = F.pad(b.to(self._b.dtype), (0, more)).view(last - first, tiles, TILE).transpose(0, 1).contiguous()
        for tile in range(tiles):
            self._a[place, part, tile].copy_(downs[tile])
            self._b[place, tile, first:last].copy_(ups[tile])
        self._host_tiles[place, part], self._host_scales[place, part] = tiles, scale
        self._tell()

    def clear(self, place: int) -> None:
        """Leave the layer alone for rows of ``place``."""
        if self._host_tiles[place].any():
            self._host_tiles[place] = 0
            self._tell()

    def _tell(self) -> None:
        self._tiles.copy_(self._host_tiles)
        self._scales.copy_(self._host_scales)

    def add(self, x: Tensor, y: Tensor, blocks: Blocks) -> None:
        """Add to ``y`` [rows, outputs], in place, what is expanded from ``x`` [rows, inputs]."""
        rows, count, parts = len(x), most_blocks(len(x), self._places), len(self._bounds) - 1
        sums = x.new_empty(parts, self._tiles_each, self._splits, count * ROWS, TILE, dtype=torch.float32)
        sizes = {"PARTS": parts, "TILES": self._tiles_each, "SPLITS": self._splits, "ROWS": ROWS, "RANKS": TILE}
        _shrink[count, self._splits, parts](
            x, self._a, sums, blocks.places, blocks.members, self._tiles, rows, self._inputs, count * ROWS,
            WIDTH=self._width, CHUNK=min(CHUNK, self._width), EVEN=self._inputs % self._width == 0,
            **sizes, **options(num_warps=4, num_stages=4),
        )  # fmt: skip
        columns = 128 if count <= FEW_BLOCKS else 256
        _expand[count, triton.cdiv(self._widest, columns), parts](
            y, self._b, sums, blocks.places, blocks.members, self._tiles, self._scales, self._bounds_there, rows,
            self._bounds[-1], count * ROWS, COLUMNS=columns, enable_fp_fusion=False,
            **sizes, **options(num_warps=4, num_stages=2),
        )  # fmt: skip
