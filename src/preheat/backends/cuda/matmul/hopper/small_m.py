"""Quantized linear layers of few rows on Hopper, by programs that stream their weights.

The contracts are in :mod:`preheat.backends.cuda.matmul.weights`. A program has 64 rows of the weight. One warp loads
their codes, and x, into a ring in shared memory (TMA); four warps multiply. Weights are asked for before the kernel
ahead has ended, since no kernel writes them; x is waited for. Of a gated layer the 64 rows are 32 gates and their ups,
in turns of eight: one thread then has both of a pair.

Codes of four bits become bfloat16, two at a time, in the registers that the matrix unit reads. A code with its sign bit
turned over, behind the exponent of 128, is the number 136 plus the code. The number 136 plus the zero point is
subtracted, and the difference is exact. If a scale is a number of bfloat16, the product with it is rounded once, as in
fp32. A scale of float16 is the sum of two numbers of bfloat16, the smaller of three bits: its product is exact and is
added in the same rounding.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from preheat.backends.cuda.device.hopper import barriers, descriptor, ring
from preheat.backends.cuda.device.launch import begin_early, begin_late, options
from preheat.backends.cuda.device.sizes import cdiv
from preheat.backends.cuda.matmul.config import Tile
from preheat.backends.cuda.matmul.weights import STEP, DeviceWeight
from preheat.backends.cuda.pointwise.elementwise import silu_mul
from preheat.ops.quantization import QuantizedRows

OUTPUTS = gl.constexpr(64)
"""Rows of the weight that a program has: as many as an instruction multiplies."""

DEPTH = gl.constexpr(256)
"""Inputs of a stage of four-bit codes: two steps."""

CHUNK = gl.constexpr(64)
"""Inputs of x in a row of shared memory; also half a step, with codes of one group."""

ZERO = gl.constexpr(136.0)
"""The number for a code of zero behind the exponent of 128, with its sign bit turned over."""


def _conversion(bf16_scales: bool) -> str:
    """Return the assembly that converts eight codes in a word, less a zero point, times a scale.

    The bytes of a word have the codes of inputs 0, 8, 1, 9 (and 64 more) of a lane's chunk. Pairs of neighbors are
    registers of the result: 0 and 1, 8 and 9, 64 and 65, 72 and 73.
    """
    lines = ["{ .reg .b32 word, low;"]
    for pair, shift in enumerate((0, 8, 4, 12)):
        lines.append(f"shr.b32 word, $4, {shift};" if shift else "mov.b32 word, $4;")
        lines.append("lop3.b32 word, word, 0x000f000f, 0x43084308, 0x6a;")
        lines.append("sub.rn.bf16x2 word, word, $5;")
        if bf16_scales:
            lines.append(f"mul.rn.bf16x2 ${pair}, word, $7;")
        else:
            lines.append("mul.rn.bf16x2 low, word, $9;")
            lines.append(f"fma.rn.bf16x2 ${pair}, word, $7, low;")
    return " ".join([*lines, "}"])


WARP_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""Layout of sums for the fewest rows: each warp has its own instruction, with shorter chains of products."""

CONVERSION, BF16_CONVERSION = gl.constexpr(_conversion(False)), gl.constexpr(_conversion(True))


@gluon.jit
def _load_weights(
    step, codes, scales, zeros, ws, ss, zs, full, STAGES: gl.constexpr, GROUP: gl.constexpr, X_BYTES: gl.constexpr
):  # fmt: skip
    """Load the weights of one stage; its barrier also waits for x."""
    place = step % STAGES
    ready = full.index(place)
    first = gl.program_id(0) * 4
    count: gl.constexpr = X_BYTES + codes.block_type.nbytes
    if scales is None:
        mbarrier.expect(ready, count)
    else:
        group = step * DEPTH // GROUP if GROUP else 0
        if zeros is None:
            mbarrier.expect(ready, count + scales.block_type.nbytes)
        else:
            mbarrier.expect(ready, count + scales.block_type.nbytes + zeros.block_type.nbytes)
            tma.async_copy_global_to_shared(zeros, [group, first, 0, 0], ready, zs.index(place))
        tma.async_copy_global_to_shared(scales, [group, first, 0, 0], ready, ss.index(place))
    tma.async_copy_global_to_shared(codes, [first, 0, 0, step * codes.block_shape[3]], ready, ws.index(place))


@gluon.jit
def _load_inputs(step, x, xs, full, STAGES: gl.constexpr):
    """Load x of one stage."""
    place = step % STAGES
    chunk = step * x.block_shape[0]
    tma.async_copy_global_to_shared(
        x, [chunk, gl.program_id(1) * x.block_shape[1], 0], full.index(place), xs.index(place)
    )


@gluon.jit
def _load(
    x, codes, scales, zeros, xs, ws, ss, zs, full, empty, steps, STAGES: gl.constexpr, GROUP: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    """Keep the ring full.

    Zeros are loaded beyond the last row, output or input.
    """
    X_BYTES: gl.constexpr = x.block_type.nbytes
    ahead = gl.minimum(steps, STAGES)
    for step in range(ahead):
        _load_weights(step, codes, scales, zeros, ws, ss, zs, full, STAGES, GROUP, X_BYTES)
    begin_late(overlap)
    for step in range(ahead):
        _load_inputs(step, x, xs, full, STAGES)
    for step in range(ahead, steps):
        place, phase = ring(step, STAGES)
        mbarrier.wait(empty.index(place), phase ^ 1)
        _load_weights(step, codes, scales, zeros, ws, ss, zs, full, STAGES, GROUP, X_BYTES)
        _load_inputs(step, x, xs, full, STAGES)


@gluon.jit
def _store(acc, y, bias, rows, columns, gated: gl.constexpr):
    """Store the outputs of sums ``acc``, rounded, inside of y's rows and columns."""
    N: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = y.dtype.element_ty
    row = gl.program_id(1) * N
    if gated:
        gate, up = acc.reshape([4, 2, 8, N]).permute([0, 2, 3, 1]).split()
        first = gl.program_id(0) * (OUTPUTS // 2)
        gate = _rounded(gate.reshape([OUTPUTS // 2, N]), bias, first, columns - 1, dtype)
        up = _rounded(up.reshape([OUTPUTS // 2, N]), bias, columns + first, 2 * columns - 1, dtype)
        result = silu_mul(gate, up)
    else:
        first = gl.program_id(0) * OUTPUTS
        result = _rounded(acc, bias, first, columns - 1, dtype)
    LAYOUT: gl.constexpr = result.type.layout
    out = first + gl.arange(0, result.shape[0], gl.SliceLayout(1, LAYOUT))
    token = row + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    at = y + token.to(gl.int64)[None, :] * columns + out[:, None]
    gl.store(at, result, mask=(out < columns)[:, None] & (token < rows)[None, :])


@gluon.jit
def _rounded(acc, bias, first, last, dtype: gl.constexpr):
    """Round sums to outputs of the layer from ``first`` on.

    Outputs beyond the ``last`` are undefined.
    """
    if bias is not None:
        out = gl.minimum(first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout)), last)
        acc += gl.load(bias + out).to(gl.float32)[:, None]
    return acc.to(dtype)


@gluon.jit
def _scale_of(memory, part: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the scales or zero points, [64], of the ``part``-th step of a stage."""
    PART: gl.constexpr = part if memory.shape[0] > 1 else 0
    scales = memory.reshape([memory.shape[0] * OUTPUTS]).slice(PART * OUTPUTS, OUTPUTS)
    return scales.load(LAYOUT)


@gluon.jit
def _weights(codes, zeros, ss, zs, place, part: gl.constexpr, SUMS: gl.constexpr):
    """Convert ``codes`` [64, 64] of the ``part``-th step of a stage to operands of the matrix unit.

    Return the operands of the step's first and second 64 inputs.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, codes.type.layout)
    zero = gl.full([OUTPUTS], ZERO, gl.float32, LAYOUT)
    if zeros is not None:
        zero += _scale_of(zs.index(place), part, LAYOUT)
    zero = zero.to(gl.bfloat16)[:, None]
    scale = _scale_of(ss.index(place), part, LAYOUT)
    high = scale.to(gl.bfloat16)
    if ss.dtype == gl.bfloat16:
        first, second = gl.inline_asm_elementwise(
            BF16_CONVERSION, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, zero, high[:, None]],
            dtype=(high.dtype, high.dtype), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        rest = (scale - high.to(gl.float32)).to(gl.bfloat16)
        first, second = gl.inline_asm_elementwise(
            CONVERSION, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r", [codes, zero, high[:, None], rest[:, None]],
            dtype=(high.dtype, high.dtype), is_pure=True, pack=4,
        )  # fmt: skip
    return _operand(first, SUMS), _operand(second, SUMS)


@gluon.jit
def _operand(weights, SUMS: gl.constexpr):
    """Return ``weights`` as an operand [64, 64], in the order of their inputs."""
    weights = weights.reshape([OUTPUTS, 4, 4, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([OUTPUTS, CHUNK])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _product(acc, weights, xs, chunk: gl.constexpr, SUMS: gl.constexpr):
    """Add to ``acc`` the products of ``weights`` [64, 64] with inputs of a stage, in order.

    The inputs are the ``chunk``-th 64 of the stage.
    """
    N: gl.constexpr = xs.shape[1]
    inputs = xs.reshape([xs.shape[0] * N, CHUNK]).slice(chunk * N, N).permute([1, 0])
    if SUMS.version[0] == 2:
        acc = mma_v2(weights, inputs.load(gl.DotOperandLayout(1, SUMS, 2)), acc)
    else:
        acc = warpgroup_mma(weights, inputs, acc, is_async=True)
    return acc


@gluon.jit
def _multiply_codes(
    y, bias, zeros, xs, ws, ss, zs, full, empty, rows, columns, steps, gated: gl.constexpr
):  # fmt: skip
    """Multiply weights of four-bit codes.

    With many rows, one step is still being multiplied while weights of the next one are made.
    """
    STAGES: gl.constexpr = ws.shape[0]
    N: gl.constexpr = xs.shape[2]
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [8, 0, 0], [0, 0, 1]],
        [[0, 16, 0], [0, 32, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 64, 2],
    )
    MANY: gl.constexpr = N >= 32
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]) if MANY else WARP_SUMS
    acc = gl.zeros([OUTPUTS, N], gl.float32, SUMS)
    gl.assume(steps > 0)  # or the assembler waits for every product
    for step in range(steps):
        place, phase = ring(step, STAGES)
        mbarrier.wait(full.index(place), phase)
        both = ws.index(place).reshape([OUTPUTS, 2, STEP // 2]).permute([0, 2, 1]).load(CODES).split()
        for part in gl.static_range(2):
            first, second = _weights(both[part], zeros, ss, zs, place, part, SUMS)
            acc = _product(acc, first, xs.index(place), 2 * part, SUMS)
            acc = _product(acc, second, xs.index(place), 2 * part + 1, SUMS)
            if MANY:
                acc = warpgroup_mma_wait(2, [acc])
                if part == 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
        if not MANY:
            mbarrier.arrive(empty.index(place))
    if MANY:
        acc = warpgroup_mma_wait(0, [acc])
    _store(acc, y, bias, rows, columns, gated)


@gluon.jit
def _scaled(acc, x_scales, scales, rows, columns, gated: gl.constexpr):
    """Scale sums [64, rows] of float8 products."""
    LAYOUT: gl.constexpr = acc.type.layout
    token = gl.program_id(1) * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.arange(0, OUTPUTS, gl.SliceLayout(1, LAYOUT))
    if gated:
        out = gl.program_id(0) * (OUTPUTS // 2) + at // 16 * 8 + at % 8
        out = gl.minimum(out, columns - 1) + at // 8 % 2 * columns
    else:
        out = gl.minimum(gl.program_id(0) * OUTPUTS + at, columns - 1)
    acc *= gl.load(x_scales + gl.minimum(token, rows - 1))[None, :]
    acc *= gl.load(scales + out)[:, None]
    return acc


@gluon.jit
def _multiply_float8(
    y, x_scales, scales, bias, xs, ws, full, empty, rows, columns, steps, gated: gl.constexpr, SPLITS: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    """Multiply float8 numbers: sums of the matrix unit are added up in fp32.

    A split of the inputs has ``steps`` steps. The sums of both ``SPLITS`` are added.
    """
    STAGES: gl.constexpr = ws.shape[0]
    N: gl.constexpr = xs.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
    nothing = gl.zeros([OUTPUTS, N], gl.float32, SUMS)
    total = nothing
    for split in gl.static_range(SPLITS):
        acc = gl.zeros([OUTPUTS, N], gl.float32, SUMS)
        for step in range(split * steps, (split + 1) * steps):
            place, phase = ring(step, STAGES)
            mbarrier.wait(full.index(place), phase)
            inputs = xs.index(place).reshape([N, STEP]).permute([1, 0])
            part = warpgroup_mma(
                ws.index(place).reshape([OUTPUTS, STEP]), inputs, nothing, use_acc=False, is_async=True
            )  # fmt: skip
            part = warpgroup_mma_wait(0, [part])
            mbarrier.arrive(empty.index(place))
            acc += part
        if split == 0:
            begin_late(overlap)  # scales of x are read without the copy engine
        acc = _scaled(acc, x_scales, scales, rows, columns, gated)
        total = acc if split == 0 else total + acc
    _store(total, y, bias, rows, columns, gated)


@gluon.jit
def _room(tensor, STAGES: gl.constexpr):
    """Allocate room for ``STAGES`` pieces of a tensor that the copy engine reads."""
    return gl.allocate_shared_memory(tensor.dtype, [STAGES] + tensor.block_shape, tensor.layout)  # noqa: RUF005


@gluon.jit(do_not_specialize=["rows", "steps"])
def _small_m_float8(
    x, codes, x_scales, scales, bias, y, rows, columns, steps, gated: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    xs, ws = _room(x, STAGES), _room(codes, STAGES)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 1)
    begin_early(overlap)
    gl.warp_specialize(
        [
            (
                _multiply_float8,
                (y, x_scales, scales, bias, xs, ws, full, empty, rows, columns, steps, gated, SPLITS, overlap),
            ),
            (_load, (x, codes, None, None, xs, ws, None, None, full, empty, SPLITS * steps, STAGES, 0, overlap)),
        ],
        [1],
        [24],
    )


@gluon.jit(do_not_specialize=["rows", "steps"])
def _small_m_codes(
    x, codes, scales, zeros, bias, y, rows, columns, steps, gated: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    xs, ws = _room(x, STAGES), _room(codes, STAGES)
    ss = _room(scales, STAGES)
    zs = ss if zeros is None else _room(zeros, STAGES)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 1)
    begin_early(overlap)
    gl.warp_specialize(
        [
            (_multiply_codes, (y, bias, zeros, xs, ws, ss, zs, full, empty, rows, columns, steps, gated)),
            (_load, (x, codes, scales, zeros, xs, ws, ss, zs, full, empty, steps, STAGES, GROUP, overlap)),
        ],
        [1],
        [24],
    )


def small_m_codes(tile: Tile, x: Tensor, weight: DeviceWeight, bias: Tensor | None, gated: bool, y: Tensor) -> None:
    """Write ``y`` [rows, columns] for ``x`` [rows, inputs] and a shuffled ``weight``; all are contiguous."""
    inputs, group = x.shape[1], weight.scheme.group
    parts = DEPTH.value // group if group and group < DEPTH.value else 1
    chunks = DEPTH.value // CHUNK.value
    zeros = None if weight.zeros is None else _pairs(weight.zeros, gated, (parts, 4, 2, 8))
    _small_m_codes[_grid(tile, y, gated)](
        _chunks(x, chunks, tile.rows),
        _rows(weight.codes, gated, DEPTH.value // 2),
        _pairs(weight.scales, gated, (parts, 4, 2, 8)),
        zeros,
        bias,
        y,
        len(x),
        y.shape[1],
        cdiv(inputs, DEPTH.value),
        gated=gated,
        GROUP=group,
        STAGES=tile.stages,
        **options(num_warps=4, num_stages=1, maxnreg=64 if tile.rows < 32 else 80),
    )


def small_m_float8(
    tile: Tile, x: QuantizedRows, weight: DeviceWeight, bias: Tensor | None, gated: bool, y: Tensor
) -> None:
    """Write ``y`` [rows, columns] for float8 rows ``x`` [rows, inputs]; all are contiguous.

    The inputs are cut into 1 or 2 splits of whole steps; y may be fp32.
    """
    _small_m_float8[_grid(tile, y, gated)](
        descriptor(x.codes.view(len(x), -1, STEP.value).transpose(0, 1), 1, tile.rows, STEP.value),
        _rows(weight.codes, gated, STEP.value),
        x.scales,
        weight.scales,
        bias,
        y,
        len(x),
        y.shape[1],
        x.codes.shape[1] // STEP.value // weight.splits,
        gated=gated,
        SPLITS=weight.splits,
        STAGES=tile.stages,
        enable_fp_fusion=False,
        **options(num_warps=4, num_stages=1, maxnreg=64 if tile.rows < 32 else 80),
    )


def _grid(tile: Tile, y: Tensor, gated: bool) -> tuple[int, int]:
    return cdiv(y.shape[1], OUTPUTS.value // (2 if gated else 1)), cdiv(len(y), tile.rows)


def _chunks(x: Tensor, chunks: int, rows: int) -> TensorDescriptor:
    """Return ``x`` [rows, inputs] in chunks of its inputs, [chunks, rows, 64]."""
    return descriptor(x.view(len(x), -1, CHUNK.value).transpose(0, 1), chunks, rows, CHUNK.value)


def _rows(weight: Tensor, gated: bool, depth: int) -> TensorDescriptor:
    """Return ``weight`` [outputs, inputs] by eights of rows.

    Gates and ups take turns in [columns / 8, 2, 8, inputs]; without gates it is [outputs / 16, 2, 8, inputs].
    """
    depths = weight.shape[1]
    pairs = weight.view(2, -1, 8, depths).transpose(0, 1) if gated else weight.view(-1, 2, 8, depths)
    return descriptor(pairs, 4, 2, 8, depth)


def _pairs(scales: Tensor, gated: bool, block: tuple[int, int, int, int]) -> TensorDescriptor:
    """Return ``scales`` [groups, outputs] by eights like the weight: [groups, columns / 8, 2, 8]."""
    groups = len(scales)
    pairs = scales.view(groups, 2, -1, 8).transpose(1, 2) if gated else scales.view(groups, -1, 2, 8)
    return descriptor(pairs, *block)
