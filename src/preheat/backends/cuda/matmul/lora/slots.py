"""The matrices of the adapters in all slots of a layer on CUDA, see :mod:`preheat.ops.matmul`.

The numbers of rows and of adapter slots bound the number of blocks of rows, and so set the grid. Programs of blocks
beyond the step's end at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base.collective import Collective
from preheat.backends.cuda.device import pinned
from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.matmul.config import Wide
from preheat.backends.cuda.matmul.lora.blocks import BLOCK, MOST_PARTS, TABLE_PARTS, TABLE_ROWS, Blocks, CudaAdapterRows
from preheat.backends.cuda.matmul.lora.expand import Expansion, expand
from preheat.backends.cuda.matmul.lora.shrink import SLOT_STRIDE, Shrinking, ShrinkSizes, shrink
from preheat.backends.cuda.ranks.collective import RankSums, root_of
from preheat.ops.matmul import LowRankPair
from preheat.ops.values import TILE, Matmul, pair_dtype


@triton.jit(do_not_specialize=["rows", "slots"])
def _gather(
    tokens, sequences, last_token, a, shrunk, own, adapter_slots, members, tiles, scales, rows, slots, vocab,
    TILES: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write the scaled columns of ``a`` for the tokens of one block.

    ``own`` gets the members of the block that are tokens; -1 replaces rows of images and rows beyond the last one.
    """
    block, lane, rank = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, RANKS)
    adapter_slot = tl.load(adapter_slots + block)
    row = tl.load(members + block * ROWS + lane)
    begin(overlap)
    if adapter_slot >= 0:
        token = tl.load(tokens + row, mask=(row >= 0) & (row < rows), other=-2)
        sequence = tl.load(sequences + row, mask=token == -1, other=0)
        token = tl.where(token == -1, tl.load(last_token + sequence, mask=token == -1, other=0), token)
        tl.store(own + block * ROWS + lane, tl.where(token >= 0, row, -1))
        scale = tl.load(scales + adapter_slot * SLOT_STRIDE)
        for tile in range(tl.load(tiles + adapter_slot * SLOT_STRIDE)):
            column = a + ((adapter_slot * TILES + tile) * RANKS + rank).to(tl.int64)[None, :] * vocab + token[:, None]
            found = tl.load(column, mask=(token >= 0)[:, None], other=0.0).to(tl.float32)
            to = (tile * slots + block * ROWS + lane).to(tl.int64)[:, None] * RANKS + rank[None, :]
            tl.store(shrunk + to, found * scale)


class Packed(NamedTuple):
    """An adapter as an adapter slot holds it.

    ``a`` is [this rank's tiles, parts, TILE, inputs], ``b`` [tiles, outputs, TILE]; ``table`` is its part of the table.
    Each is one piece of memory, so that putting them into a slot is three copies.
    """

    a: Tensor
    b: Tensor
    table: Tensor


def _copy(numbers: Tensor, to: Tensor) -> None:
    """Copy ``numbers`` into ``to``, of the same shape, on this thread: torch would wake all its threads."""
    bits = torch.int16 if to.element_size() == 2 else torch.int32
    np.copyto(to[: len(numbers)].view(bits).numpy(), numbers.to(to.dtype).view(bits).numpy())


@triton.jit(do_not_specialize=["slots"])
def _add_roots(
    parts, shrunk, adapter_slots, tiles, scales, stride, slots, WORLD: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write the scaled sum over all ranks of the shrunk rows of one block: [ROWS, RANKS] for each tile in use."""
    block = tl.program_id(0)
    slot, rank = block * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS)
    adapter_slot = tl.load(adapter_slots + block)
    begin(overlap)
    if adapter_slot >= 0:
        scale = tl.load(scales + adapter_slot * SLOT_STRIDE)
        for tile in range(tl.load(tiles + adapter_slot * SLOT_STRIDE)):
            at = (tile * slots + slot).to(tl.int64)[:, None] * RANKS + rank[None, :]
            tl.store(shrunk + at, root_of(parts, tl.cast(stride, tl.int64), at, at >= 0, WORLD) * scale)


def add_roots(parts: Tensor, to: Expansion, scales: Tensor) -> None:
    """Write to ``to`` the scaled sums of shrunk rows over all ranks.

    ``parts`` are fp32 [ranks, numbers of a rank], contiguous for each rank. ``scales`` are the scales of all adapter
    slots.
    """
    slots = to.shrunk.shape[3]
    _add_roots[(slots // to.block,)](
        parts, to.shrunk, to.adapter_slots, to.tiles, scales, parts.stride(0), slots, WORLD=len(parts), ROWS=to.block,
        RANKS=TILE, **options(num_warps=1, num_stages=1),
    )  # fmt: skip


class CudaAdapters:
    """See :class:`preheat.backends.base.adapters.AdapterOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, tokens: int, slots: int) -> CudaAdapterRows:
        return CudaAdapterRows(tokens, slots, self._device)


class Factors:
    """Both matrices of the adapters in all adapter slots, for all parts of a layer, in tiles of ranks.

    A table has three numbers for each slot and part: the tiles in use; the scale, as the bits of an integer; and the
    tiles of the first matrix that are on this rank. The rank has all tiles, unless ranks divide them ``among``
    themselves: then each has every world-th.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        adapter_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        k_splits: int = 1,
        among: RankSums = RankSums(),  # noqa: B008 - it has no state
    ) -> None:
        parts, tiles = len(outputs), -(-max_rank // TILE)
        self._among, self._sizes = among, ShrinkSizes(inputs, parts, -(-tiles // among.world), k_splits)
        self.bounds = np.cumsum([0, *outputs]).tolist()
        self._a = torch.zeros(adapter_slots, self._sizes.tiles, parts, TILE, inputs, dtype=dtype, device=device)
        self._b = torch.zeros(adapter_slots, tiles, self.bounds[-1], TILE, dtype=dtype, device=device)
        width = -(-parts // TABLE_PARTS) * TABLE_PARTS
        self._table = torch.zeros(adapter_slots, TABLE_ROWS, width, dtype=torch.int32, device=device)
        self._tiles, self._scales = self._table[:, 0], self._table[:, 1].view(torch.float32)
        self._own = self._table[:, 2]
        self._host = pinned.ADAPTERS.zeros if device.type == "cuda" else torch.zeros
        self._nothing, self._cleared = self._host(TABLE_ROWS, width, dtype=torch.int32), [True] * adapter_slots
        self._bounds = torch.tensor(self.bounds, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, value: Matmul, device: torch.device, ranks: Collective | None = None) -> Factors:
        """Make room for the term of a layer of ``value``; of experts, for all their matrices in order."""
        (term,) = value.terms
        held = getattr(torch, pair_dtype(value.weight.dtype, term.dtype))
        outputs = term.parts * max(value.groups.experts, 1)
        assert value.groups.experts or len(outputs) <= MOST_PARTS
        among = cast(RankSums, ranks) if term.shared == "ranks" and ranks is not None else RankSums()
        splits = value.order.own_k_splits if value.order.is_split and not value.groups.experts else 1
        return cls(value.inputs, outputs, term.slots, term.rank, held, device, k_splits=splits, among=among)

    @property
    def bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both matrices, tiles in use and scales.

        The matrices are [slots, tiles, parts, TILE, inputs] and [slots, tiles, outputs, TILE]. The tiles in use and the
        scales of each slot and part are [slots, parts or more], with equal strides.
        """
        return self._a, self._b, self._tiles, self._scales

    def pack(self, given: Mapping[int, LowRankPair]) -> Packed:
        """Return the matrices of parts as an adapter slot holds them, pinned if there is a device."""
        most, inputs = max(-(-len(each.a) // TILE) for each in given.values()), self._sizes.inputs
        rank, world = self._among.rank, self._among.world
        a = self._host(len(range(rank, most, world)), len(self.bounds) - 1, TILE, inputs, dtype=self._a.dtype)
        b = self._host(most, self.bounds[-1], TILE, dtype=self._b.dtype)
        table = self._host(*self._nothing.shape, dtype=torch.int32)
        for part, (down, up, scale) in given.items():
            tiles = -(-len(down) // TILE)
            own = range(rank, tiles, world)
            for at, tile in enumerate(own):
                _copy(down[tile * TILE :][:TILE], a[at, part])
            for tile in range(tiles):
                columns = up[:, tile * TILE :][:, :TILE]
                _copy(columns, b[tile, self.bounds[part] : self.bounds[part + 1], : columns.shape[1]])
            table[0, part], table[1].view(torch.float32)[part], table[2, part] = tiles, scale, len(own)
        return Packed(a, b, table)

    def write(self, slot: int, packed: Packed) -> None:
        """Put ``packed`` into adapter slot ``slot``. Copies are asked for, not waited for."""
        self._a[slot, : len(packed.a)].copy_(packed.a, non_blocking=True)
        self._b[slot, : len(packed.b)].copy_(packed.b, non_blocking=True)
        self._table[slot].copy_(packed.table, non_blocking=True)
        self._cleared[slot] = False

    def clear(self, slot: int) -> None:
        """Leave the layer alone for rows of adapter slot ``slot``."""
        if not self._cleared[slot]:
            self._table[slot].copy_(self._nothing, non_blocking=True)
            self._cleared[slot] = True

    def room(self, x: Tensor, blocks: Blocks) -> tuple[Shrinking, Expansion]:
        """Return the operands of both products for ``x`` [rows, inputs].

        They have room for the sums and for the shrunk rows.
        """
        slots, sizes = blocks.count(len(x)) * blocks.size, self._sizes
        room = sizes.parts, sizes.tiles, sizes.k_splits * sizes.splits, slots, TILE
        sums = x.new_empty(room, dtype=torch.float32)
        shrunk = x.new_empty(1, sizes.parts, sizes.tiles, slots, TILE, dtype=torch.float32)
        given = Shrinking(x, self._a, sums, self._own, self._scales, blocks.arrived)
        return given, self._expansion(shrunk, blocks, blocks.members)

    def add(
        self, y: Tensor, given: Shrinking, to: Expansion, blocks: Blocks, *, beside: bool, gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``y`` with the terms of adapters, see :func:`expand`, of rows that have not shrunk yet.

        They shrink ``beside`` the kernel that was launched last, or behind it.
        """
        if beside or blocks.size > BLOCK or self._among.world > 1:
            self.shrink(given, to, blocks, beside=beside)
            return expand(y, self.gathered(to), self.bounds, gated=gated, out=out)
        shrink(given, to.shrunk, blocks, self._sizes, beside=False, adds=False)
        return expand(y, to._replace(shrunk=given.sums[None]), self.bounds, gated=gated, sums=self._sizes, out=out)

    def shrink(self, given: Shrinking, to: Expansion, blocks: Blocks, *, beside: bool, scaled: bool = True) -> None:
        """See :func:`preheat.backends.cuda.matmul.lora.shrink.shrink`."""
        shrink(given, to.shrunk, blocks, self._sizes, beside=beside, scaled=scaled)

    def fit(self, choice: Wide) -> bool:
        """Return whether a layer's kernel can add the terms.

        It can if tiles are whole, and each half of a tile is of one part.
        """
        whole = self.bounds[-1] % choice.outputs == 0
        return whole and self._b.dtype == torch.bfloat16 and all(b % (choice.outputs // 2) == 0 for b in self.bounds)

    def gathered(self, to: Expansion) -> Expansion:
        """Return ``to`` with the shrunk rows of all ranks that divide the first matrices."""
        return to if self._among.world == 1 else to._replace(shrunk=self._among.gather(to.shrunk[0]))

    def add_roots(self, parts: Tensor, to: Expansion) -> None:
        """Write to ``to`` the scaled sum of the shrunk rows of all ranks.

        ``parts`` are fp32 [ranks, tiles * slots * TILE], contiguous for each rank.
        """
        add_roots(parts, to, self._scales)

    def gather(self, tokens: Tensor, slots: Tensor, last_token: Tensor, blocks: Blocks) -> Expansion:
        """Return the expansion of ``tokens`` int32 [tokens]; the number of a token is an input.

        -1 stands for ``last_token[slot]``.
        """
        count = blocks.count(len(tokens))
        shrunk = self._a.new_empty(1, 1, self._sizes.tiles, count * blocks.size, TILE, dtype=torch.float32)
        members = torch.empty_like(blocks.members)
        _gather[(count,)](
            tokens, slots, last_token, self._a, shrunk, members, blocks.adapter_slots, blocks.members, self._tiles,
            self._scales, len(tokens), count * blocks.size, self._sizes.inputs, TILES=self._sizes.tiles,
            ROWS=blocks.size, RANKS=TILE, **options(num_warps=1, num_stages=1),
        )  # fmt: skip
        return self._expansion(shrunk, blocks, members)

    def _expansion(self, shrunk: Tensor, blocks: Blocks, members: Tensor) -> Expansion:
        """Return the expansion of ``members``: all members of ``blocks``, or some."""
        by_rows = blocks.whose, blocks.starts, blocks.present
        of_slots = self._tiles, self._scales, self._bounds
        return Expansion(shrunk, self._b, blocks.adapter_slots, members, blocks.slots, *of_slots, *by_rows)
