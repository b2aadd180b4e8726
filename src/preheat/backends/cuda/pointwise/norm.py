"""Norms on CUDA, alone or with the residual addition before them.

Contract. As in :mod:`preheat.ops.norm`; of kind "rms": per row, in fp32, the sum of the squares, times 1 / length, plus
eps, reciprocal square root, times x; rounded to the dtype; times weight, rounded again. No multiplication is fused with
an addition. The order of a sum is fixed by the length alone: one program a row, with block and warps chosen by the
length.

For a linear layer with float8 activations the same program also writes codes and scales of the row. They equal the
codes and scales from :func:`preheat.backends.cuda.pointwise.quantize.quantize_rows` for the norm's result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base.layers import FusedInput, Norm
from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import next_power_of_2
from preheat.backends.cuda.pointwise.quantize import empty_codes, store_codes
from preheat.ops.kinds import ActivationScales, NormKind
from preheat.ops.quantization import QuantizedRows


@triton.jit
def inverse_rms(total, share, eps):
    """Return the reciprocal root mean square, from the sum of squares and 1 / length."""
    return tl.rsqrt(total * share + eps)


@triton.jit
def rms_row(row, scales, share, eps, KIND: tl.constexpr):
    """Return the root-mean-square norm of ``row``, in its dtype; zeros lie behind its last number."""
    wide = row.to(tl.float32)
    if KIND == "identity":
        result = row
    elif KIND == "rms_plus_one":
        result = wide * inverse_rms(tl.sum(wide * wide, 0), share, eps) * (1.0 + scales.to(tl.float32))
        result = result.to(row.dtype)
    elif KIND == "rms_once":
        result = (wide * inverse_rms(tl.sum(wide * wide, 0), share, eps) * scales.to(tl.float32)).to(row.dtype)
    else:
        normed = (wide * inverse_rms(tl.sum(wide * wide, 0), share, eps)).to(row.dtype)
        result = (normed.to(tl.float32) * scales.to(tl.float32)).to(row.dtype)
    return result


@triton.jit
def finish_row(
    row, scales, residual, bias, out, static, codes, row_scales, token, at, share, eps, KIND: tl.constexpr,
    SCALES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the norm of ``row`` to the place of ``token``; with ``residual``, add the row to the residual first.

    The result goes to ``out``, if given, and its codes to ``codes``.
    """
    inside = at < SIZE
    here = token * SIZE + at
    if residual is not None:
        before = tl.load(residual + here, mask=inside, other=0.0)
        row = (before.to(tl.float32) + row.to(tl.float32)).to(row.dtype)
        tl.store(residual + here, row, mask=inside)
    if KIND == "layer":
        wide = row.to(tl.float32)
        centred = tl.where(inside, wide - tl.sum(wide, 0) * share, 0.0)
        result = centred * inverse_rms(tl.sum(centred * centred, 0), share, eps) * scales.to(tl.float32)
        if bias is not None:
            result += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        result = result.to(row.dtype)
    else:
        result = rms_row(row, scales, share, eps, KIND)
    if out is not None:
        tl.store(out + here, result, mask=inside)
    if codes is not None:
        result = tl.where(inside, result, 0.0)  # a bias, or a weight that is not finite, reaches beyond the row
        store_codes(result, static, codes, row_scales, token, SIZE, WIDTH, SCALES)


@triton.jit
def _norm(
    x, residual, weight, bias, out, static, codes, row_scales, share, eps, stride,
    KIND: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write the norm of one row of x a program, see :func:`finish_row`. Rows are ``stride`` numbers apart."""
    at = tl.arange(0, WIDTH)
    scales = tl.load(weight + at, mask=at < SIZE, other=0.0)  # no kernel writes weights, so this need not wait
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(x + token * stride + at, mask=at < SIZE, other=0.0)
    finish_row(
        row, scales, residual, bias, out, static, codes, row_scales, token, at, share, eps, KIND, SCALES, SIZE, WIDTH
    )


@triton.jit
def _inserted_norm(
    x, weight, bias, out, share, eps, stride, out_stride, KIND: tl.constexpr, SIZE: tl.constexpr, REST: tl.constexpr,
    REST_WIDTH: tl.constexpr, WIDTH: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write the norm of one row of x a program to a row of out, and the ``REST`` numbers behind it as they are."""
    at = tl.arange(0, WIDTH)
    scales = tl.load(weight + at, mask=at < SIZE, other=0.0)  # no kernel writes weights, so this need not wait
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    mine, to = x + token * stride, out + token * out_stride
    row = tl.load(mine + at, mask=at < SIZE, other=0.0)
    finish_row(row, scales, None, bias, to, None, None, None, 0, at, share, eps, KIND, None, SIZE, WIDTH)
    if REST > 0:
        rest = SIZE + tl.arange(0, REST_WIDTH)
        tl.store(to + rest, tl.load(mine + rest, mask=rest < SIZE + REST), mask=rest < SIZE + REST)


@triton.jit
def _values_norm(
    x, weight, out, share, eps, x_stride, out_stride, KIND: tl.constexpr, BACK: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, START: tl.constexpr, VALUES: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write one head of one token to out: heads from ``VALUES`` on normed, from the head ``BACK`` heads before."""
    at = tl.arange(0, WIDTH)
    scales = tl.load(weight + at, mask=at < SIZE, other=0.0)  # no kernel writes weights, so this need not wait
    begin(overlap)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + START
    source = head - tl.where(head >= VALUES, BACK, 0)
    row = tl.load(x + token * x_stride + source * SIZE + at, mask=at < SIZE, other=0.0)
    if head >= VALUES:
        row = rms_row(row, scales, share, eps, KIND)
    tl.store(out + token * out_stride + head * SIZE + at, row, mask=at < SIZE)


def layout(size: int) -> dict[str, Any]:
    """Return keywords of a launch of one program for each row of ``size`` numbers."""
    width = next_power_of_2(size)
    return {"WIDTH": width, "enable_fp_fusion": False, **options(num_warps=min(max(width // 512, 1), 16), num_stages=1)}


class CudaNorm:
    """The norm of rows of ``len(weight)`` numbers; only kind "layer" may have a ``bias``."""

    def __init__(self, weight: Tensor, eps: float, kind: NormKind = "rms", bias: Tensor | None = None) -> None:
        self.weight, self.eps, self.kind, self.bias = weight, eps, kind, bias

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        self._launch(x, None, out)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._launch(x, residual, out)
        return out

    def insert(self, x: Tensor, out: Tensor) -> None:
        """See :class:`preheat.backends.base.layers.InsertingNorm`."""
        size = self.weight.shape[-1]
        rest = x.shape[1] - size
        _inserted_norm[(len(x),)](
            x, self.weight, self.bias, out, 1.0 / size, self.eps, x.stride(0), out.stride(0),
            KIND=self.kind, SIZE=size, REST=rest, REST_WIDTH=next_power_of_2(rest), **layout(size),
        )  # fmt: skip

    def of_values(self, qkv: Tensor, heads: int, *, repeats: bool) -> Tensor:
        """Norm each of the last ``heads`` heads of ``qkv`` [tokens, n] in place, and return ``qkv``.

        ``repeats``: the last heads are keys; return a new tensor with the keys' norms behind them.
        """
        size = self.weight.shape[-1]
        count = qkv.shape[1] // size + heads * repeats
        out = qkv.new_empty(len(qkv), count * size) if repeats else qkv
        start = 0 if repeats else count - heads
        _values_norm[(len(qkv), count - start)](
            qkv, self.weight, out, 1.0 / size, self.eps, qkv.stride(0), out.stride(0), KIND=self.kind,
            BACK=heads * repeats, SIZE=size, START=start, VALUES=count - heads, **layout(size),
        )  # fmt: skip
        return out

    def quantized(self, x: Tensor, residual: Tensor | None, how: QuantizedInput) -> QuantizedRows:
        """Return float8 codes and scales of the norm, after adding x to ``residual`` if given.

        ``how`` tells how the next linear layer reads the norm.
        """
        codes, scales = empty_codes(x, how.kind)
        out = torch.empty_like(x) if how.plain else None
        self._launch(x, residual, out, how.kind, how.static, codes, scales)
        return QuantizedRows(codes, scales, out)

    def _launch(
        self, x: Tensor, residual: Tensor | None, out: Tensor | None, kind: ActivationScales | None = None,
        static: Tensor | None = None, codes: Tensor | None = None, scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        size = x.shape[1]
        _norm[(len(x),)](
            x, residual, self.weight, self.bias, out, static, codes, scales, 1.0 / size, self.eps, x.stride(0),
            KIND=self.kind, SCALES=kind, SIZE=size, **layout(size),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class QuantizedInput:
    """Float8 inputs of a linear layer, made by the norm before it.

    ``static`` is their scale, or None if each row gets its own. ``plain``: other layers also read the norm's result
    unquantized.
    """

    kind: ActivationScales
    static: Tensor | None
    plain: bool = False

    def norm(self, norm: Norm, x: Tensor, residual: Tensor | None) -> QuantizedRows:
        return cast(CudaNorm, norm).quantized(x, residual, self)

    def same(self, other: FusedInput) -> bool:
        return isinstance(other, QuantizedInput) and self.kind == other.kind and self.static is other.static

    def beside_plain(self) -> QuantizedInput:
        return replace(self, plain=True)


def places_in(to: Tensor | QuantizedRows) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the memory in ``to`` of norms, of their codes and of the codes' scales; None where there is none."""
    return (to, None, None) if isinstance(to, Tensor) else (to.plain, to.codes, to.scales)


def normed_rows(residual: Tensor, how: QuantizedInput | None) -> Tensor | QuantizedRows:
    """Return memory for the norms of the rows of ``residual``, in the form that the next layer reads."""
    if how is None:
        return torch.empty_like(residual)
    codes, scales = empty_codes(residual, how.kind)
    return QuantizedRows(codes, scales, torch.empty_like(residual) if how.plain else None)
