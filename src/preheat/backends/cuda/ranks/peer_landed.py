"""Sums over ranks whose parts have been copied to the rank that adds them, alone or with residual and norm.

Contract. The bits equal the bits of :mod:`preheat.backends.cuda.ranks.peer_kernels`, and with a norm the bits of
:mod:`preheat.backends.cuda.ranks.peer_norm`.

Of many rows, a copy engine moves each sum into the memory of the rank that adds it, while the rank computes other rows,
see :class:`preheat.backends.cuda.ranks.collective.Landing`. The kernels here add the sums that have landed, and send
the results. Their programs raise and await their flags twice: when all sums have landed, and when all results have. A
rank that has seen the second flags knows that the others have read its sums, so it may copy the next ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput, finish_row, layout, places_in
from preheat.backends.cuda.ranks.collective import Landing, Room, root_of
from preheat.backends.cuda.ranks.peer_kernels import biased, raise_flags, wait
from preheat.ops.quantization import QuantizedRows

BLOCK = 4096
"""Numbers of a tile without a norm."""

WIDE = 4096
"""Numbers of a row from which on a multiprocessor has room for one program with a norm, and not for two."""


@triton.jit
def _count(share, size, rank):
    """Return how many of ``size`` numbers or rows are the share of ``rank``."""
    return tl.minimum(share, tl.maximum(size - rank * share, 0))


@triton.jit
def _add(
    bias, out, landed, returned, flags, epochs, silent, share, size, room, outputs, patience, RANK: tl.constexpr,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Add the sums that all ranks have copied to ``landed``, and write all ranks' results to ``out``.

    ``out`` has ``size`` numbers in rows of ``outputs``. Rank r adds ``share`` of them from ``r * share`` on. ``landed``
    and ``returned`` are the memory of each rank, with ``room`` numbers for each other rank.
    """
    begin(overlap)
    PID = tl.program_id(0)
    lane, tiles = tl.arange(0, BLOCK), tl.cdiv(share, BLOCK)
    epoch = tl.load(epochs + PID)
    raise_flags(flags, epoch + 1, PID, RANK, WORLD)
    wait(flags, silent, epoch + 1, patience, PID, RANK, WORLD)
    for tile in range(PID, tiles, tl.num_programs(0)):
        at = tile * BLOCK + lane
        inside = at < _count(share, size, RANK)
        total = root_of(landed[RANK], room, at, inside, WORLD)
        total = biased(total, bias, at, inside, outputs, out.dtype.element_ty)
        tl.store(out + RANK * share + at, total, mask=inside)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                tl.store(returned[rank] + RANK * room + at, total, mask=inside)
    raise_flags(flags, epoch + 2, PID, RANK, WORLD)
    wait(flags, silent, epoch + 2, patience, PID, RANK, WORLD)
    for tile in range(PID, tiles, tl.num_programs(0)):
        at = tile * BLOCK + lane
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                inside = at < _count(share, size, rank)
                found = tl.load(returned[RANK] + rank * room + at, mask=inside, other=0, cache_modifier=".cg")
                tl.store(out + rank * share + at, found, mask=inside)
    tl.store(epochs + PID, epoch + 2)


@triton.jit
def _add_and_norm(
    addend, residual, weight, bias, out, static, codes, row_scales, landed, returned, flags, epochs, silent, share,
    rows, room, patience, part, eps, KIND: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Add ``rows`` landed rows and ``addend`` to ``residual``, and write the norm of each.

    Rank r adds up ``share`` rows from ``r * share`` on. Every rank takes the norms of all rows. ``bias`` is the norm's.
    """
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    scales = tl.load(weight + at, mask=inside, other=0.0)
    begin(overlap)
    PID = tl.program_id(0)
    epoch = tl.load(epochs + PID)
    raise_flags(flags, epoch + 1, PID, RANK, WORLD)
    wait(flags, silent, epoch + 1, patience, PID, RANK, WORLD)
    for row in range(PID, _count(share, rows, RANK), tl.num_programs(0)):
        total = root_of(landed[RANK], room, row * SIZE + at, inside, WORLD)
        total = biased(total, addend, at, inside, SIZE, residual.dtype.element_ty)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                tl.store(returned[rank] + RANK * room + row * SIZE + at, total, mask=inside)
        finish_row(
            total, scales, residual, bias, out, static, codes, row_scales, (RANK * share + row).to(tl.int64), at, part,
            eps, KIND, SCALES, SIZE, WIDTH,
        )  # fmt: skip
    raise_flags(flags, epoch + 2, PID, RANK, WORLD)
    wait(flags, silent, epoch + 2, patience, PID, RANK, WORLD)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            for row in range(PID, _count(share, rows, rank), tl.num_programs(0)):
                found = returned[RANK] + rank * room + row * SIZE + at
                total = tl.load(found, mask=inside, other=0.0, cache_modifier=".cg")
                finish_row(
                    total, scales, residual, bias, out, static, codes, row_scales, (rank * share + row).to(tl.int64),
                    at, part, eps, KIND, SCALES, SIZE, WIDTH,
                )  # fmt: skip
    tl.store(epochs + PID, epoch + 2)


def add_landed(
    room: Room, landing: Landing, bias: Tensor | None, out: Tensor, programs: int | None = None, block: int = BLOCK
) -> None:
    """Write to ``out`` [rows, size] the sums over ranks of the rows of ``landing``, plus ``bias`` [size].

    At most ``programs`` programs run, each with tiles of ``block`` numbers.
    """
    rows, outputs = out[landing.first : landing.end], out.shape[1]
    share, count = landing.share * outputs, len(room.epochs)
    _add[(min(cdiv(share, block), programs or count, count),)](
        bias, rows, room.landed, room.returned, room.flags, room.epochs, room.silent, share, rows.numel(),
        room.landed[0].shape[1], outputs, room.patience, RANK=room.rank, WORLD=room.world, BLOCK=block,
        **options(num_warps=8, num_stages=1),
    )  # fmt: skip


def norm_landed(
    room: Room, landing: Landing, addend: Tensor | None, norm: CudaNorm, residual: Tensor, to: Tensor | QuantizedRows,
    how: QuantizedInput | None, programs: int | None = None,
) -> None:  # fmt: skip
    """Add the sums of the rows of ``landing`` and ``addend`` to ``residual``; write the norms of these rows to ``to``.

    ``to`` has all rows, in the form of ``how``, see :func:`preheat.backends.cuda.pointwise.norm.normed_rows`.
    """
    rows, part = residual[landing.first : landing.end], to[landing.first : landing.end]
    out, codes, scales = places_in(part)
    size = rows.shape[1]
    count = len(room.epochs) if size <= WIDE else room.programs
    _add_and_norm[(min(landing.share, programs or count, count),)](
        addend, rows, norm.weight, norm.bias, out, None if how is None else how.static, codes, scales, room.landed,
        room.returned, room.flags, room.epochs, room.silent, landing.share, len(rows), room.landed[0].shape[1],
        room.patience, 1.0 / size, norm.eps, KIND=norm.kind, SCALES=None if how is None else how.kind, SIZE=size,
        RANK=room.rank, WORLD=room.world, **layout(size),
    )  # fmt: skip
