"""Linear maps: y = x W^T + b.

Contract. Every output is one dot product over the inputs, accumulated in fp32 in an order fixed by the shape of W, plus
the bias, rounded once to the dtype. A row's bits do not depend on the number of rows.

On CPU the kernel is oneDNN's, over weights laid out for it once; in bfloat16 those are the bits of torch's ``linear``,
which lays the weights out again in every call. It keeps the contract from two rows on, and where the outputs alone give
every thread something to do: with fewer of them than that and many inputs it divides the sums among threads, for some
numbers of rows and not for others. Such weights get rows of zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.errors import SettingsError
from preheat.ops.opaque import opaque

MIN_ROWS = 2
"""A caller that never passes fewer rows than this saves the padding."""

MANY_INPUTS = 2048
OUTPUTS_PER_THREAD = 64


_run = torch.ops.mkldnn._linear_pointwise.default


@opaque(
    "(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor",
    lambda x, weight, bias, outputs: x.new_empty(len(x), outputs),
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """The first ``outputs`` of ``weight``, which is oneDNN's; the others only pad it."""
    y: Tensor = _run(x, weight, bias, "none", [], "")
    return y if y.shape[1] == outputs else y[:, :outputs].contiguous()


class Linear:
    """``weight`` [outputs, inputs], of which nothing is kept but oneDNN's copy, and ``bias`` [outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_kernel(weight.dtype)
        self._outputs, inputs = weight.shape
        least = OUTPUTS_PER_THREAD * torch.get_num_threads() if inputs >= MANY_INPUTS else 0
        padding = least - self._outputs
        if padding > 0:
            weight = F.pad(weight, (0, 0, 0, padding))
            bias = None if bias is None else F.pad(bias, (0, padding))
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight.default(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, inputs], at least one row -> [rows, outputs], a new tensor of its dtype."""
        if len(x) < MIN_ROWS:
            return self(x.expand(MIN_ROWS, -1))[:1]
        return _linear(x, self._weight, self._bias, self._outputs)


def check_kernel(dtype: torch.dtype) -> None:
    """Raise SettingsError where this torch, on this processor, has no kernel for ``dtype``."""
    if not torch._C._has_mkldnn:
        raise SettingsError("this build of torch has no oneDNN, which preheat needs on CPU: install the standard wheel")
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise SettingsError("this processor has no kernel for bfloat16: use --dtype float32", param="dtype")
