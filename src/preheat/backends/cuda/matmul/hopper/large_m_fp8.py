"""Linear layers of many rows in float8 on Hopper.

The contract is in :mod:`preheat.backends.cuda.matmul.weights`, the program is like the one of
:mod:`preheat.backends.cuda.matmul.hopper.large_m`. The matrix unit sums 128 products from zero, and the sum is added to
the accumulator in fp32. Both take registers, so each half of a tile's outputs is multiplied and added in turn. While
one group of warps adds, the other one uses the matrix unit.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from preheat.backends.cuda.device.hopper import barriers, descriptor, ring
from preheat.backends.cuda.device.launch import begin, options, processors
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.matmul.config import Wide
from preheat.backends.cuda.matmul.hopper.large_m import load_tiles, num_tiles, rounded_outputs, store_tile, tile_place
from preheat.backends.cuda.matmul.weights import STEP, DeviceWeight
from preheat.backends.cuda.pointwise.elementwise import silu_mul
from preheat.ops.quantization import QuantizedRows

ROWS = gl.constexpr(64)
"""Rows of a group of warps; there are two groups."""


@gluon.jit
def _scaled(acc, x_scales, scales, row, rows, first, last):
    """Scale sums of the outputs from ``first`` on.

    Numbers beyond the output ``last`` and beyond ``rows`` are undefined.
    """
    token = gl.minimum(row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout)), rows - 1)
    out = gl.minimum(first + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)), last)
    acc *= gl.load(x_scales + token)[:, None]
    acc *= gl.load(scales + out)[None, :]
    return acc


@gluon.jit
def _multiply(
    half: gl.constexpr, x, y, x_scales, scales, bias, xs, weights, memory, full, empty, gated: gl.constexpr,
    WIDTH: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Multiply one half of the rows of each tile of y; the sums of both ``SPLITS`` of the inputs are added."""
    STAGES: gl.constexpr = weights.shape[0]
    OUTPUTS: gl.constexpr = weights.shape[1] * weights.shape[2]
    SIDE: gl.constexpr = OUTPUTS // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIDE, 32])
    memory = memory.index(half)
    rows, columns = x.shape[0], y.shape[1]
    nothing = gl.zeros([ROWS, SIDE], gl.float32, SUMS)
    at = 0
    for tile in range(gl.program_id(0), num_tiles(x, y, None, 1, WIDTH), gl.num_programs(0)):
        row, first, _ = tile_place(tile, x, y, None, None, WIDTH)
        row += half * ROWS
        other = columns + first if gated else first + SIDE
        last = (2 if gated else 1) * columns - 1
        left_total, right_total = nothing, nothing
        for split in gl.static_range(SPLITS):
            left = gl.zeros([ROWS, SIDE], gl.float32, SUMS)
            right = gl.zeros([ROWS, SIDE], gl.float32, SUMS)
            for _ in range(0, x.shape[1] // SPLITS, STEP):
                place, phase = ring(at, STAGES)
                mbarrier.wait(full.index(place), phase)
                numbers = xs.index(place * 2 + half)
                w = weights.index(place).reshape([OUTPUTS, STEP])
                part = warpgroup_mma(
                    numbers, w.slice(0, SIDE).permute([1, 0]), nothing, use_acc=False, is_async=True
                )  # fmt: skip
                left += warpgroup_mma_wait(0, [part])
                part = warpgroup_mma(
                    numbers, w.slice(SIDE, SIDE).permute([1, 0]), nothing, use_acc=False, is_async=True
                )  # fmt: skip
                part = warpgroup_mma_wait(0, [part])
                mbarrier.arrive(empty.index(place))
                right += part
                at += 1
            left = _scaled(left, x_scales, scales, row, rows, first, columns - 1)
            right = _scaled(right, x_scales, scales, row, rows, other, last)
            left_total = left if split == 0 else left_total + left
            right_total = right if split == 0 else right_total + right
        left = rounded_outputs(left_total, bias, first, columns - 1, y.dtype)
        right = rounded_outputs(right_total, bias, other, last, y.dtype)
        if gated:
            store_tile(y, row, first, silu_mul(left, right), memory)
        else:
            store_tile(y, row, first, left, memory)
            store_tile(y, row, first + SIDE, right, memory)
    tma.store_wait(0)


@gluon.jit
def _wide(
    x, weight, y, x_scales, scales, bias, gated: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES] + x.block_shape, x.layout)  # noqa: RUF005
    weights = gl.allocate_shared_memory(x.dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    memory = gl.allocate_shared_memory(y.dtype, [2] + y.block_shape, y.layout)  # noqa: RUF005
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    WIDTH: gl.constexpr = y.block_shape[1] if gated else 2 * y.block_shape[1]
    begin(overlap)
    gl.warp_specialize(
        [
            (_multiply, (0, x, y, x_scales, scales, bias, xs, weights, memory, full, empty, gated, WIDTH, SPLITS)),
            (_multiply, (1, x, y, x_scales, scales, bias, xs, weights, memory, full, empty, gated, WIDTH, SPLITS)),
            (load_tiles, (x, weight, y, None, None, xs, weights, full, empty, 1, WIDTH)),
        ],
        [4, 1],
        [240, 24],
    )


def wide_fp8(choice: Wide, x: QuantizedRows, weight: DeviceWeight, bias: Tensor | None, gated: bool, y: Tensor) -> None:
    """Write ``y`` [rows, columns] for ``x`` [rows, inputs] on Hopper; all are contiguous.

    Only for layers that :func:`preheat.backends.cuda.matmul.config.wide_float8` accepts. Tiles have 128 rows. The
    inputs are cut into 1 or 2 splits of whole steps; y may be fp32. The grid has at most one program for each
    multiprocessor.
    """
    outputs, inputs = weight.shape
    halves = 2 if gated else 1
    tiles = cdiv(len(x), 2 * ROWS.value) * cdiv(outputs, choice.outputs)
    _wide[(min(tiles, processors(y.device)),)](
        descriptor(x.codes, ROWS.value, STEP.value),
        descriptor(weight.codes.view(halves, -1, inputs), halves, choice.outputs // halves, STEP.value),
        descriptor(y, ROWS.value, choice.outputs // 2),
        x.scales,
        weight.scales,
        bias,
        gated=gated,
        STAGES=choice.stages,
        SPLITS=weight.splits,
        enable_fp_fusion=False,
        **options(num_warps=4, num_stages=1, maxnreg=168),
    )
