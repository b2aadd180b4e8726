"""Float8 codes and scales of activations on CUDA, by the contract of :mod:`preheat.ops.quantization`: one launch before
each layer with float8 activations. Not yet run on a GPU.

A maximum has no order, so how a row is cut into pieces changes no bits. Divisions are IEEE's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import begin, options
from preheat.ops.kinds import ActivationScales
from preheat.ops.quantization import E4M3, E4M3_MAX, LEAST_SCALE, PROMOTED

COLUMNS = 2048
"""Numbers of a row that are looked at together."""

MOST: tl.constexpr = tl.constexpr(E4M3_MAX)
LEAST: tl.constexpr = tl.constexpr(LEAST_SCALE)


@triton.jit
def _quantize(
    x, static, codes, scales, inputs, groups, size, KIND: tl.constexpr, COLUMNS: tl.constexpr, overlap: tl.constexpr
):
    """One group of a row: ``size`` numbers, of all ``inputs`` if there is one group."""
    begin(overlap)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * size
    last = tl.minimum(first + size, inputs)
    if KIND == "static":
        scale = tl.load(static)
    else:
        greatest = tl.zeros([COLUMNS], tl.float32)
        for start in range(first, last, COLUMNS):
            at = start + tl.arange(0, COLUMNS)
            part = tl.load(x + row * inputs + at, mask=at < last, other=0.0).to(tl.float32)
            greatest = tl.maximum(greatest, tl.abs(part), propagate_nan=tl.PropagateNan.ALL)
        scale = tl.maximum(tl.div_rn(tl.max(greatest, 0), MOST), LEAST)
    for start in range(first, last, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        part = tl.load(x + row * inputs + at, mask=at < last, other=0.0).to(tl.float32)
        quotient = tl.div_rn(part, tl.zeros([COLUMNS], tl.float32) + scale)
        quotient = tl.maximum(quotient, -MOST, propagate_nan=tl.PropagateNan.ALL)
        quotient = tl.minimum(quotient, MOST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes + row * inputs + at, quotient.to(tl.float8e4nv), mask=at < last)
    tl.store(scales + row * groups + group, scale)


def quantize_rows(x: Tensor, kind: ActivationScales, static: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [rows, inputs] and scales fp32 [rows, groups] of ``x`` [rows, inputs], contiguous."""
    rows, inputs = x.shape
    size = PROMOTED if kind == "block" else inputs
    groups = triton.cdiv(inputs, size)
    codes = torch.empty((rows, inputs), dtype=E4M3, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    columns = min(COLUMNS, triton.next_power_of_2(size))
    _quantize[(rows, groups)](
        x, static, codes, scales, inputs, groups, size, KIND=kind, COLUMNS=columns,
        **options(num_warps=1 if kind == "block" else 4, num_stages=1),
    )  # fmt: skip
    return codes, scales
