"""Root-mean-square norm, alone or with the residual addition before it.

Contract. Per row, in fp32: the mean of the squares (one reduction over the row, whose order depends on its length alone), plus
eps, reciprocal square root, times x; rounded to the dtype; times weight, rounded again. A residual is added before that,
rounded to the dtype. The order of the sum is that of torch's reduction over the last dimension, which does not depend on
the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of ``x`` [..., size] over its last dimension; ``weight`` broadcasts against x and has its dtype."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to ``residual`` in place; returns the norm of the sum, and the sum (which is ``residual``)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
