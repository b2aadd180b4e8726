"""What the kernels of linear layers with tiles share."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(8)
"""Programs that run together share this many tiles of weights, so that what they read of x stays in the L2 cache."""


@triton.jit
def corner(rows, outputs, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """The first output and the first row of a program's tile."""
    across = tl.cdiv(outputs, OUTPUTS)
    down = tl.cdiv(rows, ROWS)
    group = tl.program_id(0) // (GROUP * down)
    inside = tl.program_id(0) % (GROUP * down)
    size = tl.minimum(across - group * GROUP, GROUP)
    first = (group * GROUP + inside % size) * OUTPUTS
    row = inside // size * ROWS
    return first, row


@triton.jit
def rounded(acc, bias, rows, dtype: tl.constexpr):
    """Outputs ``rows`` of sums ``acc`` [outputs, rows of x]: with their bias, in ``dtype``."""
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    return acc.to(dtype)
