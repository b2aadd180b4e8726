"""The linear layers of experts with codes for weights and plain activations on CUDA: those of
:mod:`preheat.backends.cuda.linear_quantized`, in which each block of rows has weights of its own, with the bits of the
dequantized experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import begin
from preheat.backends.cuda.linear_quantized import (
    DeviceWeight,
    codes_leaf,
    dequantized,
    layout,
    scheme_options,
    tile_options,
)
from preheat.backends.cuda.moe_linear import placed
from preheat.backends.cuda.moe_route import Arrangement
from preheat.backends.cuda.tuning import Tile


@triton.jit
def _experts_codes(
    x, codes, scales, zeros, y, experts, starts, counts, tokens, columns, inputs, size, groups, row_bytes, leaf_bytes,
    expert_scales, y_leaf, K: tl.constexpr, EXPERTS: tl.constexpr, LEAVES: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, FOUR: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
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
    row = below + tl.arange(0, ROWS)
    there, place = row < rows, start + tl.minimum(row, rows - 1)
    source = place
    if gathered:
        source = tl.load(tokens + place) if arranged else place // K
    source = source.to(tl.int64)
    height = columns * 2 if gated else columns
    codes += expert.to(tl.int64) * height * row_bytes
    scales += expert.to(tl.int64) * expert_scales
    if zeros is not None:
        zeros += expert.to(tl.int64) * expert_scales

    leaf = tl.program_id(1) if LEAVES > 1 else 0
    acc, acc_up = codes_leaf(
        x, codes, scales, zeros, None, source, there, out, leaf, size, inputs, columns, groups, row_bytes, leaf_bytes,
        INPUTS, FOUR, GROUP, EVEN, gated,
    )  # fmt: skip
    result = acc.to(y.dtype.element_ty)
    if gated:
        result = silu_mul(result, acc_up.to(y.dtype.element_ty))
    if LEAVES > 1:
        y += tl.cast(leaf, tl.int64) * y_leaf
    outs, below = first + tl.arange(0, OUTPUTS)[:, None], below + tl.arange(0, ROWS)[None, :]
    stored = (outs < columns) & (below < rows)
    tl.store(y + (start + below).to(tl.int64) * columns + outs, result, mask=stored)


def experts_codes(
    tile: Tile, x: Tensor, weight: DeviceWeight, arrangement: Arrangement, *, gated: bool, gathered: bool
) -> Tensor:
    """As :func:`preheat.backends.cuda.moe_linear.experts_linear`, with ``weight`` as codes. Groups of inputs
    follow each other: others are refused.
    """
    y = x.new_empty(arrangement.rows, weight.shape[1] // 2 if gated else weight.shape[1])
    _launch(tile, x, weight, arrangement, y, gated=gated, gathered=gathered)
    return y


def leaves_codes(tile: Tile, x: Tensor, weight: DeviceWeight, arrangement: Arrangement) -> Tensor:
    """The leaves of ``weight``: fp32 [leaves, arranged rows, outputs]."""
    y = x.new_empty(weight.leaves, arrangement.rows, weight.shape[1], dtype=torch.float32)
    _launch(tile, x, weight, arrangement, y, gated=False, gathered=False)
    return y


def _launch(
    tile: Tile, x: Tensor, weight: DeviceWeight, arrangement: Arrangement, y: Tensor, *, gated: bool, gathered: bool
) -> None:
    (num_experts, _, inputs), columns, leaves = weight.shape, y.shape[-1], weight.leaves
    _experts_codes[(len(arrangement.experts) * triton.cdiv(columns, tile.outputs), leaves)](
        x, weight.codes, weight.scales, weight.zeros, y, arrangement.experts, arrangement.starts,
        arrangement.counts, arrangement.tokens, columns, inputs, *layout(weight), weight.scales[0].numel(),
        arrangement.rows * columns, K=arrangement.top_k, EXPERTS=num_experts, LEAVES=leaves,
        gathered=gathered, arranged=arrangement.block > 1, **scheme_options(weight),
        **tile_options(tile, inputs // leaves, gated),
    )  # fmt: skip


def dequantized_experts(weight: DeviceWeight) -> Tensor:
    """The weights [experts, outputs, inputs] in the model's dtype, a new tensor."""
    return torch.stack([dequantized(_expert(weight, number)) for number in range(weight.shape[0])])


def _expert(weight: DeviceWeight, number: int) -> DeviceWeight:
    zeros = None if weight.zeros is None else weight.zeros[number]
    return replace(
        weight, shape=weight.shape[1:], codes=weight.codes[number], scales=weight.scales[number], zeros=zeros
    )
