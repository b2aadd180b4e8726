"""Norms on CUDA, alone or with the residual addition before them.

Contract. As in :mod:`preheat.ops.norm`; of kind "rms": per row, in fp32, the sum of the squares, times 1 / length, plus
eps, reciprocal square root, times x; rounded to the dtype; times weight, rounded again. Nothing is fused. The order of
a sum is fixed by the length alone: one program a row, whose block and warps follow from the length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import begin, options
from preheat.ops.kinds import NormKind


@triton.jit
def inverse_rms(total, share, eps):
    """From the sum of squares and 1 / length."""
    return tl.rsqrt(total * share + eps)


@triton.jit
def _norm(
    x, residual, weight, bias, out, share, eps,
    KIND: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
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
    if KIND == "layer":
        centred = tl.where(inside, wide - tl.sum(wide, 0) * share, 0.0)
        result = centred * inverse_rms(tl.sum(centred * centred, 0), share, eps) * scales.to(tl.float32)
        if bias is not None:
            result += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + here, result.to(row.dtype), mask=inside)
    elif KIND == "rms_plus_one":
        result = wide * inverse_rms(tl.sum(wide * wide, 0), share, eps) * (1.0 + scales.to(tl.float32))
        tl.store(out + here, result.to(row.dtype), mask=inside)
    else:
        normed = (wide * inverse_rms(tl.sum(wide * wide, 0), share, eps)).to(row.dtype)
        tl.store(out + here, (normed.to(tl.float32) * scales.to(tl.float32)).to(row.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of ``x`` [tokens, size], contiguous, with ``weight`` [size]: a new tensor."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x`` to ``residual`` in place, both [tokens, size], contiguous; then the norm of the sum: a new tensor."""
    return _launch(x, residual, weight, eps)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    kind: NormKind = "rms",
    bias: Tensor | None = None,
) -> Tensor:
    size, out = x.shape[1], torch.empty_like(x)
    _norm[(len(x),)](x, residual, weight, bias, out, 1.0 / size, eps, KIND=kind, SIZE=size, **layout(size))
    return out


def layout(size: int) -> dict[str, Any]:
    """Keywords of a launch of one program for each row of ``size`` numbers."""
    width = triton.next_power_of_2(size)
    return {"WIDTH": width, "enable_fp_fusion": False, **options(num_warps=min(max(width // 512, 1), 16), num_stages=1)}


class CudaNorm:
    """The norm of rows of ``len(weight)`` numbers; only kind "layer" may have a ``bias``."""

    def __init__(self, weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None) -> None:
        self.weight, self.eps, self.kind, self._bias = weight, eps, kind, bias

    def __call__(self, x: Tensor) -> Tensor:
        return _launch(x, None, self.weight, self.eps, self.kind, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return _launch(x, residual, self.weight, self.eps, self.kind, self._bias)
