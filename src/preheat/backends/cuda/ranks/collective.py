"""Exchange between GPUs: NCCL moves bits, and a kernel adds the ranks' numbers.

The kernel adds in the order of the tree. NCCL's own sums take their order from the size of the message and from the
algorithm picked for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base.layers import FusedInput, Norm
from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.process_group import join_group
from preheat.backends.rendezvous import Rendezvous
from preheat.ops.quantization import QuantizedRows

_BLOCK = 1024


@triton.jit
def _pair(parts, rank: tl.constexpr, stride, at, inside):
    """Return the sum of the numbers of ``rank`` and ``rank`` + 1."""
    left = tl.load(parts + rank * stride + at, mask=inside, other=0.0)
    return left + tl.load(parts + (rank + 1) * stride + at, mask=inside, other=0.0)


@triton.jit
def root_of(parts, stride, at, inside, WORLD: tl.constexpr):
    """Return the sum of WORLD ranks in the tree's order; rank r is at ``parts + r * stride + at``."""
    total = _pair(parts, 0, stride, at, inside)
    if WORLD >= 4:
        total += _pair(parts, 2, stride, at, inside)
    if WORLD == 8:
        right = _pair(parts, 4, stride, at, inside)
        right += _pair(parts, 6, stride, at, inside)
        total += right
    return total


@triton.jit
def _add_ranks(
    parts, bias, out, size, stride, outputs, WORLD: tl.constexpr, BLOCK: tl.constexpr, overlap: tl.constexpr
):
    """Write ``BLOCK`` numbers of ``out`` a program, each a sum over ranks.

    Each rank gives ``size`` numbers; ``out`` has rows of ``outputs`` numbers.
    """
    begin(overlap)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = root_of(parts, tl.cast(stride, tl.int64), at, inside, WORLD)
    if bias is not None:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add_ranks(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the sum over ranks, in the tree's order, plus ``bias`` [outputs].

    ``parts`` is fp32 [ranks, rows, outputs], the part of each rank contiguous. The result is [rows, outputs] in
    ``dtype``, in ``out`` if it is given.
    """
    world, rows, outputs = parts.shape
    out = parts.new_empty(rows, outputs, dtype=dtype) if out is None else out
    _add_ranks[(cdiv(out.numel(), _BLOCK),)](
        parts, bias, out, out.numel(), parts.stride(0), outputs, WORLD=world, BLOCK=_BLOCK,
        **options(num_warps=4, num_stages=1),
    )  # fmt: skip
    return out


PATIENCE_S = 120.0
"""Longest wait for another rank on the device. Ranks compile kernels at different speeds while the engine boots."""


class Room(NamedTuple):
    """Memory for exchanges: of every rank ``parts``, ``results`` and ``flags``; of this one ``epochs`` and ``silent``.

    ``parts`` and ``results`` are slots of 4 bytes a number. ``flags`` and ``epochs`` are int64, and zeros at first.
    ``silent`` int64 [1] is on the host: a program that has given up waiting writes the silent rank there, plus one.
    ``landed`` fp32 and ``returned`` [ranks, numbers] of every rank are for a :class:`Landing`, or missing. The first
    ``with_slots`` programs have slots, or all.
    """

    rank: int
    parts: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    epochs: Tensor
    silent: Tensor
    patience: int = int(PATIENCE_S * 1e9)
    landed: tuple[Tensor, ...] = ()
    returned: tuple[Tensor, ...] = ()
    with_slots: int | None = None

    @property
    def world(self) -> int:
        return len(self.parts)

    @property
    def programs(self) -> int:
        """Programs that may exchange through slots."""
        return self.with_slots or len(self.epochs)

    def as_dtype(self, dtype: torch.dtype) -> Room:
        """Return the room with ``results`` and ``returned`` of ``dtype``."""
        results, returned = (tuple(each.view(dtype) for each in of) for of in (self.results, self.returned))
        return self._replace(results=results, returned=returned)


class Landing(NamedTuple):
    """Rows of a sum over ranks, whose parts are copied into the memory of the rank that adds them.

    They are the rows from ``first`` to ``end``. Rank r adds ``share`` of them from ``first + r * share`` on, at most to
    ``end``. Tiles of ``at_once`` rows keep a GPU busy once.
    """

    first: int
    end: int
    share: int
    at_once: int

    def of(self, rank: int) -> slice:
        """Return the rows that ``rank`` adds."""
        start = min(self.first + rank * self.share, self.end)
        return slice(start, min(start + self.share, self.end))

    def pieces(self, rank: int) -> list[slice]:
        """Return the rows that ``rank`` adds in two pieces, so that one is copied while the other is computed.

        A piece has whole ``at_once`` rows, but for the last one.
        """
        rows = self.of(rank)
        half = cdiv(rows.stop - rows.start, 2 * self.at_once) * self.at_once
        middle = min(rows.start + half, rows.stop)
        return [each for each in (slice(rows.start, middle), slice(middle, rows.stop)) if each.start < each.stop]


def landings(rows: int, most: int, at_once: int, world: int) -> list[Landing]:
    """Cut ``rows`` rows so that each of ``world`` ranks adds ``most`` of a landing, or fewer.

    Shares are whole numbers of ``at_once`` rows, but for the last rank's. Return nothing if there is no share for each
    rank.
    """
    each = most // at_once * at_once * world
    if each == 0 or rows < at_once * world:
        return []
    units = cdiv(rows, at_once * cdiv(rows, each))
    step, share = units * at_once, cdiv(units, world) * at_once
    return [Landing(first, min(first + step, rows), share, at_once) for first in range(0, rows, step)]


class Carrier(Protocol):
    """Copies sums of many rows to the ranks that add them, while other rows are computed."""

    def landings(self, rows: int, size: int, at_once: int) -> list[Landing]:
        """Return how to sum ``rows`` rows of ``size`` numbers, see :func:`landings`; nothing if they are few."""

    def places(self, landing: Landing, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of ``landing``, and where to write this rank's part of their sums, fp32 [rows, size].

        The part of other ranks' rows is on its way to them when the next rows are asked for.
        """

    def landed(self, dtype: torch.dtype) -> Room:
        """Return memory whose sums are added once all copies of this rank have ended; results have ``dtype``."""

    def add(self, landing: Landing, bias: Tensor | None, out: Tensor) -> None:
        """Write to ``out`` [rows, size] the sums over ranks of the rows of ``landing``, plus ``bias`` [size]."""

    def norm(
        self, landing: Landing, addend: Tensor | None, norm: Norm, residual: Tensor, to: Tensor | QuantizedRows,
        how: FusedInput | None,
    ) -> None:  # fmt: skip
        """Add the sums of the rows of ``landing`` and ``addend`` to ``residual``; write these rows' norms to ``to``."""


SumAndNorm = Callable[[Tensor, Tensor | None, Any, Tensor, Any], Tensor | QuantizedRows]
"""Function that adds all ranks' sums to the residual.

See :func:`preheat.backends.cuda.ranks.peer_norm.sum_and_norm`.
"""


class RankSums:
    """A group of one rank, and the base of larger groups.

    ``carrier`` sums many rows, if the ranks can write into each other's memory.
    """

    rank, world = 0, 1
    carrier: Carrier | None = None

    def gather(self, x: Tensor) -> Tensor:
        """See :class:`preheat.backends.base.collective.Collective`."""
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See :class:`preheat.backends.base.collective.Link`."""
        return x.copy_(self.gather(x)[source])

    def sum(self, mine: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of all ranks' ``mine``, fp32 [rows, outputs], plus ``bias``: a new tensor in ``dtype``."""
        return add_ranks(self.gather(mine), bias, dtype)

    def joining(self, rows: int, size: int) -> SumAndNorm | None:
        """Return how a sum of few ``rows`` is added to the residual and normed in one launch, if it can be."""
        return None

    def sharing(self, rows: int, size: int, dtype: torch.dtype) -> SumAndNorm | None:
        """Return how each rank adds a share of more rows than :meth:`joining` takes, in one launch, if it can be.

        Rows of ``dtype`` have ``size`` numbers.
        """
        return None

    def abort(self) -> None:
        """See :class:`preheat.backends.base.collective.Collective`."""

    def fault(self) -> str | None:
        """See :class:`preheat.backends.base.collective.Collective`."""
        return None


class Nccl(RankSums):
    """A rank on ``device``; :func:`preheat.backends.process_group.join_group` tells how it joins."""

    def __init__(self, device: torch.device, rendezvous: Rendezvous, check: Callable[[], None]) -> None:
        self.rank, self.world = rendezvous.rank, rendezvous.world
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # ranks watch each other, see parallel/ranks.py
        join_group("nccl", rendezvous, check, device=device)
        self.gather(torch.zeros(1, device=device))  # connects the ranks, and takes the memory of the connections
        torch.cuda.synchronize(device)

    def gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.world, *x.shape)
        dist.all_gather_into_tensor(found.view(-1), x.contiguous().view(-1))
        return found

    def abort(self) -> None:
        dist.distributed_c10d._abort_process_group()  # the kernels of graphs see it too
