"""A norm with its numbers in one tensor, for compiled functions."""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.backends.cpu.llvm.kinds import RowNorm
from preheat.ops.norm import RMSNorm


class PackedNorm:
    """``norm``, with its factors and bias in ``numbers``: float32 [size], or [2 * size] with a bias.

    A norm for each head has a row for each head. Functions read the tensor at its address, so an update of weights
    reaches them.
    """

    def __init__(self, norm: RMSNorm) -> None:
        self.norm, self.weight, self.eps, self.kind = norm, norm.weight, norm.eps, norm.kind
        self.how = RowNorm(norm.kind, norm.weight.shape[-1], norm.eps, norm.bias is not None)
        self.numbers = torch.cat([norm.factors, *(() if norm.bias is None else (norm.bias,))], dim=-1)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`preheat.backends.base.layers.Norm`."""
        return self.norm(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See :class:`preheat.backends.base.layers.Norm`."""
        return self.norm.add(x, residual)
