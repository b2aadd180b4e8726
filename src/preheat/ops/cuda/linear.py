"""Linear maps on CUDA: y = x W^T + b, and the same with silu(gate) * up behind it.

Contract. Every output is one dot product over the inputs, in order, in one fp32 accumulator; the bias is added in fp32;
one rounding to the dtype. Gated: the first half of W's rows are gates, the second half ups; both are rounded like any
output, then combined as :func:`preheat.ops.cuda.elementwise.silu_mul` says. So a row's bits do not depend on the number
of rows, on tiles or on warps: those only say which program computes an output, never in which order.

Two implementations. :class:`Tile` is a Triton kernel, best where the weights' bytes set the time: weights are the first
operand of the matrix unit, whose other side may then be as narrow as the few rows are. :class:`Library` is cuBLAS, best
for many rows. It keeps the contract wherever it does not cut the inputs into parts: that is for a proof to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from preheat.ops.cuda.activation import silu_and_mul
from preheat.ops.cuda.elementwise import silu_mul
from preheat.ops.cuda.launch import begin, options

GROUP: tl.constexpr = tl.constexpr(8)
"""Programs that run together share this many tiles of weights, so that what they read of x stays in the L2 cache."""


class Shape(NamedTuple):
    """What a choice of implementation depends on, but for the number of rows. ``outputs`` are the rows of W."""

    outputs: int
    inputs: int
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False


@triton.jit
def _fetch(weight, rows, inputs, ahead, OUTPUTS: tl.constexpr):
    """Ask for the first ``ahead`` inputs of ``rows`` of the weights to be brought to the L2 cache; waits for nothing."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # 128 bytes
    lines = tl.arange(0, 8) * LINE
    for start in range(0, ahead, 8 * LINE):
        at = weight + rows[:, None] * inputs + tl.minimum(start + lines, inputs - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _weights(weight, tiles, rows, first, k, inputs, INPUTS: tl.constexpr, EVEN: tl.constexpr):
    """[outputs, inputs] of the weights, from input ``k`` on."""
    if tiles is not None:
        return tiles.load([first, k])
    at = weight + rows[:, None] * inputs + (k + tl.arange(0, INPUTS))[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(k + tl.arange(0, INPUTS))[None, :] < inputs, other=0.0)


@triton.jit
def _rounded(acc, bias, rows, dtype: tl.constexpr):
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    return acc.to(dtype)


@triton.jit(do_not_specialize=["rows", "ahead"])
def in_order(
    x,
    weight,
    bias,
    y,
    x_tiles,
    weight_tiles,
    rows,
    outputs,
    inputs,
    ahead,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    gated: tl.constexpr,
    overlap: tl.constexpr,
):
    """One tile [OUTPUTS, ROWS] of y a program. ``outputs`` are the columns of y; ``EVEN``: INPUTS divides ``inputs``.

    Rows and outputs beyond the last one are computed as copies of it and not stored. ``x_tiles`` and ``weight_tiles``,
    if given, are the same matrices for the copy engine.
    """
    across = tl.cdiv(outputs, OUTPUTS)
    down = tl.cdiv(rows, ROWS)
    group = tl.program_id(0) // (GROUP * down)
    inside = tl.program_id(0) % (GROUP * down)
    size = tl.minimum(across - group * GROUP, GROUP)
    first = (group * GROUP + inside % size) * OUTPUTS
    row = inside // size * ROWS
    out = tl.minimum(first + tl.arange(0, OUTPUTS), outputs - 1).to(tl.int64)
    token = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)

    if overlap:  # no kernel writes weights, so they need not be waited for
        _fetch(weight, out, inputs, ahead, OUTPUTS)
        if gated:
            _fetch(weight, out + outputs, inputs, ahead, OUTPUTS)
    begin(overlap)

    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for k in range(0, inputs, INPUTS):
        if x_tiles is not None:
            xs = x_tiles.load([row, k]).T
        else:
            at = x + token[None, :] * inputs + (k + tl.arange(0, INPUTS))[:, None]
            if EVEN:
                xs = tl.load(at)
            else:
                xs = tl.load(at, mask=(k + tl.arange(0, INPUTS))[:, None] < inputs, other=0.0)
        ws = _weights(weight, weight_tiles, out, first, k, inputs, INPUTS, EVEN)
        acc = tl.dot(ws, xs, acc, input_precision="ieee")
        if gated:
            ws = _weights(weight, weight_tiles, out + outputs, first + outputs, k, inputs, INPUTS, EVEN)
            acc_up = tl.dot(ws, xs, acc_up, input_precision="ieee")

    dtype: tl.constexpr = y.dtype.element_ty
    result = _rounded(acc, bias, out, dtype)
    if gated:
        result = silu_mul(result, _rounded(acc_up, bias, out + outputs, dtype))
    outs, tokens = tl.arange(0, OUTPUTS)[:, None], tl.arange(0, ROWS)[None, :]
    corner = y + tl.cast(row, tl.int64) * outputs + first
    stored = (first + outs < outputs) & (row + tokens < rows)
    tl.store(corner + tokens * outputs + outs, result, mask=stored)


@dataclass(frozen=True)
class Tile:
    """The Triton kernel with tiles of ``outputs`` x ``rows``, ``inputs`` deep; ``bulk`` loads them by the copy engine.

    Each program asks for the first ``ahead`` inputs of its weights before the kernel in front has ended.
    """

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int
    bulk: bool = False
    ahead: int = 512

    keeps_order = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
        outputs = len(weight) // 2 if gated else len(weight)
        y = x.new_empty(len(x), outputs)
        blocks = triton.cdiv(outputs, self.outputs) * triton.cdiv(len(x), self.rows)
        in_order[(blocks,)](*self.arguments(x, weight, bias, y), **self.options(weight.shape[1], gated))
        return y

    def arguments(self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> tuple[Any, ...]:
        """Of a launch of ``in_order``, in order."""
        tiles: tuple[Any, Any] = (None, None)
        if self.bulk:
            tiles = (
                TensorDescriptor.from_tensor(x, [self.rows, self.inputs]),
                TensorDescriptor.from_tensor(weight, [self.outputs, self.inputs]),
            )
        return (x, weight, bias, y, *tiles, len(x), y.shape[1], x.shape[1], min(self.ahead, x.shape[1]))

    def options(self, inputs: int, gated: bool) -> dict[str, Any]:
        """Keywords of that launch."""
        return options(
            OUTPUTS=self.outputs,
            ROWS=self.rows,
            INPUTS=self.inputs,
            EVEN=inputs % self.inputs == 0,
            gated=gated,
            num_warps=self.warps,
            num_stages=self.stages,
        )


@dataclass(frozen=True)
class Library:
    """cuBLAS. Without ``split`` it may not cut the inputs into parts; with it, it does as it likes."""

    split: bool = False

    @property
    def keeps_order(self) -> bool:
        """Whether it ever can."""
        return not self.split

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
        with self._allowed():
            y = F.linear(x, weight, bias)
        return silu_and_mul(y) if gated else y

    @contextmanager
    def _allowed(self) -> Iterator[None]:
        """torch's settings, which belong to the process, for one call. Only cublasLt can be forbidden to split."""
        matmul = torch.backends.cuda.matmul
        before = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()  # type: ignore[attr-defined]
        backend = torch.backends.cuda.preferred_blas_library()
        matmul.allow_bf16_reduced_precision_reduction = (False, self.split)
        torch.backends.cuda.preferred_blas_library("default" if self.split else "cublaslt")
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = before
            torch.backends.cuda.preferred_blas_library(backend)


Choice = Tile | Library

REFERENCE = {
    torch.bfloat16: Tile(64, 64, 64, 4, 3),
    torch.float16: Tile(64, 64, 64, 4, 3),
    torch.float32: Tile(32, 32, 32, 4, 2),
}
"""The plain kernel, whose bits are the contract's."""
