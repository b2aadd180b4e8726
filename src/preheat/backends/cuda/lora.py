"""Linear layers with places for adapters on CUDA, see :mod:`preheat.ops.lora`.

The rows of each adapter are cut into blocks of ``BLOCK``, filled up with none. One launch shrinks: a program has a
block of rows, a part of the inputs and one of the layer's matrices, and writes its sums, which no other adds to; the
program that is the last of its block adds them up in order. It runs beside the layer itself, of which it needs nothing.
Behind both another launch expands, and applies the activation. Rows without an adapter get nothing added.

Layers that take their inputs by columns shrink in leaves, see :mod:`preheat.backends.cuda.lora_leaves`. How many
outputs a layer has changes no bit of any: a product has 16 rows, 16 ranks and a part of the inputs, or ``WIDTH``
outputs, whatever else is in its launch. So the rows of ``B`` that a rank has need no tiles.

How many blocks there are at most follows from the number of rows and of places, and so does the grid; programs of
blocks that a step has not end at once. Every row goes through products of one shape, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base import HOST_COPIES, AdapterStep, Collective, Experts, ExpertsSize, Linear
from preheat.backends.cuda.activation import activate, clip
from preheat.backends.cuda.collective import RankSums
from preheat.backends.cuda.launch import begin, begin_early, begin_late, options
from preheat.backends.cuda.linear import CudaLinear
from preheat.backends.cuda.linear_leaves import CudaLeafLinear
from preheat.backends.cuda.lora_expand import (
    BLOCK,
    PLACE_IN_TABLE,
    TABLE_PARTS,
    TABLE_ROWS,
    Expansion,
    expand,
    most_blocks,
)
from preheat.backends.cuda.lora_experts import AdaptedExperts
from preheat.backends.cuda.lora_leaf_experts import AdaptedLeafExperts
from preheat.backends.cuda.lora_leaves import AdaptedLeafLinear, add_roots
from preheat.backends.cuda.moe import CudaExperts
from preheat.backends.cuda.moe_leaves import CudaLeafExperts
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.tuning import KernelConfig, Library, Tile, tile_rule
from preheat.ops.kinds import Activation
from preheat.ops.lora import PART, TILE, LowRank
from preheat.ops.quantization import QuantizedRows

CHUNK = 128
"""Inputs of a part that are loaded at once."""

FEW_ROWS = 64
"""Up to so many, tiles beside which adapters shrink cost less than cuBLAS, where they wait."""

MOST_PARTS = 3
"""Of a layer: queries, keys and values."""


@triton.jit(do_not_specialize=["rows", "slots"])
def _gather(
    tokens, sequences, last_token, a, shrunk, own, places, members, tiles, scales, rows, slots, vocab,
    TILES: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """What the tokens of one block shrink to, scaled: columns of ``a``. Its members in ``own`` are those that
    are tokens.
    """
    block, lane, rank = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, RANKS)
    place = tl.load(places + block)
    row = tl.load(members + block * ROWS + lane)
    begin(overlap)
    if place >= 0:
        token = tl.load(tokens + row, mask=(row >= 0) & (row < rows), other=-2)
        sequence = tl.load(sequences + row, mask=token == -1, other=0)
        token = tl.where(token == -1, tl.load(last_token + sequence, mask=token == -1, other=0), token)
        tl.store(own + block * ROWS + lane, tl.where(token >= 0, row, -1))
        scale = tl.load(scales + place * PLACE_IN_TABLE)
        for tile in range(tl.load(tiles + place * PLACE_IN_TABLE)):
            column = a + ((place * TILES + tile) * RANKS + rank).to(tl.int64)[None, :] * vocab + token[:, None]
            found = tl.load(column, mask=(token >= 0)[:, None], other=0.0).to(tl.float32)
            to = (tile * slots + block * ROWS + lane).to(tl.int64)[:, None] * RANKS + rank[None, :]
            tl.store(shrunk + to, found * scale)


@triton.jit
def _leaf_sum(sums, leaf: tl.constexpr, step, SPLITS: tl.constexpr):
    """Of a leaf's ``SPLITS`` sums, from the first to the last. ``step`` numbers lie between two of them."""
    total = tl.load(sums + leaf * SPLITS * step, cache_modifier=".cg")
    for each in tl.static_range(1, SPLITS):
        total += tl.load(sums + (leaf * SPLITS + each) * step, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["rows", "slots"])
def _shrink(
    x, a, sums, shrunk, places, members, tiles, scales, arrived, rows, inputs, size, slots,
    PARTS: tl.constexpr, TILES: tl.constexpr, LEAVES: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, scaled: tl.constexpr,
    beside: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Sums [part, tile of ranks, split of the inputs, slot, rank] of one block, split and part; by the last of a
    block's splits also what they are together, in the tree of leaves, ``scaled`` if that is the root. A slot is a
    row's place among all blocks; a leaf has ``size`` inputs, and SPLITS splits.

    ``beside``: the kernel before this one has waited for x, and writes nothing that is read here: only this one's end
    waits for its.
    """
    block, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, rank, k = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, CHUNK)
    start, end = split // SPLITS * size + split % SPLITS * WIDTH, (split // SPLITS + 1) * size
    place = tl.load(places + block)
    row = tl.load(members + block * ROWS + lane)
    if beside:
        begin_early(overlap)
    else:
        begin(overlap)
    if place >= 0:
        there = ((row >= 0) & (row < rows))[:, None]
        at = x + row.to(tl.int64)[:, None] * inputs
        count = tl.load(tiles + place * PLACE_IN_TABLE + part)
        for tile in range(count):
            of = a + (((place * TILES + tile) * PARTS + part) * RANKS + rank).to(tl.int64)[:, None] * inputs
            acc = tl.zeros([ROWS, RANKS], tl.float32)
            for first in range(0, WIDTH, CHUNK):
                here = start + first + k[None, :]
                if EVEN:
                    xs = tl.load(at + here, mask=there, other=0.0)
                    ws = tl.load(of + here)
                else:
                    xs = tl.load(at + here, mask=there & (here < end), other=0.0)
                    ws = tl.load(of + here, mask=here < end, other=0.0)
                acc = tl.dot(xs.to(ws.dtype), ws.T, acc, input_precision="ieee")
            to = ((part * TILES + tile) * LEAVES * SPLITS + split) * slots + block * ROWS + lane
            tl.store(sums + to.to(tl.int64)[:, None] * RANKS + rank[None, :], acc)
        tl.debug_barrier()  # all warps have written before one of them says so
        counter = arrived + block * PARTS + part
        if tl.atomic_add(counter, 1, sem="acq_rel") == LEAVES * SPLITS - 1:
            tl.debug_barrier()
            scale = tl.load(scales + place * PLACE_IN_TABLE + part)
            for tile in range(count):
                slot = block * ROWS + lane
                first = (part * TILES + tile) * LEAVES * SPLITS * slots + slot
                of, step = sums + first.to(tl.int64)[:, None] * RANKS + rank[None, :], slots * RANKS
                total = _leaf_sum(of, 0, step, SPLITS)
                if LEAVES >= 2:
                    total += _leaf_sum(of, 1, step, SPLITS)
                if LEAVES == 4:
                    right = _leaf_sum(of, 2, step, SPLITS)
                    right += _leaf_sum(of, 3, step, SPLITS)
                    total += right
                if scaled:
                    total *= scale
                to = ((part * TILES + tile) * slots + slot).to(tl.int64)[:, None] * RANKS + rank[None, :]
                tl.store(shrunk + to, total)
            tl.store(counter, 0)
    if beside:
        begin_late(overlap)


class Blocks:
    """The blocks of a step's rows on the device, for at most ``tokens`` rows and ``places`` adapters."""

    def __init__(self, tokens: int, places: int, device: torch.device) -> None:
        self._count = most_blocks(tokens, places)
        self._device = torch.full((self._count * (1 + BLOCK) + tokens,), -1, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._host = [torch.full_like(self._device, -1, device="cpu", pin_memory=cuda) for _ in range(HOST_COPIES)]
        self._copied = [torch.cuda.Event() for _ in range(HOST_COPIES)] if cuda else []
        self._there = np.empty(0, np.int32)
        ends = [self._count, self._count * BLOCK, tokens]
        self.places, self.members, self.slots = self._device.split(ends)
        self.arrived = torch.zeros(self._count * MOST_PARTS, dtype=torch.int32, device=device)

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


def write_blocks(words: np.ndarray, count: int, places: np.ndarray) -> None:
    """Write ``words`` int32 [count * (1 + BLOCK) + rows]: the place of each block, the rows of each, in the order of
    places, then the slot of each row; -1 stands for none.
    """
    words.fill(-1)
    rows = np.flatnonzero(places >= 0)
    rows = rows[np.argsort(places[rows], kind="stable")]
    sizes = np.bincount(places[rows])
    blocks = -(-sizes // BLOCK)
    words[: blocks.sum()] = np.arange(len(sizes)).repeat(blocks)
    skipped = (blocks.cumsum() - blocks) * BLOCK - (sizes.cumsum() - sizes)
    slots = np.arange(len(rows)) + skipped.repeat(sizes)
    words[count + slots] = rows
    words[count * (1 + BLOCK) + rows] = slots


class Packed(NamedTuple):
    """What a place holds of an adapter: ``a`` [this rank's tiles, parts, TILE, inputs], ``b`` [tiles, outputs, TILE]
    and its ``table``. One piece of memory each, so that putting them into a place is three copies.
    """

    a: Tensor
    b: Tensor
    table: Tensor


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
        tiles: Sequence[int] = (),
        among: Collective | None = None,
    ) -> AdaptedLinear | AdaptedLeafLinear:
        assert isinstance(linear, CudaLinear | CudaLeafLinear)
        assert len(outputs) <= MOST_PARTS
        leaves, held = getattr(linear.shape, "leaves", 1), matrix_dtype(linear.shape.dtype, dtype)
        among = among if isinstance(among, RankSums) else RankSums()
        factors = Factors(inputs, outputs, places, max_rank, held, self._device, leaves=leaves, among=among)
        if isinstance(linear, CudaLeafLinear):
            return AdaptedLeafLinear(linear, factors, rows)
        return AdaptedLinear(linear, factors, rows, activation, clip)

    def embedding(
        self, table: Tensor, rows: CudaAdapterRows, *, places: int, max_rank: int, dtype: torch.dtype
    ) -> AdaptedEmbedding:
        vocab, hidden = table.shape
        factors = Factors(vocab, [hidden], places, max_rank, matrix_dtype(table.dtype, dtype), self._device)
        return AdaptedEmbedding(factors, rows)

    def experts(
        self, experts: Experts, size: ExpertsSize, rows: CudaAdapterRows, *, places: int, max_rank: int,
        dtype: torch.dtype,
    ) -> AdaptedExperts | AdaptedLeafExperts | None:  # fmt: skip
        """Of plain weights; those of quantized experts are refused when they are read."""
        if not isinstance(experts, CudaExperts | CudaLeafExperts) or experts.shape.scheme is not None:
            return None
        held = matrix_dtype(experts.shape.dtype, dtype)
        gate_up, down = (
            Factors(inputs, [outputs] * parts * size.num_experts, places, max_rank, held, self._device)
            for inputs, outputs, parts in ((size.hidden, size.inner, 2), (size.inner, size.hidden, 1))
        )
        if isinstance(experts, CudaLeafExperts):
            return AdaptedLeafExperts(experts, gate_up, down, rows)
        return AdaptedExperts(experts, gate_up, down, rows)


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
        self.pack, self.write, self.clear, self.bytes = factors.pack, factors.write, factors.clear, factors.bytes

    @property
    def linears(self) -> tuple[CudaLinear, CudaLinear]:
        """The layers whose kernels are chosen by shape and number of rows."""
        return self.plain, self.inner

    @property
    def fused_input(self) -> QuantizedInput | None:
        """Adapters read what a norm gives as it is."""
        found = self.plain.fused_input
        return None if found is None else found.beside_plain()

    def __call__(self, x: Tensor | QuantizedRows, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs]."""
        blocks = self._rows.blocks
        if blocks is None:
            return self.plain(x, out)
        gated = self._activation == "silu_and_mul"
        finished = gated or (self._activation is None and self._limit is None)
        rows = x.plain if isinstance(x, QuantizedRows) else x
        assert rows is not None
        given, sums = self._factors.room(rows, blocks)  # before the layer, whose memory for itself is another then
        choice, beside = self._choice(len(x))
        if not beside:
            self._factors.shrink(rows, blocks, given, sums, beside=False)
        y = self.inner.by(choice, x, out if finished and not gated else None)
        if beside:
            self._factors.shrink(rows, blocks, given, sums, beside=True)
        y = expand(y, self._factors.gathered(given), self._factors.bounds, gated=gated, out=out)
        if self._activation is not None and not gated:
            y = activate(y, self._activation)
        return y if self._limit is None else clip(y, self._limit)

    def _choice(self, rows: int) -> tuple[KernelConfig, bool]:
        """By what the layer is computed, and whether adapters may shrink beside it: those kernels of quantized layers
        that stream weights let the next one begin before they have waited for x themselves.
        """
        shape = self.inner.shape
        choice = self.inner.configs(shape, rows)
        if isinstance(choice, Library) and rows <= FEW_ROWS:
            choice = tile_rule(shape, rows)
        return choice, shape.scheme is None or not isinstance(choice, Tile) or not choice.bulk


class AdaptedEmbedding:
    """See :class:`preheat.backends.base.AdaptedEmbedding`. What a token shrinks to is a column of the first matrix."""

    def __init__(self, factors: Factors, rows: CudaAdapterRows) -> None:
        self._factors, self._rows = factors, rows
        self.pack, self.write, self.clear, self.bytes = factors.pack, factors.write, factors.clear, factors.bytes

    def add(self, tokens: Tensor, slots: Tensor, last_token: Tensor, out: Tensor) -> None:
        blocks = self._rows.blocks
        if blocks is not None:
            expand(out, self._factors.gather(tokens, slots, last_token, blocks), self._factors.bounds, chosen=True)


class Factors:
    """Both matrices of the adapters in all ``places``, for all parts of a layer, in tiles of ranks. A table says how
    many of them each place and part has in use, the scale, whose bits lie in an integer, and how many of the first
    matrix are on this rank: all, unless ranks divide them ``among`` themselves, of which each has every world-th.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        places: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        leaves: int = 1,
        among: RankSums = RankSums(),  # noqa: B008 - it has no state
    ) -> None:
        parts, tiles = len(outputs), -(-max_rank // TILE)
        self._among, self._tiles_each = among, -(-tiles // among.world)
        self._inputs, self._places, self._leaves, self._leaf = inputs, places, leaves, inputs // leaves
        self.bounds = np.cumsum([0, *outputs]).tolist()
        self._width = min(PART, max(triton.next_power_of_2(self._leaf), TILE))
        self._splits = -(-self._leaf // self._width)
        self._a = torch.zeros(places, self._tiles_each, parts, TILE, inputs, dtype=dtype, device=device)
        self._b = torch.zeros(places, tiles, self.bounds[-1], TILE, dtype=dtype, device=device)
        width = -(-parts // TABLE_PARTS) * TABLE_PARTS
        self._table = torch.zeros(places, TABLE_ROWS, width, dtype=torch.int32, device=device)
        self._tiles, self._scales = self._table[:, 0], self._table[:, 1].view(torch.float32)
        self._own = self._table[:, 2]
        self._host = partial(torch.zeros, pin_memory=device.type == "cuda")
        self._nothing, self._cleared = self._host(TABLE_ROWS, width, dtype=torch.int32), [True] * places
        self._bounds = torch.tensor(self.bounds, dtype=torch.int32, device=device)

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both matrices, [places, tiles, parts, TILE, inputs] and [places, tiles, outputs, TILE]; how many tiles each
        place and part has in use, and the scales, [places, parts or more] both and with the same strides.
        """
        return self._a, self._b, self._tiles, self._scales

    def pack(self, given: Mapping[int, LowRank]) -> Packed:
        """The matrices of parts as a place holds them, in pinned memory where there is a device."""
        most, inputs = max(-(-len(each.a) // TILE) for each in given.values()), self._inputs
        rank, world = self._among.rank, self._among.world
        a = self._host(len(range(rank, most, world)), len(self.bounds) - 1, TILE, inputs, dtype=self._a.dtype)
        b = self._host(most, self.bounds[-1], TILE, dtype=self._b.dtype)
        table = self._host(*self._nothing.shape, dtype=torch.int32)
        for part, (down, up, scale) in given.items():
            tiles = -(-len(down) // TILE)
            more = tiles * TILE - len(down)
            own = len(range(rank, tiles, world))
            a[:own, part].copy_(F.pad(down, (0, 0, 0, more)).view(tiles, TILE, inputs)[rank::world])
            mine = b[:tiles, self.bounds[part] : self.bounds[part + 1]]
            mine.copy_(F.pad(up, (0, more)).view(len(up), tiles, TILE).transpose(0, 1))
            table[0, part], table[1].view(torch.float32)[part], table[2, part] = tiles, scale, own
        return Packed(a, b, table)

    def write(self, place: int, packed: Packed) -> None:
        """Put what was packed into ``place``. Copies are asked for, not waited for."""
        self._a[place, : len(packed.a)].copy_(packed.a, non_blocking=True)
        self._b[place, : len(packed.b)].copy_(packed.b, non_blocking=True)
        self._table[place].copy_(packed.table, non_blocking=True)
        self._cleared[place] = False

    def clear(self, place: int) -> None:
        """Leave the layer alone for rows of ``place``."""
        if not self._cleared[place]:
            self._table[place].copy_(self._nothing, non_blocking=True)
            self._cleared[place] = True

    def room(self, x: Tensor, blocks: Blocks) -> tuple[Expansion, Tensor]:
        """Room for what ``x`` [rows, inputs] shrinks to, with what that is expanded by; and for the sums of each part
        of the inputs, fp32 [parts, tiles, parts of the inputs, blocks * BLOCK, TILE].
        """
        count, parts = most_blocks(len(x), self._places), len(self.bounds) - 1
        splits = self._leaves * self._splits
        sums = x.new_empty(parts, self._tiles_each, splits, count * BLOCK, TILE, dtype=torch.float32)
        shrunk = x.new_empty(1, parts, self._tiles_each, count * BLOCK, TILE, dtype=torch.float32)
        given = Expansion(shrunk, self._b, blocks.places, blocks.members, blocks.slots, self._tiles, self._bounds)
        return given, sums

    def shrink(
        self, x: Tensor, blocks: Blocks, to: Expansion, sums: Tensor, *, beside: bool, scaled: bool = True
    ) -> None:
        """Let ``x`` [rows, inputs] shrink to ``to``, ``beside`` the kernel that was launched last. Not ``scaled``: it
        is what a rank has, and no root yet.
        """
        _, parts, _, count, _ = to.shrunk.shape
        _shrink[count // BLOCK, self._leaves * self._splits, parts](
            x, self._a, sums, to.shrunk, blocks.places, blocks.members, self._own, self._scales, blocks.arrived,
            len(x), self._inputs, self._leaf, count, PARTS=parts, TILES=self._tiles_each, LEAVES=self._leaves,
            SPLITS=self._splits, WIDTH=self._width, CHUNK=min(CHUNK, self._width), ROWS=BLOCK, RANKS=TILE,
            EVEN=self._leaf % self._width == 0, scaled=scaled, beside=beside, **options(num_warps=4, num_stages=4),
        )  # fmt: skip

    def gathered(self, own: Expansion) -> Expansion:
        """``own`` with what rows shrank to on all ranks that divide the first matrices. Nothing is added."""
        if self._among.world == 1:
            return own
        return own._replace(shrunk=self._among.gather(own.shrunk[0]))

    def add_roots(self, parts: Tensor, blocks: Blocks, to: Expansion) -> None:
        """Let ``to`` be the scaled sum of what ranks shrank to: fp32 ``parts`` [ranks, tiles * slots * TILE], those of
        each rank contiguous.
        """
        add_roots(parts, to.shrunk, blocks.places, self._tiles, self._scales)

    def gather(self, tokens: Tensor, slots: Tensor, last_token: Tensor, blocks: Blocks) -> Expansion:
        """What ``tokens`` int32 [tokens] shrink to, whose number is an input; -1 stands for ``last_token[slot]``."""
        count = most_blocks(len(tokens), self._places)
        shrunk = self._a.new_empty(1, 1, self._tiles_each, count * BLOCK, TILE, dtype=torch.float32)
        members = torch.empty_like(blocks.members[: count * BLOCK])
        _gather[(count,)](
            tokens, slots, last_token, self._a, shrunk, members, blocks.places, blocks.members, self._tiles,
            self._scales, len(tokens), count * BLOCK, self._inputs, TILES=self._tiles_each, ROWS=BLOCK, RANKS=TILE,
            **options(num_warps=1, num_stages=1),
        )  # fmt: skip
        return Expansion(shrunk, self._b, blocks.places, members, blocks.slots, self._tiles, self._bounds)
