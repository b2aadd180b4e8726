"""Linear layers with places for adapters on CUDA, see :mod:`preheat.ops.matmul`.

Rows shrink beside the layer itself, of which that needs nothing (:mod:`preheat.backends.cuda.lora_shrink`). Behind both
they are expanded (:mod:`preheat.backends.cuda.lora_expand`), and the activation is applied. Rows without an adapter get
nothing added.

Layers that take their inputs by columns shrink in leaves, see :mod:`preheat.backends.cuda.lora_leaves`. How many
outputs a layer has changes no bit of any: what is added up is a part of the inputs, or a tile of ranks, in the order
in which the matrix unit takes them, whatever else is in the launch. So the rows of ``B`` that a rank has need no tiles.

How many blocks there are at most follows from the number of rows and of places, and so does the grid; programs of
blocks that a step has not end at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base import Collective, ExpertsLayer, ExpertsSize, Linear
from preheat.backends.cuda.activation import activate, clip
from preheat.backends.cuda.collective import RankSums
from preheat.backends.cuda.launch import begin, options
from preheat.backends.cuda.linear import CudaLinear
from preheat.backends.cuda.linear_leaves import CudaLeafLinear
from preheat.backends.cuda.lora_blocks import BLOCK, MOST_PARTS, TABLE_PARTS, TABLE_ROWS, Blocks, CudaAdapterRows
from preheat.backends.cuda.lora_expand import Expansion, expand
from preheat.backends.cuda.lora_experts import AdaptedExperts
from preheat.backends.cuda.lora_leaf_experts import AdaptedLeafExperts
from preheat.backends.cuda.lora_leaves import AdaptedLeafLinear, add_roots
from preheat.backends.cuda.lora_shrink import PLACE_IN_TABLE, Shrinking, ShrinkSizes, shrink
from preheat.backends.cuda.moe import CudaExperts
from preheat.backends.cuda.moe_leaves import CudaLeafExperts
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.tuning import KernelConfig, Tile, Wide
from preheat.ops.kinds import Activation
from preheat.ops.matmul import LowRankPair, pair_dtype
from preheat.ops.quantization import QuantizedRows, plain_rows
from preheat.ops.values import TILE


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


class CudaAdapters:
    """See :class:`preheat.backends.base.AdapterOps`; and what makes layers with room for adapters of those without."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, tokens: int, slots: int) -> CudaAdapterRows:
        return CudaAdapterRows(tokens, slots, self._device)

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
        leaves, held = max(linear.shape.splits, 1), pair_dtype(linear.shape.dtype, dtype)
        among = among if isinstance(among, RankSums) else RankSums()
        factors = Factors(inputs, outputs, places, max_rank, held, self._device, leaves=leaves, among=among)
        if isinstance(linear, CudaLeafLinear):
            return AdaptedLeafLinear(linear, factors, rows)
        return AdaptedLinear(linear, factors, rows, activation, clip)

    def embedding(
        self, table: Tensor, rows: CudaAdapterRows, *, places: int, max_rank: int, dtype: torch.dtype
    ) -> AdaptedEmbedding:
        vocab, hidden = table.shape
        factors = Factors(vocab, [hidden], places, max_rank, pair_dtype(table.dtype, dtype), self._device)
        return AdaptedEmbedding(factors, rows)

    def experts(
        self, experts: ExpertsLayer, size: ExpertsSize, rows: CudaAdapterRows, *, places: int, max_rank: int,
        dtype: torch.dtype,
    ) -> AdaptedExperts | AdaptedLeafExperts | None:  # fmt: skip
        """Those of quantized experts that ranks share are refused when they are read."""
        if not isinstance(experts, CudaExperts | CudaLeafExperts):
            return None
        held = pair_dtype(experts.shape.dtype, dtype)
        gate_up, down = (
            Factors(inputs, [outputs] * parts * size.num_experts, places, max_rank, held, self._device)
            for inputs, outputs, parts in ((size.hidden, size.inner, 2), (size.inner, size.hidden, 1))
        )
        if isinstance(experts, CudaLeafExperts):
            return AdaptedLeafExperts(experts, gate_up, down, rows)
        return AdaptedExperts(experts, gate_up, down, rows)


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
    def slots(self) -> Factors:
        """What holds its adapters."""
        return self._factors

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return self.inner.weights()

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return self._factors.matrices

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
        blocks = self._rows.blocks_for(len(x))
        if blocks is None:
            return self.plain(x, out)
        gated = self._activation == "silu_and_mul"
        finished = gated or (self._activation is None and self._limit is None)
        rows = plain_rows(x)
        given, to = self._factors.room(rows, blocks)  # before the layer, whose memory for itself is another then
        layer = self.plain if gated else self.inner
        wide = layer.configs.wide(layer.shape, len(x)) if blocks.size > BLOCK else None
        if wide is not None and self._factors.fit(wide):
            self._factors.shrink(given, to, blocks, beside=False)
            y = layer.by(wide, rows, out if finished else None, self._factors.gathered(to))
        else:
            choice, beside = self._choice(len(x))
            y = self.inner.by(choice, x, out if finished and not gated else None)
            y = self._factors.add(y, given, to, blocks, beside=beside, gated=gated, out=out)
        if self._activation is not None and not gated:
            y = activate(y, self._activation)
        return y if self._limit is None else clip(y, self._limit)

    def _choice(self, rows: int) -> tuple[KernelConfig, bool]:
        """By what the layer is computed, and whether rows shrink beside it. cuBLAS lets nothing begin before it ends,
        and those kernels of quantized layers that stream weights let the next one begin before they have waited for x.
        """
        choice = self.inner.configs.own(self.inner.shape, rows)
        if isinstance(choice, Tile):
            return choice, self.inner.shape.scheme is None or not choice.bulk
        return choice, isinstance(choice, Wide)


class AdaptedEmbedding:
    """See :class:`preheat.backends.base.Embedding`. What a token shrinks to is a column of the first matrix."""

    def __init__(self, factors: Factors, rows: CudaAdapterRows) -> None:
        self._factors, self._rows = factors, rows
        self.pack, self.write, self.clear, self.bytes = factors.pack, factors.write, factors.clear, factors.bytes

    @property
    def slots(self) -> Factors:
        """What holds its adapters."""
        return self._factors

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return iter(())

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return self._factors.matrices

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
