"""The second product of adapters on CUDA, and the activation behind it.

See :mod:`preheat.backends.cuda.matmul.lora.slots` for their matrices.

Shrunk rows are rounded to the dtype of the matrices, bfloat16 or fp32; the products of all tiles of ranks are added in
one fp32 accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.matmul.lora.shrink import SLOT_STRIDE, ShrinkSizes, added_up
from preheat.backends.cuda.pointwise.elementwise import plus, rounded, silu_mul
from preheat.ops.values import TILE

WIDTH, WARPS = 128, 4
"""Outputs and warps of a program, by measurement on an H200."""

HEAD_WIDTH, HEAD_WARPS, HEAD_OUTPUTS = 512, 8, 1 << 16
"""Outputs and warps of a program for layers with at least ``HEAD_OUTPUTS`` outputs: for an output head. Few adapters
adapt the head, so that most of its programs have nothing to do but to begin."""


class Expansion(NamedTuple):
    """The operands of the second product for the rows of a step.

    ``shrunk`` fp32 [ranks, parts, tiles of a rank, slots, TILE] are the shrunk rows, scaled. Tile t is on rank t %
    ranks; there is one rank unless the first matrices are divided. Or ``shrunk`` are sums still to be added up, [1,
    parts, tiles, splits of the inputs, slots, TILE].

    ``b`` is [adapter slots, tiles, outputs, TILE]. ``adapter_slots`` int32 [blocks] and ``members`` int32 [blocks *
    rows of one] are the blocks of rows; a launch has the first of them. ``slots`` int32 [rows] is the index of each row
    in ``members``, -1 for none.

    ``tiles`` int32 [adapter slots, TABLE_PARTS] are the tiles in use. The tiles of an adapter slot begin
    ``SLOT_STRIDE`` numbers behind the tiles of the slot before. ``scales`` fp32 lie like the tiles. ``bounds`` int32
    [parts + 1] are bounds of outputs. ``whose``, ``starts`` and ``present`` int32 list adapters by rows, see
    :class:`preheat.backends.cuda.matmul.lora.blocks.Blocks`.
    """

    shrunk: Tensor
    b: Tensor
    adapter_slots: Tensor
    members: Tensor
    slots: Tensor
    tiles: Tensor
    scales: Tensor
    bounds: Tensor
    whose: Tensor
    starts: Tensor
    present: Tensor

    @property
    def block(self) -> int:
        """Rows of a block."""
        return len(self.members) // len(self.adapter_slots)

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the kernel of a layer that adds the expansion to its own outputs."""
        world, parts = self.shrunk.shape[:2]
        return {"TILES": self.b.shape[1], "WORLD": world, "PARTS": parts}


@triton.jit
def times(ws, shrunk, acc):
    """Return ``acc`` [outputs, rows] plus ``ws`` [outputs, ranks] times fp32 ``shrunk`` [ranks, rows].

    ``shrunk`` is rounded to the dtype of ``ws``.
    """
    return tl.dot(ws, rounded(shrunk, ws), acc, input_precision="ieee")


@triton.jit
def _tile_of(out, adapter_slot, tile, adapters, height, TILES: tl.constexpr, RANKS: tl.constexpr, used):
    """Return a tile of the second matrix, [outputs, ranks]."""
    at = ((adapter_slot * TILES + tile).to(tl.int64) * height + out) * RANKS
    return tl.load(adapters.b + at[:, None] + tl.arange(0, RANKS)[None, :], mask=used, other=0.0)


@triton.jit
def _shrunk_of(
    slot, tile, adapter_slot, part, adapters, slots, TILES: tl.constexpr, RANKS: tl.constexpr, WORLD: tl.constexpr,
    PARTS: tl.constexpr, K_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the shrunk rows in ``slot``, [ranks, rows], for a tile of ranks of the adapter in ``adapter_slot``."""
    own = (tile % WORLD * PARTS + part) * ((TILES + WORLD - 1) // WORLD) + tile // WORLD
    if SPLITS == 0:
        at = ((own * slots + slot).to(tl.int64) * RANKS)[:, None] + tl.arange(0, RANKS)[None, :]
        found = tl.load(adapters.shrunk + at)
    else:
        at = ((own * K_SPLITS * SPLITS * slots + slot).to(tl.int64) * RANKS)[:, None] + tl.arange(0, RANKS)[None, :]
        found = added_up(adapters.shrunk + at, slots * RANKS, K_SPLITS, SPLITS)
        found *= tl.load(adapters.scales + adapter_slot * SLOT_STRIDE + part)
    return found.T


@triton.jit
def _expanded(
    result, ws, out, slot, adapter_slot, count, part, adapters, height, slots, TILES: tl.constexpr, RANKS: tl.constexpr,
    WORLD: tl.constexpr, PARTS: tl.constexpr, K_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return ``result`` [outputs, rows] with the term of the adapter in ``adapter_slot``.

    ``part`` has ``count`` tiles of ranks; ``ws`` is the first of them. ``height`` is the number of outputs of all
    parts.
    """
    if count > 0:
        shrunk = _shrunk_of(slot, 0, adapter_slot, part, adapters, slots, TILES, RANKS, WORLD, PARTS, K_SPLITS, SPLITS)
        acc = times(ws, shrunk, tl.zeros(result.shape, tl.float32))
        if TILES > 1:
            for tile in tl.range(1, count, num_stages=1):
                more = _tile_of(out, adapter_slot, tile, adapters, height, TILES, RANKS, True)
                shrunk = _shrunk_of(
                    slot, tile, adapter_slot, part, adapters, slots, TILES, RANKS, WORLD, PARTS, K_SPLITS, SPLITS
                )
                acc = times(more, shrunk, acc)
        result = rounded(plus(result.to(tl.float32), acc), result)
    return result


@triton.jit
def _column_of(column, adapters, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile of outputs with number ``column`` among all, as a number inside of its part, and the part.

    A tile has COLUMNS outputs.
    """
    part = 0
    for each in tl.static_range(1, PARTS):
        tiles = tl.cdiv(tl.load(adapters.bounds + each) - tl.load(adapters.bounds + each - 1), COLUMNS)
        behind = (part == each - 1) & (column >= tiles)
        column, part = tl.where(behind, column - tiles, column), tl.where(behind, each, part)
    return column, part


@triton.jit(do_not_specialize=["rows", "slots"])
def _expand(
    y, z, adapters, rows, columns, slots, TILES: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, WORLD: tl.constexpr, PARTS: tl.constexpr, K_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    WHOLE: tl.constexpr, gated: tl.constexpr, chosen: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write a tile [COLUMNS, ROWS] of ``z``, with the rows of one block.

    ``gated``: the tile comes from both halves of y. Else it comes from one part of y, and z is y; the tiles of parts
    follow each other. Behind the blocks in ``slots`` come, if ``gated``, rows without an adapter. Operands that no
    kernel writes are read before the kernel ahead has ended.

    ``SPLITS``: the number of sums of a K split that are to be added up, or 0. ``WHOLE``: 16 divides all bounds.
    ``chosen``: the kernel ahead wrote the members of blocks, too.
    """
    column, part = tl.program_id(0), 0
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # blocks beyond the step's begin and end beside the kernel ahead
    if not gated:
        column, part = _column_of(column, adapters, PARTS, COLUMNS)
    slot = block * ROWS + tl.arange(0, ROWS)
    adapter_slot = tl.load(adapters.adapter_slots + block, mask=block * ROWS < slots, other=-1)
    row = slot
    if not chosen:
        row = tl.load(adapters.members + slot, mask=slot < slots, other=-1)
    if gated:
        own = slot - slots
        free = tl.load(adapters.slots + own, mask=(own >= 0) & (own < rows), other=0) < 0
        row = tl.where(free, own, row)
    count = tl.load(adapters.tiles + adapter_slot * SLOT_STRIDE + part, mask=adapter_slot >= 0, other=0)
    count_up = count
    if gated:
        first, end, height = column * COLUMNS, columns, columns * 2
        count_up = tl.load(adapters.tiles + adapter_slot * SLOT_STRIDE + 1, mask=adapter_slot >= 0, other=0)
    else:
        bounds = adapters.bounds + part
        first, end, height = tl.load(bounds) + column * COLUMNS, tl.load(bounds + 1), columns
        if WHOLE:
            first, end = tl.multiple_of(first, 16), tl.multiple_of(end, 16)
    out = first + tl.arange(0, COLUMNS)
    of = tl.minimum(out, end - 1)
    ws = _tile_of(of, adapter_slot, 0, adapters, height, TILES, RANKS, count > 0)
    ws_up = ws
    if gated:
        ws_up = _tile_of(of + columns, adapter_slot, 0, adapters, height, TILES, RANKS, count_up > 0)
    if chosen:
        begin(overlap)
        row = tl.load(adapters.members + slot)
    there = (row >= 0) & (row < rows)
    needed = (gated or count > 0) and tl.max(there.to(tl.int32)) > 0
    if not chosen and (needed or tl.program_id(0) + block == 0):  # one must, or this may end before the kernel ahead
        begin(overlap)
    if needed:
        stored = (out < end)[:, None] & there[None, :]
        token = tl.where(there, row, 0).to(tl.int64)[None, :]
        at = y + token * height + out[:, None]
        to = z + token * columns + out[:, None]  # here, or it gets a layout that takes a fifth more registers
        result = tl.load(at, mask=stored, other=0.0)
        up = result
        if gated:
            up = tl.load(at + columns, mask=stored, other=0.0)
        result = _expanded(
            result, ws, of, slot, adapter_slot, count, part, adapters, height, slots, TILES, RANKS, WORLD, PARTS,
            K_SPLITS, SPLITS,
        )  # fmt: skip
        if gated:
            up = _expanded(
                up, ws_up, of + columns, slot, adapter_slot, count_up, 1, adapters, height, slots, TILES, RANKS, WORLD,
                PARTS, K_SPLITS, SPLITS,
            )  # fmt: skip
            result = silu_mul(result, up)
        tl.store(to, result, mask=stored)


def expand(
    y: Tensor,
    adapters: Expansion,
    bounds: Sequence[int],
    *,
    gated: bool = False,
    chosen: bool = False,
    sums: ShrinkSizes | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``y`` [rows, outputs] with the terms of ``adapters``.

    They are added in place. If ``gated``, the result is silu of y's first half times the other half, in ``out`` or a
    new tensor. ``bounds`` are the bounds of ``adapters``. ``chosen``: a kernel wrote the members of blocks. With
    ``sums``, the sizes of a layer's first product, the sums in ``adapters`` are added up first.
    """
    rows, outputs = y.shape
    columns = outputs // 2 if gated else outputs
    z = y if not gated else y.new_empty(rows, columns) if out is None else out
    parts = [columns] if gated else [end - start for start, end in pairwise(bounds)]
    (world, stacked), slots = adapters.shrunk.shape[:2], adapters.shrunk.shape[-2]
    size = adapters.block
    blocks = slots // size + (cdiv(rows, size) if gated else 0)
    width, warps = (WIDTH, WARPS) if outputs < HEAD_OUTPUTS else (HEAD_WIDTH, HEAD_WARPS)
    _expand[sum(cdiv(part, width) for part in parts), blocks](
        y, z, adapters, rows, columns, slots, TILES=adapters.b.shape[1], RANKS=TILE, COLUMNS=width, ROWS=size,
        WORLD=world, PARTS=stacked, K_SPLITS=sums.k_splits if sums else 1, SPLITS=sums.splits if sums else 0,
        WHOLE=all(bound % 16 == 0 for bound in bounds), gated=gated, chosen=chosen,
        enable_fp_fusion=False, **options(num_warps=warps, num_stages=2),
    )  # fmt: skip
    return z
