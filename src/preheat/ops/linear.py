"""Linear maps: y = x W^T + b.

Contract. Every output is one dot product over the inputs, accumulated in fp32 in an order fixed by the shape of W, plus the
bias, rounded once to the dtype. On CPU this is oneDNN's kernel over weights that were laid out for it once (in bfloat16
the same bits as torch's own ``linear``, which lays them out again in every call). With two rows or more, a row's bits
depend neither on their number nor on the thread count; a single row may take another kernel, so it is computed as two.
"""

from __future__ import annotations

import torch
from torch import Tensor

_pack = torch.ops.mkldnn._reorder_linear_weight.default
_linear = torch.ops.mkldnn._linear_pointwise.default


class Linear:
    """One linear map whose weights are held in the layout of its kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take ``weight`` [outputs, inputs] and ``bias`` [outputs]; the weight itself is not kept."""
        self.outputs, self.inputs = weight.shape
        self._weight, self._bias = _pack(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs], a new tensor."""
        if len(x) == 1:
            return _linear(x.expand(2, -1), self._weight, self._bias, "none", [], "")[:1]
        return _linear(x, self._weight, self._bias, "none", [], "")
