"""Gates of attention's outputs on CUDA.

Contract. As in :mod:`preheat.ops.gate`, element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv

COLUMNS = 1024
"""Elements of a program. Changes no bits."""


@triton.jit
def _gated(out, gates, stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < SIZE
    given = tl.load(out + token * SIZE + at, mask=inside, other=0.0)
    gate = tl.load(gates + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    result = given.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out + token * SIZE + at, result.to(given.dtype), mask=inside)


def gated(out: Tensor, gates: Tensor) -> Tensor:
    """Multiply ``out`` [tokens, numbers], contiguous, by the sigmoids of ``gates`` in place, and return it.

    Rows of ``gates`` may lie apart.
    """
    tokens, size = out.shape
    programs = (tokens, cdiv(size, COLUMNS))
    _gated[programs](out, gates, gates.stride(0), SIZE=size, COLUMNS=COLUMNS, **options(num_warps=4, num_stages=1))
    return out
