"""The matrices of the adapters in all slots of a layer on CUDA, see :mod:`preheat.ops.matmul`.

How many blocks of rows there are at most follows from the number of rows and of slots, and so does the grid; programs
of blocks that a step has not end at once.
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

from preheat.backends.base import Collective
from preheat.backends.cuda.collective import RankSums, root_of
from preheat.backends.cuda.launch import begin, options
from preheat.backends.cuda.lora_blocks import BLOCK, MOST_PARTS, TABLE_PARTS, TABLE_ROWS, Blocks, CudaAdapterRows
from preheat.backends.cuda.lora_expand import Expansion, expand
from preheat.backends.cuda.lora_shrink import PLACE_IN_TABLE, Shrinking, ShrinkSizes, shrink
from preheat.backends.cuda.matmul.config import Wide
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import TILE, Matmul, pair_dtype


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


class Packed(NamedTuple):
    """What a place holds of an adapter: ``a`` [this rank's tiles, parts, TILE, inputs], ``b`` [tiles, outputs, TILE]
    and its ``table``. One piece of memory each, so that putting them into a place is three copies.
    """

    a: Tensor
    b: Tensor
    table: Tensor


@triton.jit(do_not_specialize=["slots"])
def _add_roots(
    parts, shrunk, places, tiles, scales, stride, slots, WORLD: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """What the rows of one block shrink to on all ranks together, scaled: of each tile in use [ROWS, RANKS]."""
    block = tl.program_id(0)
    slot, rank = block * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS)
    place = tl.load(places + block)
    begin(overlap)
    if place >= 0:
        scale = tl.load(scales + place * PLACE_IN_TABLE)
        for tile in range(tl.load(tiles + place * PLACE_IN_TABLE)):
            at = (tile * slots + slot).to(tl.int64)[:, None] * RANKS + rank[None, :]
            tl.store(shrunk + at, root_of(parts, stride.to(tl.int64), at, at >= 0, WORLD) * scale)


def add_roots(parts: Tensor, to: Expansion, scales: Tensor) -> None:
    """Write what rows shrank to into ``to``, of fp32 ``parts`` [ranks, as many numbers], those of each rank contiguous.
    ``scales`` are those of all places.
    """
    slots = to.shrunk.shape[3]
    _add_roots[(slots // to.block,)](
        parts, to.shrunk, to.places, to.tiles, scales, parts.stride(0), slots, WORLD=len(parts), ROWS=to.block,
        RANKS=TILE, **options(num_warps=1, num_stages=1),
    )  # fmt: skip


class CudaAdapters:
    """See :class:`preheat.backends.base.AdapterOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, tokens: int, slots: int) -> CudaAdapterRows:
        return CudaAdapterRows(tokens, slots, self._device)


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
        self._among, self._sizes = among, ShrinkSizes(inputs, parts, -(-tiles // among.world), leaves)
        self.bounds = np.cumsum([0, *outputs]).tolist()
        self._a = torch.zeros(places, self._sizes.tiles, parts, TILE, inputs, dtype=dtype, device=device)
        self._b = torch.zeros(places, tiles, self.bounds[-1], TILE, dtype=dtype, device=device)
        width = -(-parts // TABLE_PARTS) * TABLE_PARTS
        self._table = torch.zeros(places, TABLE_ROWS, width, dtype=torch.int32, device=device)
        self._tiles, self._scales = self._table[:, 0], self._table[:, 1].view(torch.float32)
        self._own = self._table[:, 2]
        self._host = partial(torch.zeros, pin_memory=device.type == "cuda")
        self._nothing, self._cleared = self._host(TABLE_ROWS, width, dtype=torch.int32), [True] * places
        self._bounds = torch.tensor(self.bounds, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, value: Matmul, device: torch.device, ranks: Collective | None = None) -> Factors:
        """Make room for the term of a layer of ``value``; of experts, for all their matrices in order."""
        (term,) = value.terms
        held = getattr(torch, pair_dtype(value.weight.dtype, term.dtype))
        outputs = term.parts * max(value.groups.experts, 1)
        assert value.groups.experts or len(outputs) <= MOST_PARTS
        among = ranks if term.shared == "ranks" and isinstance(ranks, RankSums) else RankSums()
        splits = value.order.own_k_splits if value.order.is_split and not value.groups.experts else 1
        return cls(value.inputs, outputs, term.slots, term.rank, held, device, leaves=splits, among=among)

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both matrices, [places, tiles, parts, TILE, inputs] and [places, tiles, outputs, TILE]; how many tiles each
        place and part has in use, and the scales, [places, parts or more] both and with the same strides.
        """
        return self._a, self._b, self._tiles, self._scales

    def pack(self, given: Mapping[int, LowRankPair]) -> Packed:
        """The matrices of parts as a place holds them, in pinned memory where there is a device."""
        most, inputs = max(-(-len(each.a) // TILE) for each in given.values()), self._sizes.inputs
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

    def room(self, x: Tensor, blocks: Blocks) -> tuple[Shrinking, Expansion]:
        """By what ``x`` [rows, inputs] shrinks, with room for sums; and by what that is expanded, with room for it."""
        slots, sizes = blocks.count(len(x)) * blocks.size, self._sizes
        room = sizes.parts, sizes.tiles, sizes.leaves * sizes.splits, slots, TILE
        sums = x.new_empty(room, dtype=torch.float32)
        shrunk = x.new_empty(1, sizes.parts, sizes.tiles, slots, TILE, dtype=torch.float32)
        given = Shrinking(x, self._a, sums, self._own, self._scales, blocks.arrived)
        return given, self._expansion(shrunk, blocks, blocks.members)

    def add(
        self, y: Tensor, given: Shrinking, to: Expansion, blocks: Blocks, *, beside: bool, gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``y`` with what adapters add, see :func:`expand`, of rows that have not shrunk yet, which they do ``beside``
        the kernel that was launched last, or behind it.
        """
        if beside or blocks.size > BLOCK or self._among.world > 1:
            self.shrink(given, to, blocks, beside=beside)
            return expand(y, self.gathered(to), self.bounds, gated=gated, out=out)
        shrink(given, to.shrunk, blocks, self._sizes, beside=False, adds=False)
        return expand(y, to._replace(shrunk=given.sums[None]), self.bounds, gated=gated, sums=self._sizes, out=out)

    def shrink(self, given: Shrinking, to: Expansion, blocks: Blocks, *, beside: bool, scaled: bool = True) -> None:
        """See :func:`preheat.backends.cuda.lora_shrink.shrink`."""
        shrink(given, to.shrunk, blocks, self._sizes, beside=beside, scaled=scaled)

    def fit(self, choice: Wide) -> bool:
        """Whether a layer's kernel can add them: tiles are whole, and each half of one is of one part."""
        whole = self.bounds[-1] % choice.outputs == 0
        return whole and self._b.dtype == torch.bfloat16 and all(b % (choice.outputs // 2) == 0 for b in self.bounds)

    def gathered(self, to: Expansion) -> Expansion:
        """``to`` with what rows shrank to on all ranks that divide the first matrices."""
        return to if self._among.world == 1 else to._replace(shrunk=self._among.gather(to.shrunk[0]))

    def add_roots(self, parts: Tensor, to: Expansion) -> None:
        """Let ``to`` be the scaled sum of what ranks shrank to: fp32 ``parts`` [ranks, tiles * slots * TILE], those of
        each rank contiguous.
        """
        add_roots(parts, to, self._scales)

    def gather(self, tokens: Tensor, slots: Tensor, last_token: Tensor, blocks: Blocks) -> Expansion:
        """What ``tokens`` int32 [tokens] shrink to, whose number is an input; -1 stands for ``last_token[slot]``."""
        count = blocks.count(len(tokens))
        shrunk = self._a.new_empty(1, 1, self._sizes.tiles, count * blocks.size, TILE, dtype=torch.float32)
        members = torch.empty_like(blocks.members)
        _gather[(count,)](
            tokens, slots, last_token, self._a, shrunk, members, blocks.places, blocks.members, self._tiles,
            self._scales, len(tokens), count * blocks.size, self._sizes.inputs, TILES=self._sizes.tiles,
            ROWS=blocks.size, RANKS=TILE, **options(num_warps=1, num_stages=1),
        )  # fmt: skip
        return self._expansion(shrunk, blocks, members)

    def _expansion(self, shrunk: Tensor, blocks: Blocks, members: Tensor) -> Expansion:
        """Of ``members``, which are those of ``blocks`` or some of them."""
        by_rows = blocks.whose, blocks.starts, blocks.present
        of_places = self._tiles, self._scales, self._bounds
        return Expansion(shrunk, self._b, blocks.places, members, blocks.slots, *of_places, *by_rows)
