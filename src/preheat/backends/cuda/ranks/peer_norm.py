"""The sum over ranks, the residual addition and the norm behind a row-parallel layer, in one launch.

Bits are those of :mod:`preheat.backends.cuda.ranks.peer_kernels` and of :mod:`preheat.backends.cuda.pointwise.norm` one
after the other: the sum is rounded to the model's dtype before it is added to the residual. Every rank has all rows.
Of few rows, a program sends a row to all other ranks and adds all sums itself. Of more rows, a rank adds every WORLD-th
row and sends the result to the others: fewer bytes travel, for one wait more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput, finish_row, layout, normed_rows, places_in
from preheat.backends.cuda.ranks.collective import Room
from preheat.backends.cuda.ranks.peer_kernels import EACH, biased, raise_flags, root, send, slot, wait
from preheat.ops.quantization import QuantizedRows


@triton.jit(do_not_specialize=["rows"])
def _sum_and_norm(
    mine, addend, residual, weight, bias, out, static, codes, row_scales, parts, flags, epochs, silent, rows, patience,
    share, eps, KIND: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, PROGRAMS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Add ``rows`` rows of all ranks' ``mine`` and ``addend`` to ``residual``, and write the norm of each.

    ``addend`` is the bias of the layer, ``bias`` the norm's.
    """
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    scales = tl.load(weight + at, mask=inside, other=0.0)
    begin(overlap)
    PID = tl.program_id(0)
    count = tl.cdiv(rows - PID, tl.num_programs(0))
    epoch = tl.load(epochs + PID)
    for step in range(count + 1):
        turn = epoch + step
        row = (PID + step * tl.num_programs(0)).to(tl.int64)
        if step > 0:
            wait(flags, silent, turn, patience, PID, RANK, WORLD)
            token = row - tl.num_programs(0)
            own = tl.load(mine + token * SIZE + at, mask=inside, other=0.0)
            total = root(own, parts[RANK], turn - 1, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
            total = biased(total, addend, at, inside, SIZE, residual.dtype.element_ty)
            finish_row(
                total, scales, residual, bias, out, static, codes, row_scales, token, at, share, eps, KIND, SCALES,
                SIZE, WIDTH,
            )  # fmt: skip
        if step < count:
            send(mine + row * SIZE, parts, turn, 0, SIZE, PID, EACH, RANK, WORLD, WIDTH, STRIDE, PROGRAMS)
            raise_flags(flags, turn + 1, PID, RANK, WORLD)
    tl.store(epochs + PID, epoch + count)


@triton.jit(do_not_specialize=["rows"])
def _share_and_norm(
    mine, addend, residual, weight, bias, out, static, codes, row_scales, parts, results, flags, epochs, silent, rows,
    patience, share, eps, KIND: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr, PROGRAMS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Do what :func:`_sum_and_norm` does; rank r adds the rows r, r + WORLD and so on.

    Step j of a program sends the sums of its group j of WORLD rows, adds its row of group j - 1 and sends the result,
    and takes the results of group j - 2.
    """
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    scales = tl.load(weight + at, mask=inside, other=0.0)
    begin(overlap)
    PID = tl.program_id(0)
    dtype: tl.constexpr = residual.dtype.element_ty
    count = tl.cdiv(tl.cdiv(rows, WORLD) - PID, tl.num_programs(0))
    epoch = tl.load(epochs + PID)
    for step in range(count + 2):
        turn = epoch + step
        first = (PID + step * tl.num_programs(0)).to(tl.int64) * WORLD
        before, long_ago = first - tl.num_programs(0) * WORLD, first - 2 * tl.num_programs(0) * WORLD
        if step > 0:
            wait(flags, silent, turn, patience, PID, RANK, WORLD)
        if step > 1:
            for rank in tl.static_range(WORLD):
                if rank != RANK:  # noqa: SIM102 - one is known to the compiler
                    if long_ago + rank < rows:
                        place = slot(results[RANK], turn - 2, rank, PID, STRIDE, WORLD, PROGRAMS)
                        total = tl.load(place + at, mask=inside, other=0.0, cache_modifier=".cg")
                        finish_row(
                            total, scales, residual, bias, out, static, codes, row_scales, long_ago + rank, at, share,
                            eps, KIND, SCALES, SIZE, WIDTH,
                        )  # fmt: skip
        if (step > 0) & (step <= count) & (before + RANK < rows):
            own = tl.load(mine + (before + RANK) * SIZE + at, mask=inside, other=0.0)
            total = root(own, parts[RANK], turn - 1, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
            total = biased(total, addend, at, inside, SIZE, dtype)
            for rank in tl.static_range(WORLD):
                if rank != RANK:
                    tl.store(slot(results[rank], turn - 1, RANK, PID, STRIDE, WORLD, PROGRAMS) + at, total, mask=inside)
            finish_row(
                total, scales, residual, bias, out, static, codes, row_scales, before + RANK, at, share, eps, KIND,
                SCALES, SIZE, WIDTH,
            )  # fmt: skip
        if step < count:
            for rank in tl.static_range(WORLD):
                if rank != RANK:
                    there = inside & (first + rank < rows)
                    given = tl.load(mine + (first + rank) * SIZE + at, mask=there, other=0.0)
                    tl.store(slot(parts[rank], turn, RANK, PID, STRIDE, WORLD, PROGRAMS) + at, given, mask=there)
        if step <= count:
            raise_flags(flags, turn + 1, PID, RANK, WORLD)
    tl.store(epochs + PID, epoch + count + 1)


def sum_and_norm(
    room: Room, mine: Tensor, addend: Tensor | None, norm: CudaNorm, residual: Tensor, how: QuantizedInput | None,
    programs: int | None = None, *, shares: bool = False,
) -> Tensor | QuantizedRows:  # fmt: skip
    """Add all ranks' ``mine``, fp32 [rows, size], and ``addend`` [size] to ``residual``; return the norm.

    The norm has the form of ``how``, the next layer's inputs. At most ``programs`` programs run. ``shares``: each rank
    adds a share of the rows, and the results of ``room`` have the dtype of the residual.
    """
    (rows, size), to = mine.shape, normed_rows(residual, how)
    out, codes, scales = places_in(to)
    stride = room.parts[0].numel() // (2 * room.world * room.programs)
    kernel = _share_and_norm if shares else _sum_and_norm
    kernel[(min(cdiv(rows, room.world if shares else 1), programs or room.programs),)](
        mine, addend, residual, norm.weight, norm.bias, out, None if how is None else how.static, codes, scales,
        room.parts, *([room.results] if shares else []), room.flags, room.epochs, room.silent, rows, room.patience,
        1.0 / size, norm.eps, KIND=norm.kind, SCALES=None if how is None else how.kind, SIZE=size, RANK=room.rank,
        WORLD=room.world, STRIDE=stride, PROGRAMS=room.programs, **layout(size),
    )  # fmt: skip
    return to
