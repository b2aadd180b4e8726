"""Routed experts with places for adapters on CUDA, see :mod:`preheat.backends.cuda.lora`.

In steps with adapters both layers give what they give before the activation. Behind each of them one launch shrinks
plain rows, whatever the layer itself reads, and another expands. A program has ``BLOCK`` arranged rows of one expert,
or one, where each slot is a block of its own; it goes through the places, from the first to the last, whose adapters
these rows have. Rows without an adapter are neither read nor written, and no two programs write the same row.

Grids follow from the number of tokens alone: programs whose rows the step has not find no adapters and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import begin, options
from preheat.backends.cuda.lora_blocks import BLOCK
from preheat.backends.cuda.lora_expand import WIDTH, times
from preheat.backends.cuda.moe import CudaExperts, Rows
from preheat.backends.cuda.moe_route import Arrangement
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.tuning import ExpertsConfig
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import PART, TILE

if TYPE_CHECKING:
    from preheat.backends.cuda.lora import Factors, Packed
    from preheat.backends.cuda.lora_blocks import Blocks, CudaAdapterRows

CHUNK = 128
"""Inputs that are loaded at once."""


@triton.jit
def _rows_of(
    experts, starts, counts, tokens, slots, places, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The expert of this program, its arranged rows [ROWS], the token of each, undefined for padding, and the place of
    its adapter, -1 for none. Rows are arranged in blocks of ``BLOCKED``.
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
    own = tl.load(places + slot // ROWS, mask=slot >= 0, other=-1)
    return expert, row, token, own


@triton.jit(do_not_specialize=["rows", "most"])
def _shrink_experts(
    x, a, shrunk, tiles, scales, experts, starts, counts, tokens, slots, places, rows, most, inputs,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr, TABLE: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, gathered: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """``shrunk`` [part, tile of ranks, row, rank], scaled, of one part and tile. There are ``most`` places.
    ``gathered``: rows of x are tokens, else they are arranged.
    """
    begin(overlap)
    part, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    expert, row, token, own = _rows_of(experts, starts, counts, tokens, slots, places, K, EXPERTS, BLOCKED, ROWS)
    rank, k = tl.arange(0, RANKS), tl.arange(0, CHUNK)[None, :]
    module = expert * PARTS + part
    source = token if gathered else row
    at = x + source.to(tl.int64)[:, None] * inputs
    to = shrunk + (row.to(tl.int64) + (part * TILES + tile) * rows)[:, None] * RANKS + rank[None, :]
    for place in range(most):
        mine = (own == place)[:, None]
        if tl.max((own == place).to(tl.int32), 0) > 0:  # noqa: SIM102
            if tile < tl.load(tiles + place * TABLE + module):
                first_rank = (module.to(tl.int64) + (place * TILES + tile) * (EXPERTS * PARTS)) * RANKS
                of = a + (first_rank + rank)[:, None] * inputs
                total = tl.zeros([ROWS, RANKS], tl.float32)
                for first in range(0, inputs, WIDTH):
                    acc = tl.zeros([ROWS, RANKS], tl.float32)
                    for more in range(0, WIDTH, CHUNK):
                        here = first + more + k
                        if EVEN:
                            xs = tl.load(at + here, mask=mine, other=0.0)
                            ws = tl.load(of + here)
                        else:
                            xs = tl.load(at + here, mask=mine & (here < inputs), other=0.0)
                            ws = tl.load(of + here, mask=here < inputs, other=0.0)
                        acc = tl.dot(xs.to(ws.dtype), ws.T, acc, input_precision="ieee")
                    total += acc
                tl.store(to, total * tl.load(scales + place * TABLE + module), mask=mine)


@triton.jit(do_not_specialize=["rows", "most"])
def _expand_experts(
    y, shrunk, b, tiles, experts, starts, counts, tokens, slots, places, rows, most, columns, height,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKED: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr, TABLE: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Add to ``COLUMNS`` outputs of one part of y [rows, PARTS * columns] what ``shrunk`` expands to. A part has
    ``height`` rows of b, of which these are the first ones.
    """
    begin(overlap)
    part = tl.program_id(2)
    expert, row, _, own = _rows_of(experts, starts, counts, tokens, slots, places, K, EXPERTS, BLOCKED, ROWS)
    rank, out = tl.arange(0, RANKS)[None, :], tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    module = expert * PARTS + part
    at = y + row.to(tl.int64)[None, :] * (PARTS * columns) + part * columns + out[:, None]
    for place in range(most):
        mine = own == place
        if tl.max(mine.to(tl.int32), 0) > 0:
            count = tl.load(tiles + place * TABLE + module)
            if count > 0:
                acc = tl.zeros([COLUMNS, ROWS], tl.float32)
                for tile in tl.range(0, count, num_stages=1):
                    top = (module.to(tl.int64) + (place * TILES + tile) * (EXPERTS * PARTS)) * height
                    ws = tl.load(b + (top + tl.minimum(out, columns - 1))[:, None] * RANKS + rank)
                    given = shrunk + (row.to(tl.int64) + (part * TILES + tile) * rows)[:, None] * RANKS + rank
                    acc = times(ws, tl.load(given, mask=mine[:, None], other=0.0).T, acc)
                stored = (out < columns)[:, None] & mine[None, :]
                result = tl.load(at, mask=stored, other=0.0).to(tl.float32) + acc
                tl.store(at, result.to(y.dtype.element_ty), mask=stored)


def add_experts(
    y: Tensor, x: Tensor, factors: Factors, blocks: Blocks, arrangement: Arrangement, *, gathered: bool
) -> Tensor:
    """``y`` [arranged rows, outputs] of all experts' layer, to which is added, in place, what the adapters of its rows
    have in ``factors``: parts of expert 0 first. Its plain inputs are ``x``, [tokens, inputs] if ``gathered``, else
    [arranged rows, inputs]. Both are contiguous.
    """
    shrunk = shrink_experts(x, factors, blocks, arrangement, gathered=gathered)
    return expand_experts(y, shrunk, factors, blocks, arrangement)


def shrink_experts(x: Tensor, factors: Factors, blocks: Blocks, arrangement: Arrangement, *, gathered: bool) -> Tensor:
    """What ``x``, [tokens, inputs] if ``gathered``, else [arranged rows, inputs], shrinks to, scaled: fp32 [parts,
    tiles, arranged rows, TILE].
    """
    a, _, tiles, scales = factors.matrices
    (count, tiles_each, modules, _, inputs), rows = a.shape, arrangement.rows
    width = min(PART, max(triton.next_power_of_2(inputs), TILE))
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
    """``y`` [arranged rows, parts * columns], to which is added, in place, what ``shrunk`` expands to: as many outputs
    of each part, from the ``first`` one on.
    """
    _, b, tiles, _ = factors.matrices
    programs, step, sizes = _launched(factors, blocks, arrangement)
    parts, experts = len(shrunk), len(arrangement.counts)
    columns, height = y.shape[1] // parts, b.shape[2] // (parts * experts)
    _expand_experts[programs, triton.cdiv(columns, WIDTH), parts](
        y, shrunk, b[:, :, first:], tiles, *step, len(y), len(b), columns, height, COLUMNS=WIDTH, **sizes,
        enable_fp_fusion=False, **options(num_warps=4, num_stages=2),
    )  # fmt: skip
    return y


def _launched(
    factors: Factors, blocks: Blocks, arrangement: Arrangement
) -> tuple[int, tuple[Tensor, ...], dict[str, Any]]:
    """How many programs there are for the arranged rows, and what both kernels are told of a step and its sizes."""
    a, _, tiles, _ = factors.matrices
    experts, blocked = len(arrangement.counts), arrangement.block
    assert blocked == 1 or blocked % BLOCK == 0
    sizes: dict[str, Any] = {
        "K": arrangement.top_k, "EXPERTS": experts, "BLOCKED": blocked, "PARTS": a.shape[2] // experts,
        "TILES": a.shape[1], "TABLE": tiles.stride(0), "ROWS": BLOCK, "RANKS": TILE,
    }  # fmt: skip
    routed = arrangement.experts, arrangement.starts, arrangement.counts, arrangement.tokens
    programs = arrangement.rows if blocked == 1 else arrangement.rows // BLOCK
    return programs, (*routed, blocks.slots, blocks.places), sizes


class ExpertPlaces:
    """What the adapters in all places have for routed experts: ``gate_up`` have two parts for each, ``down`` one."""

    inner: Any

    def __init__(self, gate_up: Factors, down: Factors) -> None:
        self._gate_up, self._down = gate_up, down

    @property
    def slots(self) -> ExpertPlaces:
        """What holds its adapters."""
        return self

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return *self.inner.state(), *self._gate_up.matrices, *self._down.matrices

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        found: Iterator[Tensor] = self.inner.weights()
        return found

    @property
    def bytes(self) -> int:
        return self._gate_up.bytes + self._down.bytes

    def pack(self, parts: Mapping[int, LowRankPair]) -> tuple[Packed | None, Packed | None]:
        gate_up = {number // 3 * 2 + number % 3: each for number, each in parts.items() if number % 3 < 2}
        down = {number // 3: each for number, each in parts.items() if number % 3 == 2}
        return self._gate_up.pack(gate_up) if gate_up else None, self._down.pack(down) if down else None

    def write(self, place: int, packed: tuple[Packed | None, Packed | None]) -> None:
        for factors, each in zip((self._gate_up, self._down), packed, strict=True):
            if each is None:
                factors.clear(place)
            else:
                factors.write(place, each)

    def clear(self, place: int) -> None:
        self._gate_up.clear(place)
        self._down.clear(place)


class AdaptedExperts(ExpertPlaces):
    """``inner``, and what adapters add for each expert that a row visits, see :mod:`preheat.ops.matmul`."""

    inner: CudaExperts

    def __init__(self, inner: CudaExperts, gate_up: Factors, down: Factors, rows: CudaAdapterRows) -> None:
        super().__init__(gate_up, down)
        self.inner, self._rows = inner, rows
        self.shape, self.configs = inner.shape, inner.configs

    @property
    def fused_input(self) -> QuantizedInput | None:
        """Adapters read what a norm gives as it is."""
        found = self.inner.fused_input
        return None if found is None else found.beside_plain()

    def __call__(self, x: Rows, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden] and ``logits`` [tokens, experts], contiguous -> a new tensor [tokens, hidden]."""
        if self._rows.blocks is None:
            return self.inner(x, logits)
        return self.local(self.configs.experts(self.shape, len(x)), x, logits)

    def local(self, config: ExpertsConfig, x: Rows, logits: Tensor) -> Tensor:
        """As in steps with adapters, by the kernels of ``config``. Where no step is described, nothing is added: what
        is proven at boot.
        """
        return self.inner.by(config, x, logits, self._add)

    def _add(self, y: Tensor, x: Tensor, arrangement: Arrangement, first: bool) -> Tensor:
        blocks = self._rows.blocks
        factors = self._gate_up if first else self._down
        return y if blocks is None else add_experts(y, x, factors, blocks, arrangement, gathered=first)
