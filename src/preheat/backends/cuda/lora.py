"""Linear layers with places for adapters on CUDA, see :mod:`preheat.ops.lora`.

The rows of each adapter are cut into blocks of ``BLOCK``, filled up with none. One launch shrinks: a program has a
block of rows, a part of the inputs and one of the layer's matrices, and writes its sums, which no other adds to; the
program that is the last of its block adds them up in order. It runs beside the layer itself, of which it needs nothing.
Behind both another launch expands, and applies the activation. Rows without an adapter get nothing added.

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

from preheat.backends.base import HOST_COPIES, AdapterStep, Experts, ExpertsSize, Linear
from preheat.backends.cuda.activation import activate, clip
from preheat.backends.cuda.launch import begin, begin_early, begin_late, options
from preheat.backends.cuda.linear import CudaLinear
from preheat.backends.cuda.lora_expand import BLOCK, PLACE_IN_TABLE, TABLE_PARTS, Expansion, expand, most_blocks
from preheat.backends.cuda.lora_experts import AdaptedExperts
from preheat.backends.cuda.moe import CudaExperts
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


@triton.jit(do_not_specialize=["rows", "slots"])
def _shrink(
    x, a, sums, shrunk, places, members, tiles, scales, arrived, rows, inputs, slots,
    PARTS: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, beside: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Sums [part, tile of ranks, split of the inputs, slot, rank] of one block, split and part; by the last of a
    block's splits also what they are together, scaled. A slot is a row's place among all blocks.

    ``beside``: the kernel before this one has waited for x, and writes nothing that is read here: only this one's end
    waits for its.
    """
    block, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, rank, k = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, CHUNK)
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
        tl.debug_barrier()  # all warps have written before one of them says so
        counter = arrived + block * PARTS + part
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            scale = tl.load(scales + place * PLACE_IN_TABLE + part)
            for tile in range(count):
                slot = block * ROWS + lane
                of = (
                    sums + ((part * TILES + tile) * SPLITS * slots + slot).to(tl.int64)[:, None] * RANKS + rank[None, :]
                )
                total = tl.load(of, cache_modifier=".cg")
                for each in tl.static_range(1, SPLITS):
                    total += tl.load(of + each * slots * RANKS, cache_modifier=".cg")
                to = ((part * TILES + tile) * slots + slot).to(tl.int64)[:, None] * RANKS + rank[None, :]
                tl.store(shrunk + to, total * scale)
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
    """What a place holds of an adapter: ``a`` [tiles, parts, TILE, inputs], ``b`` [tiles, outputs, TILE] and its
    ``table``. One piece of memory each, so that putting them into a place is three copies.
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

    on_ranks = False

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
    ) -> AdaptedLinear:
        assert isinstance(linear, CudaLinear)
        assert len(outputs) <= MOST_PARTS
        factors = Factors(inputs, outputs, places, max_rank, matrix_dtype(linear.shape.dtype, dtype), self._device)
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
    ) -> AdaptedExperts | None:  # fmt: skip
        """Of plain weights; those of quantized experts are refused when they are read."""
        if not isinstance(experts, CudaExperts) or experts.shape.scheme is not None:
            return None
        held = matrix_dtype(experts.shape.dtype, dtype)
        gate_up, down = (
            Factors(inputs, [outputs] * parts * size.num_experts, places, max_rank, held, self._device)
            for inputs, outputs, parts in ((size.hidden, size.inner, 2), (size.inner, size.hidden, 1))
        )
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
        y = expand(y, given, self._factors.bounds, gated=gated, out=out)
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
    many of them each place and part has in use, and the scale, whose bits lie in an integer.
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
        self._inputs, self._places = inputs, places
        self.bounds = np.cumsum([0, *outputs]).tolist()
        self._width = min(PART, max(triton.next_power_of_2(inputs), TILE))
        self._splits = -(-inputs // self._width)
        self._a = torch.zeros(places, self._tiles_each, parts, TILE, inputs, dtype=dtype, device=device)
        self._b = torch.zeros(places, self._tiles_each, self.bounds[-1], TILE, dtype=dtype, device=device)
        width = -(-parts // TABLE_PARTS) * TABLE_PARTS
        self._table = torch.zeros(places, 2, width, dtype=torch.int32, device=device)
        self._tiles, self._scales = self._table[:, 0], self._table[:, 1].view(torch.float32)
        self._host = partial(torch.zeros, pin_memory=device.type == "cuda")
        self._nothing, self._cleared = self._host(2, width, dtype=torch.int32), [True] * places
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
        a = self._host(most, len(self.bounds) - 1, TILE, inputs, dtype=self._a.dtype)
        b = self._host(most, self.bounds[-1], TILE, dtype=self._b.dtype)
        table = self._host(*self._nothing.shape, dtype=torch.int32)
        for part, (down, up, scale) in given.items():
            tiles = -(-len(down) // TILE)
            more = tiles * TILE - len(down)
            a[:tiles, part].copy_(F.pad(down, (0, 0, 0, more)).view(tiles, TILE, inputs))
            mine = b[:tiles, self.bounds[part] : self.bounds[part + 1]]
            mine.copy_(F.pad(up, (0, more)).view(len(up), tiles, TILE).transpose(0, 1))
            table[0, part], table[1].view(torch.float32)[part] = tiles, scale
        return Packed(a, b, table)

    def write(self, place: int, packed: Packed) -> None:
        """Put what was packed into ``place``. Copies are asked for, not waited for."""
        tiles = len(packed.a)
        self._a[place, :tiles].copy_(packed.a, non_blocking=True)
        self._b[place, :tiles].copy_(packed.b, non_blocking=True)
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
        sums = x.new_empty(parts, self._tiles_each, self._splits, count * BLOCK, TILE, dtype=torch.float32)
        shrunk = x.new_empty(parts, self._tiles_each, count * BLOCK, TILE, dtype=torch.float32)
        given = Expansion(shrunk, self._b, blocks.places, blocks.members, blocks.slots, self._tiles, self._bounds)
        return given, sums

    def shrink(self, x: Tensor, blocks: Blocks, to: Expansion, sums: Tensor, *, beside: bool) -> None:
        """Let ``x`` [rows, inputs] shrink to ``to``, ``beside`` the kernel that was launched last."""
        parts, count = len(to.shrunk), to.shrunk.shape[2]
        _shrink[count // BLOCK, self._splits, parts](
            x, self._a, sums, to.shrunk, blocks.places, blocks.members, self._tiles, self._scales, blocks.arrived,
            len(x), self._inputs, count, PARTS=parts, TILES=self._tiles_each, SPLITS=self._splits, WIDTH=self._width,
            CHUNK=min(CHUNK, self._width), ROWS=BLOCK, RANKS=TILE, EVEN=self._inputs % self._width == 0, beside=beside,
            **options(num_warps=4, num_stages=4),
        )  # fmt: skip

    def gather(self, tokens: Tensor, slots: Tensor, last_token: Tensor, blocks: Blocks) -> Expansion:
        """What ``tokens`` int32 [tokens] shrink to, whose number is an input; -1 stands for ``last_token[slot]``."""
        count = most_blocks(len(tokens), self._places)
        shrunk = self._a.new_empty(1, self._tiles_each, count * BLOCK, TILE, dtype=torch.float32)
        members = torch.empty_like(blocks.members[: count * BLOCK])
        _gather[(count,)](
            tokens, slots, last_token, self._a, shrunk, members, blocks.places, blocks.members, self._tiles,
            self._scales, len(tokens), count * BLOCK, self._inputs, TILES=self._tiles_each, ROWS=BLOCK, RANKS=TILE,
            **options(num_warps=1, num_stages=1),
        )  # fmt: skip
        return Expansion(shrunk, self._b, blocks.places, members, blocks.slots, self._tiles, self._bounds)
