"""Root-mean-square norm, alone or with the residual addition before it.

Contract. Per row, in fp32: the sum of the squares (one reduction over the row, in an order fixed by its length alone),
times 1 / length, plus eps, reciprocal square root, times x; rounded to the dtype; times weight, rounded again. A
residual is added before that, rounded to the dtype. Every step is correctly rounded, apart from the sum, which is
torch's over the last dimension and does not depend on the number of rows, and fp32 ``rsqrt``, which treats all
elements alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.ops.opaque import opaque


@opaque("(Tensor x, Tensor weight, Tensor share, Tensor eps) -> Tensor", lambda x, *_: torch.empty_like(x))
def _norm(x: Tensor, weight: Tensor, share: Tensor, eps: Tensor) -> Tensor:
    wide = x.float()
    scale = (wide * wide).sum(-1, True).mul_(share).add_(eps).rsqrt_()
    return (wide * scale).type_as(x).mul_(weight)


@opaque(
    "(Tensor x, Tensor(a!) residual, Tensor weight, Tensor share, Tensor eps) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, share: Tensor, eps: Tensor) -> Tensor:
    return _norm(residual.add_(x), weight, share, eps)


class RMSNorm:
    """The reference: the norm of rows of ``weight.shape[-1]`` numbers, in plain torch."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """``weight`` [size], or [heads, size] for a norm of its own for each head, in the dtype of what is normed."""
        self.weight, self.eps = weight, eps
        # Scalars are kept as tensors: torch takes longer to wrap a Python number than to run these operations.
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self._share = torch.tensor(1.0 / weight.shape[-1], dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x`` [tokens, size] or [tokens, heads, size], a new tensor of its dtype."""
        return _norm(x, self.weight, self._share, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, then the norm of the sum."""
        return _add_norm(x, residual, self.weight, self._share, self._eps)
