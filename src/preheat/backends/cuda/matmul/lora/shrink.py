"""The first product of adapters on CUDA, see :mod:`preheat.backends.cuda.matmul.lora.slots`.

A program has a block of rows of one adapter, a part of the inputs and one of the layer's matrices, or all of them. It
writes its own sums; no other program adds to them. The sums are added up in order. Where few rows shrink behind the
layer itself, each program that expands them adds them up: this takes less time than waiting for each other. Else the
last program of a block does it. ``arrived`` then counts the programs of a block that have written; it is zero again at
the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, begin_early, begin_late, options
from preheat.backends.cuda.device.sizes import next_power_of_2
from preheat.backends.cuda.matmul.lora.blocks import BLOCK, TABLE_PARTS, TABLE_ROWS, Blocks
from preheat.ops.values import PART, TILE

CHUNK = 128
"""Inputs of a part that are loaded at once."""

SLOT_STRIDE: tl.constexpr = tl.constexpr(TABLE_ROWS * TABLE_PARTS)
"""Numbers in a table for each adapter slot."""


class Shrinking(NamedTuple):
    """The operands of the first product for the rows of a step.

    ``x`` is [rows, inputs], ``a`` [adapter slots, tiles of this rank, parts, TILE, inputs]. ``sums`` fp32 [parts,
    tiles, parts of the inputs, slots, TILE] is room. ``tiles`` int32 and ``scales`` fp32 [adapter slots, TABLE_PARTS]
    are as in :class:`preheat.backends.cuda.matmul.lora.expand.Expansion`. ``arrived`` is int32 [blocks * parts].
    """

    x: Tensor
    a: Tensor
    sums: Tensor
    tiles: Tensor
    scales: Tensor
    arrived: Tensor


@dataclass(frozen=True)
class ShrinkSizes:
    """Sizes of the first product of a layer.

    The layer's ``parts`` have matrices of ``inputs``, in ``k_splits`` equal K splits, and ``tiles`` tiles of ranks.
    """

    inputs: int
    parts: int
    tiles: int
    k_splits: int

    @property
    def split_inputs(self) -> int:
        """Inputs of a K split."""
        return self.inputs // self.k_splits

    @property
    def width(self) -> int:
        """Inputs of a split of a K split."""
        return min(PART, max(next_power_of_2(self.split_inputs), TILE))

    @property
    def splits(self) -> int:
        """Splits of a K split."""
        return -(-self.split_inputs // self.width)

    @cached_property
    def constants(self) -> dict[str, int | bool]:
        """Constants of the kernels."""
        return {
            "PARTS": self.parts, "TILES": self.tiles, "K_SPLITS": self.k_splits, "SPLITS": self.splits,
            "WIDTH": self.width, "CHUNK": min(CHUNK, self.width), "RANKS": TILE,
            "EVEN": self.split_inputs % self.width == 0,
        }  # fmt: skip


@triton.jit
def _k_split_sum(sums, k_split: tl.constexpr, step, SPLITS: tl.constexpr):
    """Add the ``SPLITS`` sums of a K split, from the first to the last.

    ``step`` numbers lie between two sums.
    """
    total = tl.load(sums + k_split * SPLITS * step, cache_modifier=".cg")
    for each in tl.static_range(1, SPLITS):
        total += tl.load(sums + (k_split * SPLITS + each) * step, cache_modifier=".cg")
    return total


@triton.jit
def added_up(sums, step, K_SPLITS: tl.constexpr, SPLITS: tl.constexpr):
    """Return shrunk rows: the K splits added in their tree, each the sum of its ``SPLITS``.

    ``step`` numbers lie between two sums.
    """
    total = _k_split_sum(sums, 0, step, SPLITS)
    if K_SPLITS >= 2:
        total += _k_split_sum(sums, 1, step, SPLITS)
    if K_SPLITS == 4:
        right = _k_split_sum(sums, 2, step, SPLITS)
        right += _k_split_sum(sums, 3, step, SPLITS)
        total += right
    return total


@triton.jit(do_not_specialize=["rows", "slots"])
def _shrink(
    given, shrunk, adapter_slots, members, rows, inputs, size, slots,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr, TILES: tl.constexpr, K_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    ACROSS: tl.constexpr, adds: tl.constexpr, scaled: tl.constexpr, beside: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write sums [part, tile of ranks, split of the inputs, slot, rank] of one block, split and ``TOGETHER`` parts.

    If the kernel ``adds``, the last program of a block also writes their total, in the tree of K splits. It is
    ``scaled`` if it is the root. A slot is the index of a row among all blocks. A K split has ``size`` inputs, and
    SPLITS splits. ``ACROSS``: a power of two, RANKS for each part or more.

    ``beside``: the kernel before this one has waited for x, and writes nothing that is read here: only the end of this
    one waits for its end.
    """
    block, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    across, k = tl.arange(0, ACROSS)[None, :], tl.arange(0, CHUNK)
    counter = given.arrived + block * (PARTS // TOGETHER) + part
    if TOGETHER > 1:
        part = part * TOGETHER + tl.minimum(across // RANKS, TOGETHER - 1)
    rank = across % RANKS
    start, end = split // SPLITS * size + split % SPLITS * WIDTH, (split // SPLITS + 1) * size
    slot = block * ROWS + tl.arange(0, ROWS)[:, None]
    adapter_slot = tl.load(adapter_slots + block)
    row = tl.load(members + slot)
    if beside:
        begin_early(overlap)
    else:
        begin(overlap)
    if adapter_slot >= 0:
        there = (row >= 0) & (row < rows)
        at = given.x + row.to(tl.int64) * inputs
        counts = tl.load(given.tiles + adapter_slot * SLOT_STRIDE + part)
        count = tl.max(counts) if TOGETHER > 1 else counts
        for tile in range(tl.maximum(count, 1)):  # the first without waiting for how many there are
            of = given.a + (((adapter_slot * TILES + tile) * PARTS + part) * RANKS + rank).to(tl.int64) * inputs
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
            to = (((part * TILES + tile) * K_SPLITS * SPLITS + split) * slots + slot).to(tl.int64) * RANKS + rank
            tl.store(given.sums + to, acc, mask=tile < counts)
        if adds:
            tl.debug_barrier()  # all warps have written before one of them says so
            if tl.atomic_add(counter, 1, sem="acq_rel") == K_SPLITS * SPLITS - 1:
                tl.debug_barrier()
                scale = tl.load(given.scales + adapter_slot * SLOT_STRIDE + part)
                for tile in range(count):
                    own = part * TILES + tile
                    of = given.sums + (own * K_SPLITS * SPLITS * slots + slot).to(tl.int64) * RANKS + rank
                    total = added_up(of, slots * RANKS, K_SPLITS, SPLITS)
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
    """Shrink rows into ``shrunk`` fp32 [1, parts, tiles, slots, TILE], ``beside`` the kernel launched last.

    Unless it ``adds``, write the sums of ``given`` alone. Not ``scaled``: the result is this rank's share, no root yet.
    """
    slots, many = shrunk.shape[3], blocks.size > BLOCK
    together = sizes.parts if many else 1  # few rows gain more from more programs
    _shrink[slots // blocks.size, sizes.k_splits * sizes.splits, sizes.parts // together](
        given, shrunk, blocks.adapter_slots, blocks.members, len(given.x), sizes.inputs, sizes.split_inputs, slots,
        **sizes.constants, TOGETHER=together, ROWS=blocks.size, ACROSS=next_power_of_2(together * TILE),
        adds=adds, scaled=scaled, beside=beside, **options(num_warps=4 if many else 2, num_stages=3 if many else 4),
    )  # fmt: skip
