"""The gated activation of the feed-forward block on CUDA, where it is not part of the product before it.

Contract. :func:`preheat.backends.cuda.elementwise.silu_mul` of each element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import begin, options

COLUMNS = 1024
"""Elements of a program. Changes no bits."""


@triton.jit
def _silu_and_mul(gate_up, out, inner, COLUMNS: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < inner
    gate = tl.load(gate_up + token * 2 * inner + at, mask=inside)
    up = tl.load(gate_up + token * 2 * inner + inner + at, mask=inside)
    tl.store(out + token * inner + at, silu_mul(gate, up), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for ``gate_up`` [tokens, 2 * inner], contiguous, gate first: a new tensor [tokens, inner]."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    programs = (tokens, triton.cdiv(inner, COLUMNS))
    _silu_and_mul[programs](gate_up, out, inner, COLUMNS=COLUMNS, **options(num_warps=4, num_stages=1))
    return out
