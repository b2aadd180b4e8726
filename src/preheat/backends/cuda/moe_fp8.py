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
    fp8_leaf,
    grouping,
    tile_options,
)
from preheat.backends.cuda.moe_linear import placed
from preheat.backends.cuda.moe_route import Arrangement
from preheat.backends.cuda.tuning import Tile
from preheat.ops.quantization import QuantizedRows


@triton.jit
def _experts_fp8(
    x, x_scales, codes, scales, y, experts, starts, counts, tokens, columns, inputs, size, X_GROUPS, groups, y_leaf,
    K: tl.constexpr, EXPERTS: tl.constexpr, LEAVES: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, GROUPED: tl.constexpr, X_GROUPED: tl.constexpr, W_GROUPED: tl.constexpr, EVEN: tl.constexpr,
    gated: tl.constexpr, gathered: tl.constexpr, arranged: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile [OUTPUTS, ROWS] of y a program, placed as those of :mod:`preheat.backends.cuda.moe_linear`.
    ``gathered``: rows of x are tokens, else they lie as those of y. Each of LEAVES leaves, ``size`` inputs, has
    ``y_leaf`` numbers.
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

    leaf = tl.program_id(1) if LEAVES > 1 else 0
    acc, acc_up = fp8_leaf(
        x, x_scales, codes, scales, source, out, leaf, size, inputs, columns, X_GROUPS, INPUTS, GROUPED, X_GROUPED,
        W_GROUPED, EVEN, gated,
    )  # fmt: skip
    result = acc.to(y.dtype.element_ty)
    if gated:
        result = silu_mul(result, acc_up.to(y.dtype.element_ty))
    if LEAVES > 1:
        y += tl.cast(leaf, tl.int64) * y_leaf
    outs, below = first + tl.arange(0, OUTPUTS)[:, None], below + tl.arange(0, ROWS)[None, :]
    stored = (outs < columns) & (below < rows)
    tl.store(y + (start + below).to(tl.int64) * columns + outs, result, mask=stored)


def experts_fp8(
    tile: Tile, x: Tensor | QuantizedRows, weight: DeviceWeight, arrangement: Arrangement, *, gated: bool,
    gathered: bool,
) -> Tensor:  # fmt: skip
    """As :func:`preheat.backends.cuda.moe_linear.experts_linear`, with ``weight`` and its activations in float8."""
    size = arrangement.rows, weight.shape[1] // 2 if gated else weight.shape[1]
    y = torch.empty(size, dtype=weight.dtype, device=weight.codes.device)
    _launch(tile, codes_of(x, weight), weight, arrangement, y, gated=gated, gathered=gathered)
    return y


def leaves_fp8(tile: Tile, x: QuantizedRows, weight: DeviceWeight, arrangement: Arrangement) -> Tensor:
    """The leaves of ``weight``, with their scales: fp32 [leaves, arranged rows, outputs]."""
    size = weight.leaves, arrangement.rows, weight.shape[1]
    y = torch.empty(size, dtype=torch.float32, device=weight.codes.device)
    _launch(tile, x, weight, arrangement, y, gated=False, gathered=False)
    return y


def _launch(
    tile: Tile, rows: QuantizedRows, weight: DeviceWeight, arrangement: Arrangement, y: Tensor, *, gated: bool,
    gathered: bool,
) -> None:  # fmt: skip
    (num_experts, _, inputs), columns, leaves = weight.shape, y.shape[-1], weight.leaves
    size = inputs // leaves
    _experts_fp8[(len(arrangement.experts) * triton.cdiv(columns, tile.outputs), leaves)](
        rows.codes, rows.scales, weight.codes, weight.scales, y, arrangement.experts, arrangement.starts,
        arrangement.counts, arrangement.tokens, columns, inputs, size, rows.scales.shape[1], weight.scales.shape[-2],
        arrangement.rows * columns, K=arrangement.top_k, EXPERTS=num_experts, LEAVES=leaves,
        gathered=gathered, arranged=arrangement.block > 1, EVEN=size % STEP.value == 0, enable_fp_fusion=False,
        **grouping(rows.scales, weight), **tile_options(tile, size, gated),
    )  # fmt: skip
