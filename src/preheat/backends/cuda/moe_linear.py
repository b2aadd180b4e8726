"""The linear layers of experts on CUDA, for few rows an expert: :func:`preheat.backends.cuda.linear.in_order`, in which
each block of rows has weights of its own. The contract is that of linear layers; tiles, and which rows share one,
change no bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import begin, options
from preheat.backends.cuda.linear import load_weights
from preheat.backends.cuda.moe_route import Arrangement
from preheat.backends.cuda.tuning import Tile


@triton.jit
def placed(tile, across, experts, starts, counts, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, arranged: tl.constexpr):
    """Whose tile it is; that expert's first row and number of rows; the tile's first row among these, and its first
    output. ``across``: tiles of a block of rows.
    """
    expert = tl.load(experts + tile // across)
    if arranged:
        start, rows = tl.load(starts + expert), tl.load(counts + expert)
        blocks = tl.cdiv(rows, ROWS)
        inside = tile - start * across
        below = inside % blocks * ROWS
        first = inside // blocks * OUTPUTS
        start = start * ROWS
    else:
        start, rows, below = tile // across, 1, 0
        first = tile % across * OUTPUTS
    return expert, start, rows, below, first


@triton.jit
def _experts_in_order(
    x, weight, y, weight_tiles, experts, starts, counts, tokens, columns, inputs, K: tl.constexpr,
    EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
    gated: tl.constexpr, gathered: tl.constexpr, arranged: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile [OUTPUTS, ROWS] of y a program. Tiles of one expert follow each other, first those with the same
    weights.

    ``gathered``: rows of x are tokens, else they lie as those of y. Not ``arranged``: each slot is a block of one row.
    """
    begin(overlap)
    tile = tl.program_id(0)
    across = tl.cdiv(columns, OUTPUTS)
    if tile >= (tl.load(starts + EXPERTS) * across if arranged else tl.num_programs(0)):
        return
    expert, start, rows, below, first = placed(tile, across, experts, starts, counts, OUTPUTS, ROWS, arranged)
    out = tl.minimum(first + tl.arange(0, OUTPUTS), columns - 1).to(tl.int64)
    place = start + tl.minimum(below + tl.arange(0, ROWS), rows - 1)
    source = place
    if gathered:
        source = tl.load(tokens + place) if arranged else place // K
    source = source.to(tl.int64)
    top = expert * columns * (2 if gated else 1)

    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for k in range(0, inputs, INPUTS):
        at = x + source[None, :] * inputs + (k + tl.arange(0, INPUTS))[:, None]
        xs = tl.load(at) if EVEN else tl.load(at, mask=(k + tl.arange(0, INPUTS))[:, None] < inputs, other=0.0)
        ws = load_weights(weight, weight_tiles, top.to(tl.int64) + out, top + first, k, inputs, INPUTS, EVEN)
        acc = tl.dot(ws, xs, acc, input_precision="ieee")
        if gated:
            ws = load_weights(
                weight, weight_tiles, top.to(tl.int64) + columns + out, top + columns + first, k, inputs, INPUTS, EVEN
            )
            acc_up = tl.dot(ws, xs, acc_up, input_precision="ieee")

    result = acc.to(y.dtype.element_ty)
    if gated:
        result = silu_mul(result, acc_up.to(y.dtype.element_ty))
    outs, below = first + tl.arange(0, OUTPUTS)[:, None], below + tl.arange(0, ROWS)[None, :]
    stored = (outs < columns) & (below < rows)
    tl.store(y + (start + below).to(tl.int64) * columns + outs, result, mask=stored)


def experts_linear(
    tile: Tile, x: Tensor, weight: Tensor, arrangement: Arrangement, *, gated: bool, gathered: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Rows [arranged rows, columns] of the layer ``weight`` [experts, outputs, inputs], whose outputs are ``columns``
    or, if gated, twice as many. ``x`` are [tokens, inputs] where gathered, by default if gated, else [arranged rows,
    inputs]. All are contiguous; ``tile.rows`` are the arrangement's unless its block is one. Rows are of ``dtype``, by
    default that of ``x``.
    """
    num_experts, outputs, inputs = weight.shape
    columns = outputs // 2 if gated else outputs
    y = x.new_empty(arrangement.rows, columns, dtype=dtype)
    arranged = arrangement.block > 1
    tiles = TensorDescriptor.from_tensor(weight.view(-1, inputs), [tile.outputs, tile.inputs]) if tile.bulk else None
    keywords: dict[str, Any] = options(num_warps=tile.warps, num_stages=tile.stages)
    _experts_in_order[(len(arrangement.experts) * triton.cdiv(columns, tile.outputs),)](
        x, weight, y, tiles, arrangement.experts, arrangement.starts, arrangement.counts, arrangement.tokens, columns,
        inputs, K=arrangement.top_k, EXPERTS=num_experts, OUTPUTS=tile.outputs, ROWS=tile.rows, INPUTS=tile.inputs,
        EVEN=inputs % tile.inputs == 0, gated=gated, gathered=gated if gathered is None else gathered,
        arranged=arranged, **keywords,
    )  # fmt: skip
    return y
