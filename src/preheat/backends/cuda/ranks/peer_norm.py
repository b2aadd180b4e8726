"""The sum over ranks, the residual addition and the norm behind a row-parallel layer, in one launch.

Bits are those of :mod:`preheat.backends.cuda.ranks.peer_kernels` and of :mod:`preheat.backends.cuda.pointwise.norm` one
after the other: the sum is rounded to the model's dtype before it is added to the residual. A program sends a row to
all other ranks and finishes the row itself, so every rank has all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.pointwise.norm import CudaNorm, QuantizedInput, finish_row, layout, normed_rows, places_in
from preheat.backends.cuda.ranks.collective import Room
from preheat.backends.cuda.ranks.peer_kernels import EACH, biased, raise_flags, root, send, wait
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


def sum_and_norm(
    room: Room, mine: Tensor, addend: Tensor | None, norm: CudaNorm, residual: Tensor, how: QuantizedInput | None,
    programs: int | None = None,
) -> Tensor | QuantizedRows:  # fmt: skip
    """Add all ranks' ``mine``, fp32 [rows, size], and ``addend`` [size] to ``residual``; return the norm.

    The norm has the form of ``how``, the next layer's inputs. At most ``programs`` programs run.
    """
    (rows, size), to = mine.shape, normed_rows(residual, how)
    out, codes, scales = places_in(to)
    stride = room.parts[0].numel() // (2 * room.world * room.programs)
    _sum_and_norm[(min(rows, programs or room.programs),)](
        mine, addend, residual, norm.weight, norm.bias, out, None if how is None else how.static, codes, scales,
        room.parts, room.flags, room.epochs, room.silent, rows, room.patience, 1.0 / size, norm.eps, KIND=norm.kind,
        SCALES=None if how is None else how.kind, SIZE=size, RANK=room.rank, WORLD=room.world, STRIDE=stride,
        PROGRAMS=room.programs, **layout(size),
    )  # fmt: skip
    return to
