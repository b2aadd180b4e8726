"""Adapters of routed experts whose inner numbers ranks share, on CUDA: see :mod:`preheat.ops.matmul`.

Gate and up are adapted leaf by leaf as those of other experts, behind one launch that shrinks. For down a program has
one slot, a token and one of its experts: it shrinks the slot's row in all of the rank's leaves. What slots shrink to
lies in their order, which is the same on all ranks, and not in that of arranged rows, which is not. It travels ahead of
the experts' own sums. Then a program has a token and some outputs: it expands slot after slot, and adds what they give.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.activation import silu_and_mul
from preheat.backends.cuda.collective import add_ranks, root_of
from preheat.backends.cuda.launch import begin, options
from preheat.backends.cuda.lora_blocks import BLOCK
from preheat.backends.cuda.lora_expand import WIDTH, times
from preheat.backends.cuda.lora_experts import CHUNK, ExpertPlaces, expand_experts, shrink_experts
from preheat.backends.cuda.matmul.gemm import experts_product
from preheat.backends.cuda.moe_leaves import CudaLeafExperts
from preheat.backends.cuda.moe_route import Arrangement
from preheat.backends.cuda.tuning import ExpertsConfig, Tile
from preheat.ops.values import PART, TILE

if TYPE_CHECKING:
    from preheat.backends.cuda.lora import Factors
    from preheat.backends.cuda.lora_blocks import Blocks, CudaAdapterRows


@triton.jit
def _place_of(token, members, places, ROWS: tl.constexpr):
    """The place of a token's adapter, -1 for none."""
    member = tl.load(members + token)
    return tl.load(places + member // ROWS, mask=member >= 0, other=-1)


@triton.jit
def _row_of(slot, rows_of, experts, BLOCKED: tl.constexpr):
    """The arranged row of a slot, and its expert."""
    row = slot
    if BLOCKED > 1:
        row = tl.load(rows_of + slot)
    return row, tl.load(experts + row // BLOCKED)


@triton.jit
def _leaf(x, of, first, size, lanes, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """[ROWS, RANKS], of which the first row counts: one row x of ``size`` numbers times as many of ``of`` [RANKS, 1],
    from number ``first`` on.
    """
    k = tl.arange(0, CHUNK)[None, :]
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(0, size, WIDTH):
        acc = tl.zeros([ROWS, RANKS], tl.float32)
        for more in range(0, WIDTH, CHUNK):
            here = start + more + k
            xs = tl.load(x + lanes * 0 + here, mask=(lanes == 0) & (here < size), other=0.0)
            ws = tl.load(of + first + here, mask=here < size, other=0.0)
            acc = tl.dot(xs.to(ws.dtype), ws.T, acc, input_precision="ieee")
        total += acc
    return total


@triton.jit(do_not_specialize=["rows"])
def _shrink_slots(
    x, a, shrunk, tiles, rows_of, experts, members, places, rows, size, inputs,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, TILES: tl.constexpr, TABLE: tl.constexpr,
    LEAVES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """``shrunk`` [tile of ranks, slot, rank] of one slot and tile: the tree of this rank's leaves, not scaled. x is
    [leaf, row, number].
    """
    begin(overlap)
    slot, tile = tl.program_id(0), tl.program_id(1)
    place = _place_of(slot // K, members, places, ROWS)
    if place >= 0:
        row, expert = _row_of(slot, rows_of, experts, BLOCKED)
        if tile < tl.load(tiles + place * TABLE + expert):
            lanes, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, RANKS)
            top = (expert.to(tl.int64) + (place * TILES + tile) * EXPERTS) * RANKS
            of = a + (top + rank)[:, None] * inputs
            at, step = x + row.to(tl.int64) * size, rows.to(tl.int64) * size
            total = _leaf(at, of, 0, size, lanes, ROWS, RANKS, WIDTH, CHUNK)
            if LEAVES >= 2:
                total += _leaf(at + step, of, size, size, lanes, ROWS, RANKS, WIDTH, CHUNK)
            if LEAVES == 4:
                right = _leaf(at + 2 * step, of, 2 * size, size, lanes, ROWS, RANKS, WIDTH, CHUNK)
                right += _leaf(at + 3 * step, of, 3 * size, size, lanes, ROWS, RANKS, WIDTH, CHUNK)
                total += right
            to = (tile * tl.num_programs(0) + slot).to(tl.int64) * RANKS + rank[None, :]
            tl.store(shrunk + to + lanes * 0, total, mask=lanes == 0)


@triton.jit
def _expand_tokens(
    y, parts, b, tiles, scales, rows_of, experts, weights, members, places, stride, columns,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, TILES: tl.constexpr, TABLE: tl.constexpr,
    WORLD: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Add to ``COLUMNS`` outputs of a token's y what its slots have, weighted. ``parts`` [ranks, tile, slot, rank] are
    what ranks shrank to.
    """
    begin(overlap)
    token = tl.program_id(0)
    place = _place_of(token, members, places, ROWS)
    if place >= 0:
        lanes, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, RANKS)[None, :]
        out = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        given = (tl.minimum(out, columns - 1) * RANKS).to(tl.int64)[:, None] + rank
        total = tl.full([COLUMNS, ROWS], -0.0, tl.float32)
        for each in range(K):
            slot = token * K + each
            _, expert = _row_of(slot, rows_of, experts, BLOCKED)
            count = tl.load(tiles + place * TABLE + expert)
            if count > 0:
                scale = tl.load(scales + place * TABLE + expert)
                acc = tl.zeros([COLUMNS, ROWS], tl.float32)
                for tile in range(count):
                    at = (tile * tl.num_programs(0) * K + slot).to(tl.int64) * RANKS + rank + lanes * 0
                    if WORLD == 1:
                        root = tl.load(parts + at, mask=lanes == 0, other=0.0)
                    else:
                        root = root_of(parts, stride.to(tl.int64), at, (lanes == 0) & (rank >= 0), WORLD)
                    top = (expert.to(tl.int64) + (place * TILES + tile) * EXPERTS) * columns * RANKS
                    acc = times(tl.load(b + top + given), (root * scale).T, acc)
                total += acc * tl.load(weights + slot)
        stored = (out < columns)[:, None] & (lanes == 0).T
        to = y + token.to(tl.int64) * columns + out[:, None] + (lanes * 0).T
        result = tl.load(to, mask=stored, other=0.0).to(tl.float32) + total
        tl.store(to, result.to(y.dtype.element_ty), mask=stored)


class AdaptedLeafExperts(ExpertPlaces):
    """``inner``, and what adapters add. ``gate_up`` have the rows of their second matrices that this rank has, ``down``
    the columns of the first ones.
    """

    inner: CudaLeafExperts

    def __init__(self, inner: CudaLeafExperts, gate_up: Factors, down: Factors, rows: CudaAdapterRows) -> None:
        super().__init__(gate_up, down)
        self.inner, self._rows = inner, rows
        self.shape, self.configs = inner.shape, inner.configs

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], the same on all ranks."""
        blocks, ranks = self._rows.blocks, self.inner.ranks
        if blocks is None:
            return self.inner(x, logits)
        leaves = _Leaves(self.inner, self._gate_up, blocks)
        partial = leaves.sum(self.configs.experts(self.shape, len(x)), x, logits)
        mine = self._shrunk(leaves, blocks)
        if ranks.world == 1:
            return self._expanded(partial.to(x.dtype), mine[None], leaves, blocks)
        found = ranks.gather(torch.cat((mine.view(-1), partial.view(-1))))
        first = mine.numel()
        y = add_ranks(found[:, first:].unflatten(1, partial.shape), None, x.dtype)
        return self._expanded(y, found[:, :first], leaves, blocks)

    def local(self, config: ExpertsConfig, x: Tensor, logits: Tensor) -> Tensor:
        """What this rank adds in steps with adapters, but for what these have for down: fp32 [tokens, hidden]. Where
        no step is described, they have nothing: what is proven at boot.
        """
        return _Leaves(self.inner, self._gate_up, self._rows.blocks).sum(config, x, logits)

    def _shrunk(self, leaves: _Leaves, blocks: Blocks) -> Tensor:
        """What this rank's leaves shrink to for down: fp32 [tiles, slots, TILE], undefined for slots of no adapter."""
        a, _, tiles, _ = self._down.matrices
        count, rows, size = leaves.rows.shape
        slots, width = leaves.arrangement.weights.numel(), min(PART, max(triton.next_power_of_2(size), TILE))
        shrunk = a.new_empty(a.shape[1], slots, TILE, dtype=torch.float32)
        _shrink_slots[slots, len(shrunk)](
            leaves.rows, a, shrunk, tiles, *leaves.routed, blocks.slots, blocks.places, rows, size, a.shape[4],
            LEAVES=count, WIDTH=width, CHUNK=min(CHUNK, width), **self._sizes(leaves),
            **options(num_warps=4, num_stages=3),
        )  # fmt: skip
        return shrunk

    def _expanded(self, y: Tensor, parts: Tensor, leaves: _Leaves, blocks: Blocks) -> Tensor:
        """``y`` [tokens, hidden], to which is added, in place, what ``parts`` [ranks, ...], those of each rank
        contiguous, expand to.
        """
        _, b, tiles, scales = self._down.matrices
        _expand_tokens[len(y), triton.cdiv(y.shape[1], WIDTH)](
            y, parts, b, tiles, scales, *leaves.routed, leaves.arrangement.weights, blocks.slots, blocks.places,
            parts.stride(0), y.shape[1], WORLD=len(parts), COLUMNS=WIDTH, **self._sizes(leaves),
            enable_fp_fusion=False, **options(num_warps=4, num_stages=2),
        )  # fmt: skip
        return y

    def _sizes(self, leaves: _Leaves) -> dict[str, Any]:
        a, _, tiles, _ = self._down.matrices
        arrangement = leaves.arrangement
        return {
            "K": arrangement.top_k, "EXPERTS": a.shape[2], "BLOCKED": arrangement.block, "TILES": a.shape[1],
            "TABLE": tiles.stride(0), "ROWS": BLOCK, "RANKS": TILE,
        }  # fmt: skip


class _Leaves:
    """The leaves of a rank in a step with adapters, and what :meth:`sum` knows then: the ``arrangement``, and the
    activations ``rows`` [leaves, arranged rows, inner numbers].
    """

    arrangement: Arrangement
    rows: Tensor

    def __init__(self, inner: CudaLeafExperts, gate_up: Factors, blocks: Blocks | None) -> None:
        self._inner, self._gate_up, self._blocks = inner, gate_up, blocks

    @property
    def routed(self) -> tuple[Tensor, Tensor]:
        """The arranged row of each slot, and the expert of each block."""
        return self.arrangement.places, self.arrangement.experts

    def sum(self, config: ExpertsConfig, x: Tensor, logits: Tensor) -> Tensor:
        """The experts' own: fp32 [tokens, hidden]."""
        return self._inner.by(config, logits, lambda tile, arrangement: self._activated(tile, x, arrangement))

    def _activated(self, tile: Tile, x: Tensor, arrangement: Arrangement) -> Iterator[Tensor]:
        size, blocks = self._inner.shape.inner, self._blocks
        self.arrangement, self.rows = arrangement, x.new_empty(self._inner.leaves, arrangement.rows, size)
        shrunk = None if blocks is None else shrink_experts(x, self._gate_up, blocks, arrangement, gathered=True)
        for leaf, (gate_up, to) in enumerate(zip(self._inner.gate_up, self.rows, strict=True)):
            y = experts_product(tile, x, gate_up, arrangement, gated=False, gathered=True)
            if blocks is not None and shrunk is not None:
                expand_experts(y, shrunk, self._gate_up, blocks, arrangement, first=leaf * size)
            yield silu_and_mul(y, to)
