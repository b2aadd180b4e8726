"""Adapters of linear layers whose inputs ranks share, on CUDA: see :mod:`preheat.ops.matmul` and
:mod:`preheat.ops.matmul`.

Rows shrink in the layer's leaves. What a rank's leaves are together lies in memory ahead of its sums of the layer
itself, so that one exchange moves both; then each is added in the tree's order, and every rank expands all outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.collective import add_ranks, root_of
from preheat.backends.cuda.launch import begin, options
from preheat.backends.cuda.linear_leaves import CudaLeafLinear
from preheat.backends.cuda.lora_expand import Expansion, expand
from preheat.backends.cuda.lora_shrink import PLACE_IN_TABLE, Shrinking
from preheat.ops.values import TILE

if TYPE_CHECKING:
    from preheat.backends.cuda.lora import Factors
    from preheat.backends.cuda.lora_blocks import Blocks, CudaAdapterRows


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


class AdaptedLeafLinear:
    """``inner``, then what the adapters of its rows add. In steps without adapters it is ``inner`` alone."""

    def __init__(self, inner: CudaLeafLinear, factors: Factors, rows: CudaAdapterRows) -> None:
        self.inner, self._factors, self._rows = inner, factors, rows
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
    def linears(self) -> tuple[CudaLeafLinear]:
        """The layer whose tiles are chosen by shape and number of rows."""
        return (self.inner,)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank] -> [rows, outputs], a new tensor, the same on all ranks."""
        blocks = self._rows.blocks_for(len(x))
        if blocks is None:
            return self.inner(x)
        given, to = self._factors.room(x, blocks)  # before the layer, whose memory for itself is another then
        if self.inner.ranks.world == 1:
            return self._factors.add(self.inner(x), given, to, blocks, beside=True)
        return expand(self._exchanged(x, blocks, given, to), to, self._factors.bounds)

    def _exchanged(self, x: Tensor, blocks: Blocks, given: Shrinking, to: Expansion) -> Tensor:
        """The layer's own outputs; what all ranks shrank to is in ``to`` then."""
        inner, first = self.inner, to.shrunk.numel()
        outputs = inner.shape.outputs
        mine = x.new_empty(first + len(x) * outputs, dtype=torch.float32)
        shrunk = mine[:first].view(to.shrunk.shape)
        inner.partial(x, mine[first:].view(len(x), outputs))
        self._factors.shrink(given, to._replace(shrunk=shrunk), blocks, beside=True, scaled=False)
        found = inner.ranks.gather(mine)
        self._factors.add_roots(found[:, :first], to)
        return add_ranks(found[:, first:].unflatten(1, (len(x), outputs)), inner.bias, x.dtype)
