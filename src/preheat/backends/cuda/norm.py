"""Root-mean-square norm on CUDA, alone or with the residual addition before it.

Contract. As in :mod:`preheat.ops.norm`: per row, in fp32, the sum of the squares, times 1 / length, plus eps,
reciprocal square root, times x; rounded to the dtype; times weight, rounded again. Nothing is fused. The order of the
sum is fixed by the length alone: one program a row, whose block and warps follow from the length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import begin, options


@triton.jit
def inverse_rms(total, share, eps):
    """From the sum of squares and 1 / length."""
    return tl.rsqrt(total * share + eps)


@triton.jit
def _norm(x, residual, weight, out, share, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, overlap: tl.constexpr):
    """One row a program; with ``residual``, x is added to it first."""
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    scales = tl.load(weight + at, mask=inside, other=0.0)  # no kernel writes weights, so this need not wait
    begin(overlap)
    here = tl.program_id(0).to(tl.int64) * SIZE + at
    row = tl.load(x + here, mask=inside, other=0.0)
    if residual is not None:
        before = tl.load(residual + here, mask=inside, other=0.0)
        row = (before.to(tl.float32) + row.to(tl.float32)).to(row.dtype)
        tl.store(residual + here, row, mask=inside)
    wide = row.to(tl.float32)
    normed = (wide * inverse_rms(tl.sum(wide * wide, 0), share, eps)).to(row.dtype)
    tl.store(out + here, (normed.to(tl.float32) * scales.to(tl.float32)).to(row.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of ``x`` [tokens, size], contiguous, with ``weight`` [size]: a new tensor."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x`` to ``residual`` in place, both [tokens, size], contiguous; then the norm of the sum: a new tensor."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size, out = x.shape[1], torch.empty_like(x)
    _norm[(len(x),)](x, residual, weight, out, 1.0 / size, eps, SIZE=size, **_layout(size))
    return out


def _layout(size: int) -> dict[str, Any]:
    width = triton.next_power_of_2(size)
    return {"WIDTH": width, "enable_fp_fusion": False, **options(num_warps=min(max(width // 512, 1), 16), num_stages=1)}


class CudaNorm:
    """The norm of rows of ``len(weight)`` numbers."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return add_rms_norm(x, residual, self.weight, self.eps)
