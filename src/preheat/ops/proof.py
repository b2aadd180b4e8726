"""What proofs of equal bits are made of.

Two kernels that add in different orders mostly give the same bits once a sum is rounded. Where the exact sum is zero
nothing is left but the rounding of the order itself, which hardly ever agrees.
"""

from __future__ import annotations

import torch
from torch import Tensor


def signed_pairs(x: Tensor, sign: float) -> Tensor:
    """``x`` [..., n], in place: its columns form pairs, far apart, of a number and ``sign`` times the same number.

    A product of rows with sign 1 and rows with sign -1 is exactly zero.
    """
    half = x.shape[-1] // 2
    order = torch.randperm(half * 2, generator=torch.Generator().manual_seed(1))
    x[..., order[half:]] = x[..., order[:half]] * sign
    x[..., half * 2 :] = 0
    return x


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers with a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
