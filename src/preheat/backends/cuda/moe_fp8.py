"""The linear layers of experts in float8 on CUDA: those of :mod:`preheat.backends.cuda.linear_quantized`, in which each
block of rows has weights and scales of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import begin
from preheat.backends.cuda.linear_quantized import (
    STEP,
    DeviceWeight,
    codes_of,
    fp8_result,
    fp8_steps,
    grouping,
    tile_options,
)
from preheat.backends.cuda.moe_linear import placed
from preheat.backends.cuda.moe_route import Arrangement
from preheat.backends.cuda.tuning import Tile
from preheat.ops.quantization import QuantizedRows


@triton.jit
def _experts_fp8(
    x, x_scales, codes, scales, y, experts, starts, counts, tokens, columns, inputs, X_GROUPS, groups, K: tl.constexpr,
    EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, GROUPED: tl.constexpr,
    X_GROUPED: tl.constexpr, W_GROUPED: tl.constexpr, EVEN: tl.constexpr, gated: tl.constexpr, gathered: tl.constexpr,
    arranged: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile [OUTPUTS, ROWS] of y a program, placed as those of :mod:`preheat.backends.cuda.moe_linear`.
    ``gathered``: rows of x are tokens, else they lie as those of y.
    """
    begin(overlap)
    tile = tl.program_id(0)
    across = tl.cdiv(columns, OUTPUTS)
    if tile >= (tl.load(starts + EXPERTS) * across if arranged else tl.num_programs(0)):
        return
    expert, start, rows, below, first = placed(tile, across, experts, starts, counts, OUTPUTS, ROWS, arranged)
    out = tl.minimum(first + tl.arange(0, OUTPUTS), columns - 1)
    place = start + tl.minimum(below + tl.arange(0, ROWS), rows - 1)
    source = place
    if gathered:
        source = tl.load(tokens + place) if arranged else place // K
    source = source.to(tl.int64)
    height = columns * 2 if gated else columns
    codes += expert.to(tl.int64) * height * inputs
    scales += expert.to(tl.int64) * groups * height

    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in range(0, inputs, INPUTS):
        for part in tl.static_range(INPUTS // STEP):
            k = tl.cast(step, tl.int32) + part * STEP
            acc, acc_up = fp8_steps(
                acc, acc_up, x, codes, x_scales, scales, source, out, k, inputs, columns, X_GROUPS,
                GROUPED, X_GROUPED, W_GROUPED, EVEN, gated,
            )  # fmt: skip
    dtype: tl.constexpr = y.dtype.element_ty
    result = fp8_result(acc, x_scales, scales, None, source, out, GROUPED, dtype)
    if gated:
        up = fp8_result(acc_up, x_scales, scales, None, source, out + columns, GROUPED, dtype)
        result = silu_mul(result, up)
    outs, below = first + tl.arange(0, OUTPUTS)[:, None], below + tl.arange(0, ROWS)[None, :]
    stored = (outs < columns) & (below < rows)
    tl.store(y + (start + below).to(tl.int64) * columns + outs, result, mask=stored)


def experts_fp8(
    tile: Tile, x: Tensor | QuantizedRows, weight: DeviceWeight, arrangement: Arrangement, *, gated: bool,
    gathered: bool,
) -> Tensor:  # fmt: skip
    """As :func:`preheat.backends.cuda.moe_linear.experts_linear`, with ``weight`` and its activations in float8."""
    num_experts, outputs, inputs = weight.shape
    columns = outputs // 2 if gated else outputs
    rows = codes_of(x, weight)
    y = torch.empty((arrangement.rows, columns), dtype=weight.dtype, device=rows.codes.device)
    _experts_fp8[(len(arrangement.experts) * triton.cdiv(columns, tile.outputs),)](
        rows.codes, rows.scales, weight.codes, weight.scales, y, arrangement.experts, arrangement.starts,
        arrangement.counts, arrangement.tokens, columns, inputs, rows.scales.shape[1], weight.scales.shape[-2],
        K=arrangement.top_k, EXPERTS=num_experts, gathered=gathered, arranged=arrangement.block > 1,
        EVEN=inputs % STEP.value == 0, enable_fp_fusion=False, **grouping(rows.scales, weight),
        **tile_options(tile, inputs, gated),
    )  # fmt: skip
    return y
