"""The first product of adapters on CUDA, see :mod:`preheat.backends.cuda.lora`.

A program has a block of rows of one adapter, a part of the inputs and one of the layer's matrices, or all of them, and
writes its sums, which no other adds to. They are added up in order: where few rows shrink behind the layer itself, by
each program that expands them, which takes less than to wait for each other; else by the one that is the last of its
block. How many of a block have written, is counted in ``arrived`` then, which is zero again at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import begin, begin_early, begin_late, options
from preheat.backends.cuda.lora_blocks import BLOCK, TABLE_PARTS, TABLE_ROWS, Blocks
from preheat.ops.values import PART, TILE

CHUNK = 128
"""Inputs of a part that are loaded at once."""

PLACE_IN_TABLE: tl.constexpr = tl.constexpr(TABLE_ROWS * TABLE_PARTS)
"""Numbers in a table for each place."""


class Shrinking(NamedTuple):
    """What rows of a step shrink by. ``x`` [rows, inputs]; ``a`` [places, tiles of this rank, parts, TILE, inputs];
    ``sums`` fp32 [parts, tiles, parts of the inputs, slots, TILE] is room; ``tiles`` int32 and ``scales`` fp32 [places,
    TABLE_PARTS] as in :class:`preheat.backends.cuda.lora_expand.Expansion`; ``arrived`` int32 [blocks * parts].
    """

    x: Tensor
    a: Tensor
    sums: Tensor
    tiles: Tensor
    scales: Tensor
    arrived: Tensor


@dataclass(frozen=True)
class ShrinkSizes:
    """Of a layer whose ``parts`` have matrices of ``inputs``, of ``leaves`` equal ranges, and so many ``tiles``."""

    inputs: int
    parts: int
    tiles: int
    leaves: int

    @property
    def leaf(self) -> int:
        """Inputs of a leaf."""
        return self.inputs // self.leaves

    @property
    def width(self) -> int:
        """Inputs of a split."""
        return min(PART, max(int(triton.next_power_of_2(self.leaf)), TILE))

    @property
    def splits(self) -> int:
        """Of a leaf."""
        return -(-self.leaf // self.width)

    @cached_property
    def constants(self) -> dict[str, int | bool]:
        """Of the kernels."""
        return {
            "PARTS": self.parts, "TILES": self.tiles, "LEAVES": self.leaves, "SPLITS": self.splits,
            "WIDTH": self.width, "CHUNK": min(CHUNK, self.width), "RANKS": TILE, "EVEN": self.leaf % self.width == 0,
        }  # fmt: skip


@triton.jit
def _leaf_sum(sums, leaf: tl.constexpr, step, SPLITS: tl.constexpr):
    """Of a leaf's ``SPLITS`` sums, from the first to the last. ``step`` numbers lie between two of them."""
    total = tl.load(sums + leaf * SPLITS * step, cache_modifier=".cg")
    for each in tl.static_range(1, SPLITS):
        total += tl.load(sums + (leaf * SPLITS + each) * step, cache_modifier=".cg")
    return total


@triton.jit
def added_up(sums, step, LEAVES: tl.constexpr, SPLITS: tl.constexpr):
    """All that rows shrank to: the leaves, in their tree, of which each is the sum of ``SPLITS``. ``step`` numbers lie
    between two of those.
    """
    total = _leaf_sum(sums, 0, step, SPLITS)
    if LEAVES >= 2:
        total += _leaf_sum(sums, 1, step, SPLITS)
    if LEAVES == 4:
        right = _leaf_sum(sums, 2, step, SPLITS)
        right += _leaf_sum(sums, 3, step, SPLITS)
        total += right
    return total


@triton.jit(do_not_specialize=["rows", "slots"])
def _shrink(
    given, shrunk, places, members, rows, inputs, size, slots,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr, TILES: tl.constexpr, LEAVES: tl.constexpr, SPLITS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    ACROSS: tl.constexpr, adds: tl.constexpr, scaled: tl.constexpr, beside: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Sums [part, tile of ranks, split of the inputs, slot, rank] of one block, split and ``TOGETHER`` of the parts; if
    it ``adds``, by the last of a block's splits also what they are together, in the tree of leaves, ``scaled`` if that
    is the root. A slot is a row's place among all blocks; a leaf has ``size`` inputs, and SPLITS splits. ``ACROSS``: a
    power of two, RANKS for each part or more.

    ``beside``: the kernel before this one has waited for x, and writes nothing that is read here: only this one's end
    waits for its.
    """
    block, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    across, k = tl.arange(0, ACROSS)[None, :], tl.arange(0, CHUNK)
    counter = given.arrived + block * (PARTS // TOGETHER) + part
    if TOGETHER > 1:
        part = part * TOGETHER + tl.minimum(across // RANKS, TOGETHER - 1)
    rank = across % RANKS
    start, end = split // SPLITS * size + split % SPLITS * WIDTH, (split // SPLITS + 1) * size
    slot = block * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.load(places + block)
    row = tl.load(members + slot)
    if beside:
        begin_early(overlap)
    else:
        begin(overlap)
    if place >= 0:
        there = (row >= 0) & (row < rows)
        at = given.x + row.to(tl.int64) * inputs
        counts = tl.load(given.tiles + place * PLACE_IN_TABLE + part)
        count = tl.max(counts) if TOGETHER > 1 else counts
        for tile in range(tl.maximum(count, 1)):  # the first without waiting for how many there are
            of = given.a + (((place * TILES + tile) * PARTS + part) * RANKS + rank).to(tl.int64) * inputs
            acc = tl.zeros([ROWS, ACROSS], tl.float32)
            for first in range(0, WIDTH, CHUNK):
                here = start + first + k
                if EVEN:
                    xs = tl.load(at + here[None, :], mask=there, other=0.0)
                    ws = tl.load(of + here[:, None])
                else:
                    xs = tl.load(at + here[None, :], mask=there & (here < end)[None, :], other=0.0)
                    ws = tl.load(of + here[:, None], mask=(here < end)[:, None], other=0.0)
                acc = tl.dot(xs.to(ws.dtype), ws, acc, input_precision="ieee")
            to = (((part * TILES + tile) * LEAVES * SPLITS + split) * slots + slot).to(tl.int64) * RANKS + rank
            tl.store(given.sums + to, acc, mask=tile < counts)
        if adds:
            tl.debug_barrier()  # all warps have written before one of them says so
            if tl.atomic_add(counter, 1, sem="acq_rel") == LEAVES * SPLITS - 1:
                tl.debug_barrier()
                scale = tl.load(given.scales + place * PLACE_IN_TABLE + part)
                for tile in range(count):
                    own = part * TILES + tile
                    of = given.sums + (own * LEAVES * SPLITS * slots + slot).to(tl.int64) * RANKS + rank
                    total = added_up(of, slots * RANKS, LEAVES, SPLITS)
                    if scaled:
                        total *= scale
                    tl.store(shrunk + (own * slots + slot).to(tl.int64) * RANKS + rank, total, mask=tile < counts)
                tl.store(counter, 0)
    if beside:
        begin_late(overlap)


def shrink(
    given: Shrinking,
    shrunk: Tensor,
    blocks: Blocks,
    sizes: ShrinkSizes,
    *,
    beside: bool,
    adds: bool = True,
    scaled: bool = True,
) -> None:
    """Write what rows shrink to into ``shrunk`` fp32 [1, parts, tiles, slots, TILE], or, unless it ``adds``, into the
    sums of ``given`` alone; ``beside`` the kernel that was launched last. Not ``scaled``: it is what a rank has, and no
    root yet.
    """
    slots, many = shrunk.shape[3], blocks.size > BLOCK
    together = sizes.parts if many else 1  # few rows gain more from more programs
    _shrink[slots // blocks.size, sizes.leaves * sizes.splits, sizes.parts // together](
        given, shrunk, blocks.places, blocks.members, len(given.x), sizes.inputs, sizes.leaf, slots,
        **sizes.constants, TOGETHER=together, ROWS=blocks.size, ACROSS=triton.next_power_of_2(together * TILE),
        adds=adds, scaled=scaled, beside=beside, **options(num_warps=4 if many else 2, num_stages=3 if many else 4),
    )  # fmt: skip
