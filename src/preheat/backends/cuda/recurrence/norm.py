"""The gated norm of several heads together, behind a recurrence: one program a token and norm.

Contract. Step 5 of :mod:`preheat.ops.delta` with ``normed`` above 1. A program takes a few heads at a time. It writes
the sum of squares of each, adds the sums in their tree, and takes the heads again. So the number of heads in a norm
sets neither the registers of a program nor the size of its code: in one tile, 128 heads took 40 seconds to compile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.recurrence.kernels import halves, next_power, silu


@triton.jit
def _gated(x, out, at, here, gates, inside, GATE_FIRST: tl.constexpr):
    """Return heads in fp32 as their norm reads them, and the gates of these heads."""
    wide = tl.load(out + here, mask=inside, other=0.0)
    gate = silu(tl.load(x + gates + at, mask=inside, other=0.0).to(tl.float32))
    return wide * gate if GATE_FIRST else wide, gate


@triton.jit
def finish_together(
    x, table, out, norm, sums, result, stride, share, eps, CHANNELS: tl.constexpr, HEADS: tl.constexpr,
    VALUE: tl.constexpr, OWNERS: tl.constexpr, EACH: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Run step 5 for the heads of a norm and token a program, ``ROWS`` heads at a time.

    ``sums`` fp32 [tokens, value heads] is room. ``EACH``: each head has weights of its own. A padding token's result is
    zero.
    """
    begin(overlap)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * RULE.normed
    row, value = tl.arange(0, ROWS), tl.arange(0, VALUE)[None, :]
    gates, rows = token * stride + CHANNELS, token * (HEADS * VALUE)
    room = sums + token * HEADS + first
    real = tl.load(table + OWNERS + 2 * token) != 0
    for head in range(0, RULE.normed, ROWS):
        there = head + row < RULE.normed
        at = (first + head + row[:, None]) * VALUE + value
        wide, _ = _gated(x, out, at, rows + at, gates, there[:, None] & real, RULE.gate_first)
        tl.store(room + head + row, halves(wide * wide), mask=there)
    tl.debug_barrier()  # other threads of this program have written some of the sums
    heads = tl.arange(0, next_power(RULE.normed))
    each = tl.load(room + heads, mask=heads < RULE.normed, other=0.0)
    scale = tl.rsqrt(tl.sum(halves(tl.reshape(each, [1, each.shape[0]])), 0) * share + eps)
    for head in range(0, RULE.normed, ROWS):
        inside = (head + row < RULE.normed)[:, None] & (value >= 0)
        at = (first + head + row[:, None]) * VALUE + value
        weight = tl.load(norm + (at if EACH else value + 0 * row[:, None]), mask=inside, other=0.0)
        wide, gate = _gated(x, out, at, rows + at, gates, inside & real, RULE.gate_first)
        wide = wide * scale * weight
        wide = wide if RULE.gate_first else wide * gate
        tl.store(result + rows + at, tl.where(real, wide, 0.0).to(result.dtype.element_ty), mask=inside)
