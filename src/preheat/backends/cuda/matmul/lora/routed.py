"""The products of adapters of routed experts on CUDA, see :mod:`preheat.backends.cuda.matmul.lora.slots`.

In steps with adapters the first layer gives its outputs before the activation. Behind each layer one launch shrinks
plain rows, even if the layer itself reads quantized rows, and another expands. A program has ``BLOCK`` arranged rows of
one expert, or one row, where each slot is a block of its own. It goes through the adapter slots of its rows, from the
first to the last. Rows without an adapter are neither read nor written, and no two programs write the same row.

Where ranks share the inner numbers, ``gate_up`` is adapted split by split in this way. For ``down`` a program has one
slot, a token and one of its experts: it shrinks the slot's row in all splits of the rank. After the exchange a program
has a token and some outputs: it expands slot after slot, and adds the results.

Grids follow from the number of tokens alone: programs of rows beyond the step find no adapters and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2
from preheat.backends.cuda.matmul.lora.blocks import BLOCK
from preheat.backends.cuda.matmul.lora.expand import WIDTH, times
from preheat.backends.cuda.matmul.moe.route import Arrangement
from preheat.backends.cuda.ranks.collective import root_of
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import PART, TILE

if TYPE_CHECKING:
    from preheat.backends.cuda.matmul.lora.blocks import Blocks
    from preheat.backends.cuda.matmul.lora.slots import Factors, Packed

CHUNK = 128
"""Inputs that are loaded at once."""


@triton.jit
def _rows_of(
    experts, starts, counts, tokens, slots, adapter_slots, K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the expert of this program, its arranged rows [ROWS], their tokens and their adapter slots.

    Tokens are undefined for padding; adapter slots are -1 for rows without an adapter. Rows are arranged in blocks of
    ``BLOCKED``.
    """
    tile, lane = tl.program_id(0), tl.arange(0, ROWS)
    if BLOCKED == 1:
        expert = tl.load(experts + tile)
        row = tile + lane * 0
        there = lane == 0
        token = row // K
    else:
        row = tile * ROWS + lane
        block = tile * ROWS // BLOCKED
        expert = tl.load(experts + block)
        below = row - tl.load(starts + expert) * BLOCKED
        there = (block < tl.load(starts + EXPERTS)) & (below < tl.load(counts + expert))
        token = tl.load(tokens + row, mask=there, other=0)
    slot = tl.load(slots + token, mask=there, other=-1)
    own = tl.load(adapter_slots + slot // ROWS, mask=slot >= 0, other=-1)
    return expert, row, token, own


@triton.jit
def _sum_of_parts(
    x, of, there, size, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, RANKS]: rows x [ROWS, 1] that are ``there`` times ``of`` [RANKS, 1], over ``size`` inputs.

    Parts of WIDTH inputs are added from the first to the last. ``EVEN``: WIDTH divides ``size``.
    """
    k = tl.arange(0, CHUNK)[None, :]
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for first in range(0, size, WIDTH):
        acc = tl.zeros([ROWS, RANKS], tl.float32)
        for more in range(0, WIDTH, CHUNK):
            here = first + more + k
            if EVEN:
                xs = tl.load(x + here, mask=there, other=0.0)
                ws = tl.load(of + here)
            else:
                xs = tl.load(x + here, mask=there & (here < size), other=0.0)
                ws = tl.load(of + here, mask=here < size, other=0.0)
            acc = tl.dot(xs.to(ws.dtype), ws.T, acc, input_precision="ieee")
        total += acc
    return total


@triton.jit(do_not_specialize=["rows", "most"])
def _shrink_experts(
    x, a, shrunk, tiles, scales, experts, starts, counts, tokens, slots, adapter_slots, rows, most, inputs,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr, TABLE: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, gathered: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Write ``shrunk`` [part, tile of ranks, row, rank], scaled, for one part and tile.

    There are ``most`` adapter slots. ``gathered``: rows of x are tokens, else they are arranged.
    """
    begin(overlap)
    part, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    expert, row, token, own = _rows_of(experts, starts, counts, tokens, slots, adapter_slots, K, EXPERTS, BLOCKED, ROWS)
    rank = tl.arange(0, RANKS)
    module = expert * PARTS + part
    source = token if gathered else row
    at = x + source.to(tl.int64)[:, None] * inputs
    to = shrunk + (row.to(tl.int64) + (part * TILES + tile) * rows)[:, None] * RANKS + rank[None, :]
    for adapter_slot in range(most):
        mine = (own == adapter_slot)[:, None]
        if tl.max((own == adapter_slot).to(tl.int32), 0) > 0:  # noqa: SIM102
            if tile < tl.load(tiles + adapter_slot * TABLE + module):
                first_rank = (module.to(tl.int64) + (adapter_slot * TILES + tile) * (EXPERTS * PARTS)) * RANKS
                of = a + (first_rank + rank)[:, None] * inputs
                total = _sum_of_parts(at, of, mine, inputs, ROWS, RANKS, WIDTH, CHUNK, EVEN)
                tl.store(to, total * tl.load(scales + adapter_slot * TABLE + module), mask=mine)


@triton.jit(do_not_specialize=["rows", "most"])
def _expand_experts(
    y, shrunk, b, tiles, experts, starts, counts, tokens, slots, adapter_slots, rows, most, columns, height,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr, TABLE: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Expand ``shrunk`` and add it to ``COLUMNS`` outputs of one part of y [rows, PARTS * columns].

    A part has ``height`` rows of b; the first ``columns`` of them are used.
    """
    begin(overlap)
    part = tl.program_id(2)
    expert, row, _, own = _rows_of(experts, starts, counts, tokens, slots, adapter_slots, K, EXPERTS, BLOCKED, ROWS)
    rank, out = tl.arange(0, RANKS)[None, :], tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    module = expert * PARTS + part
    at = y + row.to(tl.int64)[None, :] * (PARTS * columns) + part * columns + out[:, None]
    for adapter_slot in range(most):
        mine = own == adapter_slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            count = tl.load(tiles + adapter_slot * TABLE + module)
            if count > 0:
                acc = tl.zeros([COLUMNS, ROWS], tl.float32)
                for tile in tl.range(0, count, num_stages=1):
                    top = (module.to(tl.int64) + (adapter_slot * TILES + tile) * (EXPERTS * PARTS)) * height
                    ws = tl.load(b + (top + tl.minimum(out, columns - 1))[:, None] * RANKS + rank)
                    given = shrunk + (row.to(tl.int64) + (part * TILES + tile) * rows)[:, None] * RANKS + rank
                    acc = times(ws, tl.load(given, mask=mine[:, None], other=0.0).T, acc)
                stored = (out < columns)[:, None] & mine[None, :]
                result = tl.load(at, mask=stored, other=0.0).to(tl.float32) + acc
                tl.store(at, result.to(y.dtype.element_ty), mask=stored)


def add_experts(
    y: Tensor, x: Tensor, factors: Factors, blocks: Blocks, arrangement: Arrangement, *, gathered: bool
) -> Tensor:
    """Add the terms of adapters to ``y`` [arranged rows, outputs], in place, and return it.

    ``y`` are the outputs of one layer of all experts, ``factors`` its adapter matrices, parts of expert 0 first. The
    plain inputs of the layer are ``x``, [tokens, inputs] if ``gathered``, else [arranged rows, inputs]. Both are
    contiguous.
    """
    shrunk = shrink_experts(x, factors, blocks, arrangement, gathered=gathered)
    return expand_experts(y, shrunk, factors, blocks, arrangement)


def shrink_experts(x: Tensor, factors: Factors, blocks: Blocks, arrangement: Arrangement, *, gathered: bool) -> Tensor:
    """Return the product of ``x`` and the first matrices, scaled: fp32 [parts, tiles, arranged rows, TILE].

    ``x`` is [tokens, inputs] if ``gathered``, else [arranged rows, inputs].
    """
    a, _, tiles, scales = factors.matrices
    (count, tiles_each, modules, _, inputs), rows = a.shape, arrangement.rows
    width = min(PART, max(next_power_of_2(inputs), TILE))
    shrunk = x.new_empty(modules // len(arrangement.counts), tiles_each, rows, TILE, dtype=torch.float32)
    programs, step, sizes = _launched(factors, blocks, arrangement)
    _shrink_experts[programs, len(shrunk) * tiles_each](
        x, a, shrunk, tiles, scales, *step, rows, count, inputs, WIDTH=width, CHUNK=min(CHUNK, width),
        EVEN=inputs % width == 0, gathered=gathered, **sizes, **options(num_warps=4, num_stages=3),
    )  # fmt: skip
    return shrunk


def expand_experts(
    y: Tensor, shrunk: Tensor, factors: Factors, blocks: Blocks, arrangement: Arrangement, *, first: int = 0
) -> Tensor:
    """Expand ``shrunk``, add it to ``y`` [arranged rows, parts * columns], in place, and return ``y``.

    The outputs are ``columns`` of each part, from the ``first`` one on.
    """
    _, b, tiles, _ = factors.matrices
    programs, step, sizes = _launched(factors, blocks, arrangement)
    parts, experts = len(shrunk), len(arrangement.counts)
    columns, height = y.shape[1] // parts, b.shape[2] // (parts * experts)
    _expand_experts[programs, cdiv(columns, WIDTH), parts](
        y, shrunk, b[:, :, first:], tiles, *step, len(y), len(b), columns, height, COLUMNS=WIDTH, **sizes,
        enable_fp_fusion=False, **options(num_warps=4, num_stages=2),
    )  # fmt: skip
    return y


def _launched(
    factors: Factors, blocks: Blocks, arrangement: Arrangement
) -> tuple[int, tuple[Tensor, ...], dict[str, Any]]:
    """Return the number of programs for the arranged rows, and arguments of both kernels: tensors and sizes."""
    a, _, tiles, _ = factors.matrices
    experts, blocked = len(arrangement.counts), arrangement.block
    assert blocked == 1 or blocked % BLOCK == 0
    sizes: dict[str, Any] = {
        "K": arrangement.top_k, "EXPERTS": experts, "BLOCKED": blocked, "PARTS": a.shape[2] // experts,
        "TILES": a.shape[1], "TABLE": tiles.stride(0), "ROWS": BLOCK, "RANKS": TILE,
    }  # fmt: skip
    routed = arrangement.experts, arrangement.starts, arrangement.counts, arrangement.tokens
    programs = arrangement.rows if blocked == 1 else arrangement.rows // BLOCK
    return programs, (*routed, blocks.slots, blocks.adapter_slots), sizes


@triton.jit
def _adapter_slot_of(token, members, adapter_slots, ROWS: tl.constexpr):
    """Return the adapter slot of a token, -1 for none."""
    member = tl.load(members + token)
    return tl.load(adapter_slots + member // ROWS, mask=member >= 0, other=-1)


@triton.jit
def _row_of(slot, rows_of, experts, BLOCKED: tl.constexpr):
    """Return the arranged row of a slot, and its expert."""
    row = slot
    if BLOCKED > 1:
        row = tl.load(rows_of + slot)
    return row, tl.load(experts + row // BLOCKED)


@triton.jit(do_not_specialize=["rows"])
def _shrink_slots(
    x, a, shrunk, tiles, rows_of, experts, members, adapter_slots, rows, size, inputs,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, TILES: tl.constexpr, TABLE: tl.constexpr,
    K_SPLITS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Write ``shrunk`` [tile of ranks, slot, rank] for one slot and tile.

    It is the tree of the sums of this rank's K splits, not scaled. x is [K split, row, number].
    """
    begin(overlap)
    slot, tile = tl.program_id(0), tl.program_id(1)
    adapter_slot = _adapter_slot_of(slot // K, members, adapter_slots, ROWS)
    if adapter_slot >= 0:
        row, expert = _row_of(slot, rows_of, experts, BLOCKED)
        if tile < tl.load(tiles + adapter_slot * TABLE + expert):
            lanes, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, RANKS)
            top = (expert.to(tl.int64) + (adapter_slot * TILES + tile) * EXPERTS) * RANKS
            of = a + (top + rank)[:, None] * inputs
            at, step = x + row.to(tl.int64) * size + lanes * 0, rows.to(tl.int64) * size
            total = _sum_of_parts(at, of, lanes == 0, size, ROWS, RANKS, WIDTH, CHUNK, False)
            if K_SPLITS >= 2:
                total += _sum_of_parts(at + step, of + size, lanes == 0, size, ROWS, RANKS, WIDTH, CHUNK, False)
            if K_SPLITS == 4:
                at += 2 * step
                of += 2 * size
                right = _sum_of_parts(at, of, lanes == 0, size, ROWS, RANKS, WIDTH, CHUNK, False)
                right += _sum_of_parts(at + step, of + size, lanes == 0, size, ROWS, RANKS, WIDTH, CHUNK, False)
                total += right
            to = (tile * tl.num_programs(0) + slot).to(tl.int64) * RANKS + rank[None, :]
            tl.store(shrunk + to + lanes * 0, total, mask=lanes == 0)


@triton.jit
def _expand_tokens(
    y, parts, b, tiles, scales, rows_of, experts, weights, members, adapter_slots, stride, columns,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, TILES: tl.constexpr, TABLE: tl.constexpr,
    WORLD: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Add the weighted terms of a token's slots to ``COLUMNS`` outputs of its y.

    ``parts`` [ranks, tile, slot, rank] are the shrunk rows of each rank.
    """
    begin(overlap)
    token = tl.program_id(0)
    adapter_slot = _adapter_slot_of(token, members, adapter_slots, ROWS)
    if adapter_slot >= 0:
        lanes, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, RANKS)[None, :]
        out = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        given = (tl.minimum(out, columns - 1) * RANKS).to(tl.int64)[:, None] + rank
        total = tl.full([COLUMNS, ROWS], -0.0, tl.float32)
        for each in range(K):
            slot = token * K + each
            _, expert = _row_of(slot, rows_of, experts, BLOCKED)
            count = tl.load(tiles + adapter_slot * TABLE + expert)
            if count > 0:
                scale = tl.load(scales + adapter_slot * TABLE + expert)
                acc = tl.zeros([COLUMNS, ROWS], tl.float32)
                for tile in range(count):
                    at = (tile * tl.num_programs(0) * K + slot).to(tl.int64) * RANKS + rank + lanes * 0
                    if WORLD == 1:
                        root = tl.load(parts + at, mask=lanes == 0, other=0.0)
                    else:
                        root = root_of(parts, tl.cast(stride, tl.int64), at, (lanes == 0) & (rank >= 0), WORLD)
                    top = (expert.to(tl.int64) + (adapter_slot * TILES + tile) * EXPERTS) * columns * RANKS
                    acc = times(tl.load(b + top + given), (root * scale).T, acc)
                total += acc * tl.load(weights + slot)
        stored = (out < columns)[:, None] & (lanes == 0).T
        to = y + token.to(tl.int64) * columns + out[:, None] + (lanes * 0).T
        result = tl.load(to, mask=stored, other=0.0).to(tl.float32) + total
        tl.store(to, result.to(y.dtype.element_ty), mask=stored)


@dataclass(frozen=True)
class Kept:
    """Tensors kept from the experts' product for a term that is added to a token's sum.

    ``arrangement`` is the arrangement of rows; ``rows`` are the activations [splits, arranged rows, inner numbers of a
    split].
    """

    arrangement: Arrangement
    rows: Tensor

    @property
    def routed(self) -> tuple[Tensor, Tensor]:
        """The arranged row of each slot, and the expert of each block."""
        return self.arrangement.places, self.arrangement.experts


def shrink_slots(kept: Kept, factors: Factors, blocks: Blocks) -> Tensor:
    """Return the shrunk rows of this rank's splits: fp32 [tiles, slots, TILE], undefined for slots without adapter.

    Slots lie in their order, equal on all ranks; arranged rows do not.
    """
    a, _, tiles, _ = factors.matrices
    count, rows, size = kept.rows.shape
    slots, width = kept.arrangement.weights.numel(), min(PART, max(next_power_of_2(size), TILE))
    shrunk = a.new_empty(a.shape[1], slots, TILE, dtype=torch.float32)
    _shrink_slots[slots, len(shrunk)](
        kept.rows, a, shrunk, tiles, *kept.routed, blocks.slots, blocks.adapter_slots, rows, size, a.shape[4],
        K_SPLITS=count, WIDTH=width, CHUNK=min(CHUNK, width), **_sizes(kept, factors),
        **options(num_warps=4, num_stages=3),
    )  # fmt: skip
    return shrunk


def expand_tokens(y: Tensor, parts: Tensor, kept: Kept, factors: Factors, blocks: Blocks) -> Tensor:
    """Expand ``parts`` [ranks, ...], add them to ``y`` [tokens, hidden], in place, and return ``y``.

    The parts of each rank are contiguous.
    """
    _, b, tiles, scales = factors.matrices
    _expand_tokens[len(y), cdiv(y.shape[1], WIDTH)](
        y, parts, b, tiles, scales, *kept.routed, kept.arrangement.weights, blocks.slots, blocks.adapter_slots,
        parts.stride(0), y.shape[1], WORLD=len(parts), COLUMNS=WIDTH, **_sizes(kept, factors),
        enable_fp_fusion=False, **options(num_warps=4, num_stages=2),
    )  # fmt: skip
    return y


def _sizes(kept: Kept, factors: Factors) -> dict[str, Any]:
    a, _, tiles, _ = factors.matrices
    return {
        "K": kept.arrangement.top_k, "EXPERTS": a.shape[2], "BLOCKED": kept.arrangement.block, "TILES": a.shape[1],
        "TABLE": tiles.stride(0), "ROWS": BLOCK, "RANKS": TILE,
    }  # fmt: skip


class RoutedFactors:
    """The matrices of the adapters in all slots of experts: ``gate_up`` has two parts an expert, ``down`` one."""

    def __init__(self, gate_up: Factors, down: Factors) -> None:
        self.gate_up, self.down = gate_up, down

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """All tensors, see :attr:`preheat.backends.cuda.matmul.lora.slots.Factors.matrices`."""
        return *self.gate_up.matrices, *self.down.matrices

    @property
    def bytes(self) -> int:
        return self.gate_up.bytes + self.down.bytes

    def pack(self, parts: Mapping[int, LowRankPair]) -> tuple[Packed | None, Packed | None]:
        gate_up = {number // 3 * 2 + number % 3: each for number, each in parts.items() if number % 3 < 2}
        down = {number // 3: each for number, each in parts.items() if number % 3 == 2}
        return self.gate_up.pack(gate_up) if gate_up else None, self.down.pack(down) if down else None

    def write(self, slot: int, packed: tuple[Packed | None, Packed | None]) -> None:
        for factors, each in zip((self.gate_up, self.down), packed, strict=True):
            if each is None:
                factors.clear(slot)
            else:
                factors.write(slot, each)

    def clear(self, slot: int) -> None:
        self.gate_up.clear(slot)
        self.down.clear(slot)
