"""The second product of adapters on CUDA, see :mod:`preheat.backends.cuda.lora`: at the end of a tile of a linear
layer, or in a launch of its own.

What all of a row's places but its own would add are zeros in one product with them: sums begin with 0.0, so not even a
sign changes. With bfloat16 matrices the shrunk rows are cut into three bfloat16 numbers each, whose sum they are, so
that the matrix unit loses nothing of them; the three products and those of all tiles of ranks are added in one fp32
accumulator. Other matrices are held and multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import begin, options
from preheat.ops.lora import TILE

BLOCK = 16
"""Rows of a block, all of one adapter: what the matrix unit multiplies at once."""

ROWS_OF_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


class Expansion(NamedTuple):
    """What rows of a step are expanded by. ``shrunk`` fp32 [parts, tiles, slots, TILE], scaled; ``b`` [places, tiles,
    outputs, TILE]; ``slots`` int32 [rows], -1 for none; ``places`` int32 [slots / BLOCK]; ``tiles`` int32 [places,
    parts] are in use; ``bounds`` int32 [parts + 1] are outputs.
    """

    shrunk: Tensor
    b: Tensor
    slots: Tensor
    places: Tensor
    tiles: Tensor
    bounds: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Keywords of a launch."""
        places, tiles = self.b.shape[:2]
        return {"PARTS": self.tiles.shape[1], "TILES": tiles, "PLACES": places, "RANKS": TILE}

    @property
    def room(self) -> int:
        """Slots that there are."""
        return self.shrunk.shape[2]


@triton.jit
def _times(ws, shrunk, acc):
    """``acc`` [outputs, rows] plus ``ws`` [outputs, ranks] times fp32 ``shrunk`` [ranks, rows], as if both were of
    fp32.
    """
    if ws.dtype == tl.float32:
        acc = tl.dot(ws, shrunk, acc, input_precision="ieee")
    else:
        high = shrunk.to(ws.dtype)
        rest = shrunk - high.to(tl.float32)
        middle = rest.to(ws.dtype)
        low = (rest - middle.to(tl.float32)).to(ws.dtype)
        acc = tl.dot(ws, low, acc)
        acc = tl.dot(ws, middle, acc)
        acc = tl.dot(ws, high, acc)
    return acc


@triton.jit
def part_of(adapters, first, PARTS: tl.constexpr):
    """The part that has output ``first``."""
    part = first * 0
    for each in tl.static_range(1, PARTS):
        part += (first >= tl.load(adapters.bounds + each)).to(tl.int32)
    return part


@triton.jit
def expanded(
    result, out, token, part, adapters, height, room, PARTS: tl.constexpr, TILES: tl.constexpr, PLACES: tl.constexpr,
    RANKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """``result`` [outputs, rows], outputs ``out`` of rows ``token``, all of one ``part``, and what adapters add to it.

    ``AT_ONCE`` places are multiplied in one product. ``height`` are the outputs of all parts.
    """
    slot = tl.load(adapters.slots + token)
    place = tl.load(adapters.places + slot // ROWS_OF_BLOCK, mask=slot >= 0, other=-1)
    count = tl.load(adapters.tiles + place * PARTS + part, mask=slot >= 0, other=0)
    column = tl.arange(0, AT_ONCE * RANKS)
    acc = tl.zeros(result.shape, tl.float32)
    for first in tl.range(0, PLACES, AT_ONCE, num_stages=1):  # shared memory is full of tiles of weights
        whose = first + column // RANKS
        own = (place[None, :] == whose[:, None]) & (count > 0)[None, :]
        for tile in tl.range(0, tl.max(tl.where(own, count[None, :], 0)), num_stages=1):
            mine = own & (count > tile)[None, :]
            used = tl.max(mine.to(tl.int32), 1) > 0
            at = ((part * TILES + tile) * room + slot).to(tl.int64)[None, :] * RANKS + (column % RANKS)[:, None]
            shrunk = tl.load(adapters.shrunk + at, mask=mine, other=0.0)
            at = ((whose * TILES + tile).to(tl.int64) * height)[None, :] + out[:, None]
            ws = tl.load(adapters.b + at * RANKS + (column % RANKS)[None, :], mask=used[None, :], other=0.0)
            acc = _times(ws, shrunk, acc)
    return tl.where((count > 0)[None, :], (result.to(tl.float32) + acc).to(result.dtype), result)


@triton.jit(do_not_specialize=["rows", "room"])
def _expand(
    y, z, adapters, rows, columns, room, PARTS: tl.constexpr, TILES: tl.constexpr, PLACES: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, gated: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """A tile [COLUMNS, ROWS] of ``z``: of both halves of y, if ``gated``, else of one part of y, which z then is.

    ``WHOLE``: 16 divides all bounds.
    """
    if gated:
        first, end, height = tl.program_id(0) * COLUMNS, columns, columns * 2
    else:
        bounds = adapters.bounds + tl.program_id(2)
        first, end, height = tl.load(bounds) + tl.program_id(0) * COLUMNS, tl.load(bounds + 1), columns
        if WHOLE:
            first, end = tl.multiple_of(first, 16), tl.multiple_of(end, 16)
    out, row = first + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    begin(overlap)
    token = tl.minimum(row, rows - 1)
    stored = (out < end)[:, None] & (row < rows)[None, :]
    if not gated:
        stored &= (tl.load(adapters.slots + token) >= 0)[None, :]
    of = tl.minimum(out, height - 1)
    at = y + token.to(tl.int64)[None, :] * height + out[:, None]
    result = tl.load(at, mask=stored, other=0.0)
    if gated:
        up = tl.load(at + columns, mask=stored, other=0.0)
        result = expanded(result, of, token, 0, adapters, height, room, PARTS, TILES, PLACES, RANKS, 1)
        of = tl.minimum(out + columns, height - 1)
        up = expanded(up, of, token, 1, adapters, height, room, PARTS, TILES, PLACES, RANKS, 1)
        result = silu_mul(result, up)
    else:
        part = tl.program_id(2)
        result = expanded(result, of, token, part, adapters, height, room, PARTS, TILES, PLACES, RANKS, 1)
    tl.store(z + token.to(tl.int64)[None, :] * columns + out[:, None], result, mask=stored)


def expand(y: Tensor, adapters: Expansion, bounds: Sequence[int], *, gated: bool, out: Tensor | None = None) -> Tensor:
    """``y`` [rows, outputs] with what ``adapters`` add: in place, or, ``gated``, silu of its first half times the other
    in ``out`` or a new tensor. ``bounds`` are those of ``adapters``.
    """
    rows, outputs = y.shape
    columns = outputs // 2 if gated else outputs
    z = y if not gated else y.new_empty(rows, columns) if out is None else out
    height = min(64, max(16, triton.next_power_of_2(rows)))
    widest = max(end - start for start, end in pairwise(bounds))
    across, parts = (columns, 1) if gated else (widest, len(bounds) - 1)
    _expand[triton.cdiv(across, 128), triton.cdiv(rows, height), parts](
        y, z, adapters, rows, columns, adapters.room, **adapters.sizes, COLUMNS=128, ROWS=height,
        WHOLE=all(bound % 16 == 0 for bound in bounds), gated=gated,
        enable_fp_fusion=False, **options(num_warps=4 if height < 64 else 8, num_stages=2),
    )  # fmt: skip
    return z
