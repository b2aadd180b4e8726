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

AT_ONCE = 16
"""Up to so many places are multiplied in one product, which of few rows may have any."""

FEW_ROWS = 512
"""Up to so many. Of more rows, which are those of prompts, a tile has one place or two."""

ROWS_OF_BLOCK: tl.constexpr = tl.constexpr(BLOCK)

TABLE_PARTS = 4
"""Parts that a row of a layer's table has room for: each begins at a multiple of 16 bytes."""

PLACE_IN_TABLE: tl.constexpr = tl.constexpr(2 * TABLE_PARTS)
"""Numbers in a table for each place: of the tiles in use, and of scales."""


class Expansion(NamedTuple):
    """What rows of a step are expanded by. ``shrunk`` fp32 [parts, tiles, slots, TILE], scaled; ``b`` [places, tiles,
    outputs, TILE]; ``slots`` int32 [rows], -1 for none; ``places`` int32 [slots / BLOCK]; ``tiles`` int32 [places,
    TABLE_PARTS] are in use, where a place's begin ``PLACE_IN_TABLE`` behind the one's before; ``bounds`` int32 [parts +
    1] are outputs.
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
        return {"PARTS": len(self.shrunk), "TILES": tiles, "PLACES": places, "RANKS": TILE}

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
def adapters_of(token, adapters):
    """Slots and places of rows ``token``, -1 for none. No kernel writes them."""
    slot = tl.load(adapters.slots + token)
    return slot, tl.load(adapters.places + slot // ROWS_OF_BLOCK, mask=slot >= 0, other=-1)


@triton.jit
def tiles_of(place, part, adapters):
    """In how many tiles of ranks the adapters in each ``place`` have a ``part``. No kernel writes that, either."""
    return tl.load(adapters.tiles + place * PLACE_IN_TABLE + part, mask=place >= 0, other=0)


@triton.jit
def expanded(
    result, out, slot, place, count, part, adapters, height, room, TILES: tl.constexpr, PLACES: tl.constexpr,
    RANKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """``result`` [outputs, rows], outputs ``out`` of rows that are all of one ``part``, and what adapters add to it:
    those in ``place``, whose part is ``count`` tiles of ranks.

    ``AT_ONCE`` places are multiplied in one product. ``height`` are the outputs of all parts.
    """
    WIDTH: tl.constexpr = AT_ONCE * RANKS
    rank, nth = tl.arange(0, RANKS), tl.arange(0, AT_ONCE)
    acc = tl.zeros(result.shape, tl.float32)
    lowest, end = 0, PLACES
    if AT_ONCE < PLACES:  # only those that some row has
        lowest, end = tl.min(tl.where(count > 0, place, PLACES)), tl.max(tl.where(count > 0, place, -1)) + 1
    for first in tl.range(lowest, end, AT_ONCE, num_stages=1):  # shared memory is full of tiles of weights
        own = place[:, None] == (first + nth)[None, :]
        for tile in tl.range(0, tl.max(tl.where(own, count[:, None], 0)), num_stages=1):
            more = count > tile
            own_tile = own & more[:, None]
            at = ((part * TILES + tile) * room + slot).to(tl.int64) * RANKS
            shrunk = tl.load(adapters.shrunk + at[:, None] + rank[None, :], mask=more[:, None], other=0.0)
            spread = tl.where(own_tile[:, :, None], shrunk[:, None, :], 0.0).reshape([place.shape[0], WIDTH])
            used = tl.max(own_tile.to(tl.int32), 0) > 0
            at = (((first + nth) * TILES + tile).to(tl.int64) * height)[None, :] + out[:, None]
            ws = tl.load(
                adapters.b + (at * RANKS)[:, :, None] + rank[None, None, :], mask=used[None, :, None], other=0.0
            ).reshape([out.shape[0], WIDTH])
            acc = _times(ws, spread.T, acc)
    return tl.where((count > 0)[None, :], (result.to(tl.float32) + acc).to(result.dtype), result)


@triton.jit(do_not_specialize=["rows", "room"])
def _expand(
    y, z, adapters, rows, columns, room, PARTS: tl.constexpr, TILES: tl.constexpr, PLACES: tl.constexpr,
    RANKS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
    gated: tl.constexpr, overlap: tl.constexpr,
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
    token = tl.minimum(row, rows - 1)
    slot, place = adapters_of(token, adapters)
    begin(overlap)
    stored = (out < end)[:, None] & (row < rows)[None, :]
    if not gated:
        stored &= (slot >= 0)[None, :]
    of = tl.minimum(out, height - 1)
    at = y + token.to(tl.int64)[None, :] * height + out[:, None]
    result = tl.load(at, mask=stored, other=0.0)
    part = tl.program_id(2)
    count = tiles_of(place, part, adapters)
    if gated:
        up = tl.load(at + columns, mask=stored, other=0.0)
        result = expanded(result, of, slot, place, count, part, adapters, height, room, TILES, PLACES, RANKS, AT_ONCE)
        of = tl.minimum(out + columns, height - 1)
        count = tiles_of(place, 1, adapters)
        up = expanded(up, of, slot, place, count, 1, adapters, height, room, TILES, PLACES, RANKS, AT_ONCE)
        result = silu_mul(result, up)
    else:
        result = expanded(result, of, slot, place, count, part, adapters, height, room, TILES, PLACES, RANKS, AT_ONCE)
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
    at_once = triton.next_power_of_2(len(adapters.b)) if rows <= FEW_ROWS and len(adapters.b) <= AT_ONCE else 1
    _expand[triton.cdiv(across, 128), triton.cdiv(rows, height), parts](
        y, z, adapters, rows, columns, adapters.room, **adapters.sizes, AT_ONCE=at_once, COLUMNS=128, ROWS=height,
        WHOLE=all(bound % 16 == 0 for bound in bounds), gated=gated,
        enable_fp_fusion=False, **options(num_warps=4 if height < 64 else 8, num_stages=2),
    )  # fmt: skip
    return z
