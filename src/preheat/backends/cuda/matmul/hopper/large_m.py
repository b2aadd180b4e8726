"""Linear maps of many rows on Hopper, with the bits of the other kernels.

The contract is the contract of :mod:`preheat.backends.cuda.matmul.linear`; the rate is the rate of the matrix unit.

A persistent program has three parts that run at once. One warp loads tiles of x and of W into a ring in shared memory
(TMA). It also loads the first tiles for the next tile of y while this tile is finished. Two groups of four warps
multiply, each with half of the rows of a tile. While one group stores, the other uses the matrix unit. An output is
added up in one accumulator, the inputs in order, as in the other kernels, so the bits are the same.

A tile of W holds gates in its first half and the matching ups in its second half, or just consecutive outputs. One
thread then has both halves of a pair in its registers.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from preheat.backends.cuda.device.hopper import barriers, descriptor, is_hopper, ring
from preheat.backends.cuda.device.launch import begin, begin_early, begin_late, options, processors
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.matmul.config import LinearShape, Wide, fits_wide
from preheat.backends.cuda.matmul.hopper.lora_terms import adapters_of, add_adapters
from preheat.backends.cuda.matmul.lora.expand import Expansion
from preheat.backends.cuda.matmul.weights import PlainWeight
from preheat.backends.cuda.pointwise.elementwise import silu_mul

INPUTS = gl.constexpr(64)
"""Depth of a tile: 128-byte rows of shared memory."""

GROUP = gl.constexpr(2048)
"""Rows of x processed together, so that they and the weights being read stay in the L2 cache.

About as many rows of W meet them in the tiles computed at a time.
"""


@gluon.jit
def num_tiles(x, y, starts, EXPERTS: gl.constexpr, WIDTH: gl.constexpr):
    """Return the number of tiles of y; ``WIDTH`` are the columns of a tile."""
    down = gl.cdiv(x.shape[0], 2 * x.block_shape[0]) if starts is None else gl.load(starts + EXPERTS)
    return down * gl.cdiv(y.shape[1], WIDTH)


@gluon.jit
def tile_place(tile, x, y, experts, starts, WIDTH: gl.constexpr):
    """Return the first row and the first column of a tile of y, and the expert of its weights.

    Tiles follow each other down the rows of one expert, or of ``GROUP`` rows, then across.
    """
    ROWS: gl.constexpr = 2 * x.block_shape[0]
    across = gl.cdiv(y.shape[1], WIDTH)
    if starts is None:
        AT_ONCE: gl.constexpr = GROUP // ROWS
        expert = 0
        start = tile // (AT_ONCE * across) * AT_ONCE
        down = gl.minimum(gl.cdiv(x.shape[0], ROWS) - start, AT_ONCE)
    else:
        expert = gl.load(experts + tile // across)
        start = gl.load(starts + expert)
        down = gl.load(starts + expert + 1) - start
    inside = tile - start * across
    return (start + inside % down) * ROWS, inside // down * WIDTH, expert


@gluon.jit
def load_tiles(x, weight, y, experts, starts, xs, weights, full, empty, EXPERTS: gl.constexpr, WIDTH: gl.constexpr):
    """Keep the ring full; rows beyond x or W are zeros."""
    ROWS: gl.constexpr = x.block_shape[0]
    STAGES: gl.constexpr = weights.shape[0]
    HALVES: gl.constexpr = weight.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    at = 0
    for tile in range(gl.program_id(0), num_tiles(x, y, starts, EXPERTS, WIDTH), gl.num_programs(0)):
        row, first, expert = tile_place(tile, x, y, experts, starts, WIDTH)
        for k in range(0, x.shape[1], DEPTH):
            place, phase = ring(at, STAGES)
            mbarrier.wait(empty.index(place), phase ^ 1)
            ready = full.index(place)
            mbarrier.expect(ready, 2 * x.block_type.nbytes + weight.block_type.nbytes)
            tma.async_copy_global_to_shared(weight, [expert * HALVES, first, k], ready, weights.index(place))
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(x, [row + half * ROWS, k], ready, xs.index(place * 2 + half))
            at += 1


@gluon.jit
def rounded_outputs(acc, bias, first, last, dtype: gl.constexpr):
    """Return ``acc`` plus bias in the output dtype.

    ``first`` is the first output. Outputs after the ``last`` have no meaning.
    """
    if bias is not None:
        out = gl.minimum(first + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)), last)
        acc += gl.load(bias + out).to(gl.float32)[None, :]
    return acc.to(dtype)


@gluon.jit
def store_tile(y, row, first, result, memory):
    """Write the part of a tile inside y.

    The tile passes through shared memory, after the previous tile has left the memory.
    """
    tma.store_wait(0)
    tl.debug_barrier()
    memory.store(result)
    fence_async_shared()
    tl.debug_barrier()
    tma.async_copy_shared_to_global(y, [row, first], memory)


@gluon.jit
def _multiply(
    half: gl.constexpr, x, y, bias, experts, starts, adapters, slots, xs, weights, memory, full, empty,
    gated: gl.constexpr, EXPERTS: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr, WORLD: gl.constexpr,
    PARTS: gl.constexpr, SPLITS: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Multiply one half of the rows of each tile of y; the sums of both ``SPLITS`` of the inputs are added."""
    ROWS: gl.constexpr = x.block_shape[0]
    STAGES: gl.constexpr = weights.shape[0]
    OUTPUTS: gl.constexpr = weights.shape[1] * weights.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, OUTPUTS, 16])
    memory = memory.index(half)
    rows, columns = x.shape[0], y.shape[1]
    at = 0
    for tile in range(gl.program_id(0), num_tiles(x, y, starts, EXPERTS, WIDTH), gl.num_programs(0)):
        row, first, _ = tile_place(tile, x, y, experts, starts, WIDTH)
        row += half * ROWS
        other = columns if gated else OUTPUTS // 2
        if adapters is not None:
            height = 2 * columns if gated else columns
            given = adapters_of(row, rows, first, first + other, adapters, height, ROWS, OUTPUTS // 2, TILES, PARTS)
        total = gl.zeros([ROWS, OUTPUTS], gl.float32, SUMS)
        for split in gl.static_range(SPLITS):
            acc = gl.zeros([ROWS, OUTPUTS], gl.float32, SUMS)
            before = 0
            for k in range(0, x.shape[1] // SPLITS, INPUTS):
                place, phase = ring(at, STAGES)
                mbarrier.wait(full.index(place), phase)
                w = weights.index(place).reshape([OUTPUTS, INPUTS]).permute([1, 0])
                acc = warpgroup_mma(xs.index(place * 2 + half), w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, [acc])
                mbarrier.arrive(empty.index(before), pred=k > 0)
                before = place
                at += 1
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(empty.index(before))
            total = acc if split == 0 else total + acc

        left, right = total.reshape([ROWS, 2, OUTPUTS // 2]).permute([0, 2, 1]).split()
        left = rounded_outputs(left, bias, first, columns - 1, y.dtype)
        right = rounded_outputs(right, bias, first + other, (2 if gated else 1) * columns - 1, y.dtype)
        if adapters is not None:
            begin_late(overlap)
            left, right = add_adapters(
                left, right, first, first + other, given, adapters, slots, height, TILES, WORLD, PARTS
            )
        if gated:
            store_tile(y, row, first, silu_mul(left, right), memory)
        else:
            store_tile(y, row, first, left, memory)
            store_tile(y, row, first + OUTPUTS // 2, right, memory)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["slots"])
def _wide(
    x, weight, y, bias, experts, starts, adapters, slots, gated: gl.constexpr, EXPERTS: gl.constexpr,
    STAGES: gl.constexpr, overlap: gl.constexpr, TILES: gl.constexpr = 0, WORLD: gl.constexpr = 1,
    PARTS: gl.constexpr = 1, SPLITS: gl.constexpr = 1,
):  # fmt: skip
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES] + x.block_shape, x.layout)  # noqa: RUF005
    weights = gl.allocate_shared_memory(x.dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    memory = gl.allocate_shared_memory(y.dtype, [2] + y.block_shape, y.layout)  # noqa: RUF005
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    WIDTH: gl.constexpr = y.block_shape[1] if gated else 2 * y.block_shape[1]
    if adapters is None:
        begin(overlap)
    else:
        begin_early(overlap)
    gl.warp_specialize(
        [
            (_multiply, (
                0, x, y, bias, experts, starts, adapters, slots, xs, weights, memory, full, empty, gated, EXPERTS,
                WIDTH, TILES, WORLD, PARTS, SPLITS, overlap,
            )),
            (_multiply, (
                1, x, y, bias, experts, starts, adapters, slots, xs, weights, memory, full, empty, gated, EXPERTS,
                WIDTH, TILES, WORLD, PARTS, SPLITS, overlap,
            )),
            (load_tiles, (x, weight, y, experts, starts, xs, weights, full, empty, EXPERTS, WIDTH)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def fits(shape: LinearShape) -> bool:
    """Return whether this kernel supports a map, on this device."""
    return is_hopper() and fits_wide(shape)


def wide(
    choice: Wide, x: Tensor, weight: PlainWeight, bias: Tensor | None, gated: bool, y: Tensor,
    experts: Tensor | None = None, starts: Tensor | None = None, adapters: Expansion | None = None,
) -> None:  # fmt: skip
    """Compute ``y`` [rows, columns] from ``x`` [rows, inputs], where :func:`fits`; all contiguous.

    The inputs are cut into 1 or 2 splits of whole steps; y may be fp32.

    With ``experts`` and ``starts`` of an arrangement in blocks of ``choice.rows``
    (:mod:`preheat.backends.cuda.matmul.moe.experts`), ``weight`` [experts, outputs, inputs] has the weights of each
    block. The grid has at most one program for each multiprocessor. ``adapters``: see
    :func:`preheat.backends.cuda.matmul.linear.apply`; their second matrices are of bfloat16.
    """
    num_experts, outputs, inputs = weight.shape if len(weight.shape) == 3 else (1, *weight.shape)
    halves, group = 2 if gated else 1, choice.rows // 2
    weights = weight.tensor.view(num_experts * halves, -1, inputs)
    tiles = cdiv(len(x), choice.rows) * cdiv(outputs, choice.outputs)
    _wide[(min(tiles, processors(x.device)),)](
        descriptor(x, group, INPUTS.value),
        descriptor(weights, halves, choice.outputs // halves, INPUTS.value),
        descriptor(y, group, choice.outputs // 2),
        bias,
        experts,
        starts,
        adapters,
        adapters.shrunk.shape[3] if adapters else 0,
        gated=gated,
        EXPERTS=num_experts,
        STAGES=choice.stages,
        SPLITS=weight.splits,
        **(adapters.constants if adapters else {}),
        **options(num_warps=4, num_stages=1, maxnreg=168),
    )
