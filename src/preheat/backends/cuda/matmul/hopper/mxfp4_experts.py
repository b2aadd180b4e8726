"""Experts with weights in MXFP4 on Hopper, by programs that stream codes while they multiply.

The contract is that of :mod:`preheat.backends.cuda.matmul.gemm`: codes become bfloat16, and each output is a sum over
the inputs, in order. One warp loads codes, scales and rows into a ring in shared memory (TMA), for the next tile, too.
Four warps, or two groups of four, make numbers of codes in the registers that the matrix unit reads. A group has two
times 64 outputs of a tile: gates and their ups, or outputs of both halves. While the unit multiplies the first 64, the
group makes the numbers of the others.

Programs take tiles in turn, tiles with more rows first. Two programs of one group share a multiprocessor: one makes
numbers while the other multiplies. Two groups share the rows of x, which counts where rows are many. Few rows of an
expert fill half a tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from preheat.backends.cuda.device.hopper import barriers, descriptor, ring
from preheat.backends.cuda.device.launch import begin_early, begin_late, options, processors
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.matmul.config import Tile
from preheat.backends.cuda.matmul.gemm import Gated, gates
from preheat.backends.cuda.matmul.mxfp4 import E2M1
from preheat.backends.cuda.matmul.weights import STEP, DeviceWeight
from preheat.backends.cuda.pointwise.elementwise import combined

if TYPE_CHECKING:
    from preheat.backends.cuda.matmul.moe.route import Arrangement

HALF = gl.constexpr(64)
"""Inputs of half a step: of a piece of rows, and bytes of a step's codes."""

OUTPUTS = gl.constexpr(64)
"""Outputs of an instruction of the matrix unit."""

CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
"""Layout of the codes of 64 outputs: a lane has sixteen neighbors of two outputs, as the matrix unit wants them."""

WORDS = gl.constexpr(
    gl.DistributedLinearLayout([[1, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[2, 0], [4, 0]], [], [8, 8])
)
"""Layout of the words of scales of 64 outputs, by eights: a lane has the words of its two outputs."""


@gluon.jit
def _place(tile, groups, across, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Return the expert of a tile, its first output and row, and the number of the expert's rows from there on.

    Tiles of one expert follow each other, first the tiles with the same weights.
    """
    experts, starts, counts = groups
    expert = gl.load(experts + tile // across)
    start, rows = gl.load(starts + expert), gl.load(counts + expert)
    blocks, inside = gl.cdiv(rows, ROWS), tile - start * across
    below = inside % blocks * ROWS
    return expert, inside // blocks * WIDTH, start * ROWS + below, rows - below


@gluon.jit
def _turns(tiles):
    """Return the number of tiles that a program takes."""
    programs = gl.num_programs(0)
    whole = tiles // programs
    return whole + (_taken(whole) < tiles).to(gl.int32)


@gluon.jit
def _taken(turn):
    """Return the tile that a program takes in a ``turn``.

    Tiles with more rows come first, and each second turn goes backwards: no program has the larger tile of every turn.
    """
    programs, program = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _load(
    x, x_half, codes, scales, groups, sizes, rings, EXPERTS: gl.constexpr, gated: gl.constexpr, overlap: gl.constexpr
):  # fmt: skip
    """Keep the ring full; rows and outputs beyond the last ones are zeros."""
    xs, x_halves, ws, ss, full, empty = rings
    STAGES: gl.constexpr = xs.shape[0]
    GROUPS: gl.constexpr = ws.shape[0] // STAGES
    WIDTH: gl.constexpr = GROUPS * OUTPUTS
    ROWS: gl.constexpr = x.block_shape[1]
    WEIGHT_BYTES: gl.constexpr = GROUPS * (codes.block_type.nbytes + scales.block_type.nbytes)
    begin_late(overlap)
    columns, steps = sizes
    across = gl.cdiv(columns, WIDTH if gated else 2 * WIDTH)
    at = 0
    for turn in range(_turns(gl.load(groups[1] + EXPERTS) * across)):
        expert, first, row, rows = _place(_taken(turn), groups, across, ROWS, WIDTH)
        few = rows <= ROWS // 2
        for step in range(steps):
            place, phase = ring(at, STAGES)
            mbarrier.wait(empty.index(place), phase ^ 1)
            ready = full.index(place)
            piece = (expert * steps + step) * 2
            if few:
                mbarrier.expect(ready, WEIGHT_BYTES + x_half.block_type.nbytes)
                tma.async_copy_global_to_shared(x_half, [2 * step, row, 0], ready, x_halves.index(2 * place))
            else:
                mbarrier.expect(ready, WEIGHT_BYTES + x.block_type.nbytes)
                tma.async_copy_global_to_shared(x, [2 * step, row, 0], ready, xs.index(place))
            for group in gl.static_range(GROUPS):
                out, to = first + group * OUTPUTS, place * GROUPS + group
                tma.async_copy_global_to_shared(codes, [piece, out, 0], ready, ws.index(to))
                tma.async_copy_global_to_shared(scales, [piece, out // 8, 0], ready, ss.index(to))
            at += 1


@gluon.jit
def _factor(words, number: gl.constexpr, LARGE: gl.constexpr):
    """Return the factor of group ``number`` of a step, bfloat16, from ``words`` of four exponents."""
    bits = (words << 7 if number == 0 else words >> (8 * number - 7)) & 0x7F80
    if LARGE:
        bits = gl.maximum(bits, 0x40)  # 2**-127 is below the least normal number
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _operand(codes, words, HIGH: gl.constexpr, LARGE: gl.constexpr, SUMS: gl.constexpr):
    """Return half a step's weights [64, 64], the second with ``HIGH``, from their codes and words of scales."""
    FIRST: gl.constexpr = 2 if HIGH else 0
    second = (gl.arange(0, HALF, gl.SliceLayout(0, CODES)) // 8 % 2 == 1)[None, :]  # bytes of the second group
    scale = gl.where(second, _factor(words, FIRST + 1, LARGE)[:, None], _factor(words, FIRST, LARGE)[:, None])
    numbers = gl.inline_asm_elementwise(
        E2M1[FIRST + (1 if LARGE else 0)], "=&r,=&r,r,r,r", [codes, scale], dtype=gl.bfloat16, is_pure=True, pack=4
    )
    numbers = numbers.reshape([OUTPUTS, 4, 4, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([OUTPUTS, HALF])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _read(codes, scales, first: gl.constexpr):
    """Read the codes of a step and their words of scales, of 64 outputs from ``first`` on."""
    words = scales.slice(first // 8, OUTPUTS // 8).load(WORDS).reshape([OUTPUTS])
    return codes.slice(first, OUTPUTS).load(CODES), gl.convert_layout(
        words, gl.SliceLayout(1, CODES), assert_trivial=True
    )


@gluon.jit
def _added(acc, weights, rows, LARGE: gl.constexpr, SUMS: gl.constexpr):
    """Add to ``acc`` the products of a step's weights and rows, in order; do not wait."""
    ROWS: gl.constexpr = acc.shape[1]
    low = _operand(weights[0], weights[1], False, LARGE, SUMS)
    acc = warpgroup_mma(low, rows.slice(0, ROWS).permute([1, 0]), acc, is_async=True)
    high = _operand(weights[0], weights[1], True, LARGE, SUMS)
    return warpgroup_mma(high, rows.slice(ROWS, ROWS).permute([1, 0]), acc, is_async=True)


@gluon.jit
def _rounded(acc, bias, out, last, y):
    """Return the outputs from ``out`` on, rounded, with their ``bias``; outputs after the ``last`` have no meaning."""
    if bias is not None:
        at = gl.minimum(out + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout)), last)
        acc += gl.load(bias + at).to(gl.float32)[:, None]
    return acc.to(y.dtype.element_ty)


@gluon.jit
def _write(result, y, out, outputs, row, rows, columns):
    """Write ``result`` [outputs, rows] to y where outputs are below ``outputs`` and rows below an expert's ``rows``."""
    LAYOUT: gl.constexpr = result.type.layout
    outs = out + gl.arange(0, result.shape[0], gl.SliceLayout(1, LAYOUT))
    lanes = gl.arange(0, result.shape[1], gl.SliceLayout(0, LAYOUT))
    at = y + (row + lanes).to(gl.int64)[None, :] * columns + outs[:, None]
    gl.store(at, result, mask=(outs < outputs)[:, None] & (lanes < rows)[None, :])


@gluon.jit
def _sums(
    group: gl.constexpr, at, rings, steps, HALVED: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    """Return the sums of both times 64 outputs that a ``group`` of warps has; with ``HALVED`` of half as many rows."""
    xs, x_halves, ws, ss, full, empty = rings
    STAGES: gl.constexpr = xs.shape[0]
    GROUPS: gl.constexpr = ws.shape[0] // STAGES
    ROWS: gl.constexpr = x_halves.shape[2] if HALVED else xs.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    # With several groups the assembler lets no product run from one step into the next.
    AHEAD: gl.constexpr = GROUPS == 1
    one = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    two = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    gl.assume(steps > 0)  # or the assembler waits for every product
    for step in range(steps):
        place, phase = ring(at + step, STAGES)
        mbarrier.wait(full.index(place), phase)
        piece = place * GROUPS + group
        codes, scales = ws.index(piece).reshape([2 * OUTPUTS, HALF]), ss.index(piece).reshape([OUTPUTS // 4, 8])
        x = (x_halves.index(2 * place) if HALVED else xs.index(place)).reshape([2 * ROWS, HALF])
        weights, others = _read(codes, scales, 0), _read(codes, scales, OUTPUTS)
        one = _added(one, weights, x, LARGE, SUMS)
        if AHEAD:
            one, two = warpgroup_mma_wait(2, [one, two])
            mbarrier.arrive(empty.index((at + step + STAGES - 1) % STAGES), pred=step > 0)
        two = _added(two, others, x, LARGE, SUMS)
        one, two = warpgroup_mma_wait(2 if AHEAD else 0, [one, two])
        if not AHEAD:
            mbarrier.arrive(empty.index(place))
    if AHEAD:
        one, two = warpgroup_mma_wait(0, [one, two])
        mbarrier.arrive(empty.index((at + steps - 1) % STAGES))
    return one, two


@gluon.jit
def _tile(
    group: gl.constexpr, y, bias, where, at, rings, sizes, HALVED: gl.constexpr, gated: gl.constexpr,
    ACTIVATION: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    """Compute the outputs of a tile that a ``group`` of warps has; with ``HALVED`` of half as many rows."""
    expert, first, row, rows = where
    columns, steps = sizes
    one, two = _sums(group, at, rings, steps, HALVED, LARGE)
    out, half = first + group * OUTPUTS, columns if gated else columns // 2
    if bias is not None:
        bias += expert * (2 * half)
    left, right = _rounded(one, bias, out, half - 1, y), _rounded(two, bias, half + out, 2 * half - 1, y)
    if gated:
        _write(combined(left, right, ACTIVATION), y, out, half, row, rows, columns)
    else:
        _write(left, y, out, half, row, rows, columns)
        _write(right, y + half, out, half, row, rows, columns)


@gluon.jit
def _multiply(
    group: gl.constexpr, y, bias, groups, sizes, rings, EXPERTS: gl.constexpr, gated: gl.constexpr,
    ACTIVATION: gl.constexpr, LARGE: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Multiply the outputs of every tile that a ``group`` of warps has."""
    ROWS: gl.constexpr = rings[0].shape[2]
    WIDTH: gl.constexpr = rings[2].shape[0] // rings[0].shape[0] * OUTPUTS
    begin_late(overlap)
    columns, steps = sizes
    across = gl.cdiv(columns, WIDTH if gated else 2 * WIDTH)
    at = 0
    for turn in range(_turns(gl.load(groups[1] + EXPERTS) * across)):
        where = _place(_taken(turn), groups, across, ROWS, WIDTH)
        if where[3] <= ROWS // 2:
            _tile(group, y, bias, where, at, rings, sizes, True, gated, ACTIVATION, LARGE)
        else:
            _tile(group, y, bias, where, at, rings, sizes, False, gated, ACTIVATION, LARGE)
        at += steps


@gluon.jit
def _room(tensor, STAGES: gl.constexpr):
    """Allocate room for ``STAGES`` pieces of a tensor that the copy engine reads."""
    return gl.allocate_shared_memory(tensor.dtype, [STAGES] + tensor.block_shape, tensor.layout)  # noqa: RUF005


@gluon.jit(do_not_specialize=["steps"])
def experts_streamed(
    x, x_half, codes, scales, bias, y, experts, starts, counts, columns, steps, EXPERTS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, gated: gl.constexpr, ACTIVATION: gl.constexpr, LARGE: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    """Compute every n-th tile of y, see the module; ``x_half`` is x in pieces of half as many rows."""
    xs = _room(x, STAGES)
    x_halves = xs._reinterpret(x.dtype, [2 * STAGES] + x_half.block_shape, x_half.layout)  # noqa: RUF005
    ws, ss = _room(codes, GROUPS * STAGES), _room(scales, GROUPS * STAGES)
    rings = (xs, x_halves, ws, ss, barriers(STAGES, 1), barriers(STAGES, GROUPS))
    groups, sizes = (experts, starts, counts), (columns, steps)
    begin_early(overlap)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, y, bias, groups, sizes, rings, EXPERTS, gated, ACTIVATION, LARGE, overlap)),
                (_load, (x, x_half, codes, scales, groups, sizes, rings, EXPERTS, gated, overlap)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, y, bias, groups, sizes, rings, EXPERTS, gated, ACTIVATION, LARGE, overlap)),
                (_multiply, (1, y, bias, groups, sizes, rings, EXPERTS, gated, ACTIVATION, LARGE, overlap)),
                (_load, (x, x_half, codes, scales, groups, sizes, rings, EXPERTS, gated, overlap)),
            ],
            [4, 1],
            [240, 24],
        )


def multiply_streamed(
    tile: Tile, x: Tensor, weight: DeviceWeight, arrangement: Arrangement, y: Tensor, *, gated: Gated,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """Write to ``y`` [arranged rows, columns] the outputs of one layer of all experts.

    ``x`` is [arranged rows, inputs], ``tile.rows`` the block of the arrangement. Each four of ``tile.warps`` are a
    group. See :func:`preheat.backends.cuda.matmul.gemm.multiply_experts`.
    """
    count, outputs, inputs = weight.shape
    columns, groups = y.shape[1], tile.warps // 4
    steps = cdiv(inputs, STEP.value)
    rows = x.view(len(x), -1, HALF.value).transpose(0, 1)
    scales = weight.scales.view(torch.int32)
    tiles = len(arrangement.experts) * cdiv(columns, groups * OUTPUTS.value * (1 if gated else 2))
    experts_streamed[(min(tiles, processors(x.device) * (2 if groups == 1 else 1)),)](
        descriptor(rows, 2, tile.rows, HALF.value),
        descriptor(rows, 2, tile.rows // 2, HALF.value),
        descriptor(weight.codes.view(-1, outputs // 2, HALF.value), 2, OUTPUTS.value, HALF.value),
        descriptor(scales.view(-1, outputs // 16, 8), 2, OUTPUTS.value // 8, 8),
        bias, y, arrangement.experts, arrangement.starts, arrangement.rows_of_experts, columns, steps,
        EXPERTS=count, GROUPS=groups, STAGES=tile.stages, LARGE=weight.large_scales, **gates(gated),
        **options(num_warps=4, num_stages=1, maxnreg=168 if groups == 2 else 128),
    )  # fmt: skip
