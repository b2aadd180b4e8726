"""Linear maps: y = x W^T + b.

Contract. Every output is one dot product over the inputs, accumulated in fp32 in an order fixed by the shape of W, plus
the bias, rounded once to the dtype. A row's bits depend neither on the number of rows nor on the thread count. Kernels
keep that for certain row counts only (oneDNN from two on, torch's own product for multiples of sixteen): others are
padded.

On CPU the kernel is oneDNN's, over weights laid out for it once; in bfloat16 those are the bits of torch's ``linear``,
which lays the weights out again in every call. A torch without oneDNN takes its own product, with bits of its own.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 2
"""A caller that never passes fewer rows than this saves the padding."""


class Linear(Protocol):
    """One linear map."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, inputs], at least one row -> [rows, outputs], a new tensor of its dtype."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest linear map that keeps the contract for ``weight`` [outputs, inputs] and ``bias`` [outputs]."""
    packed = bool(torch._C._has_mkldnn)
    if packed and weight.dtype == torch.bfloat16:
        packed = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return PackedLinear(weight, bias) if packed else PlainLinear(weight, bias)


class PackedLinear:
    """oneDNN over packed weights; the weight it is made from is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight.default(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < MIN_ROWS:
            return self(x.expand(MIN_ROWS, -1))[:1]
        y: Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return y


class PlainLinear:
    """torch's own product over rows padded to a multiple of sixteen."""

    ROWS_MULTIPLE = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        padding = -len(x) % self.ROWS_MULTIPLE
        if padding:
            return F.linear(F.pad(x, (0, 0, 0, padding)), self._weight, self._bias)[: len(x)]
        return F.linear(x, self._weight, self._bias)
