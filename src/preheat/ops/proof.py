"""Inputs for proofs of equal bits.

Two kernels that add in different orders mostly give the same bits once a sum is rounded. Where the exact sum is zero,
only the rounding errors of the order itself remain, and they hardly ever agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

COMPARED = 1024
"""Numbers that a proof of a product compares at the least.

An order shows in some numbers only, see :func:`cancelling_rows`.
"""


def rows_compared(outputs: int, size: int) -> int:
    """Return how many rows with ``outputs`` outputs each a proof compares: a multiple of ``size``."""
    return -(-COMPARED // (outputs * size)) * size


def cancelling_rows(rows: int, columns: int) -> Tensor:
    """Return fp32 [rows, columns]; products with a :func:`cancelling_weight` are exactly zero.

    The rows have numbers of all magnitudes, as sums of few numbers of one magnitude are exact in any order. With 8
    columns in bfloat16, the orders of AMX and AVX-512 differ in 1 % of the sums of normal numbers, and in 64 % of the
    sums of such numbers.
    """
    random = torch.Generator().manual_seed(1)
    return signed_pairs(spread(torch.randn(rows, columns, generator=random), 8.0, random), -1.0)


def cancelling_weight(outputs: int, columns: int) -> Tensor:
    """Return the weight of :func:`cancelling_rows`, fp32 [outputs, columns]."""
    return signed_pairs(noise(outputs, columns), 1.0)


def spread(x: Tensor, powers: float, random: torch.Generator) -> Tensor:
    """Multiply each number of ``x`` in place by a factor from e**-powers to e**powers, and return ``x``."""
    return x.mul_(torch.empty_like(x).uniform_(-powers, powers, generator=random).exp_())


def signed_pairs(x: Tensor, sign: float) -> Tensor:
    """Make the columns of ``x`` [..., n] opposite or equal pairs, in place.

    A pair is a number and ``sign`` times the same number. The columns of a pair are far apart. The last one of an odd
    number of columns has the first number of a pair again; with sign -1 the second number of this pair is doubled. A
    product of rows with sign 1 and rows with sign -1 is exactly zero, and no column but an only one is zero.
    """
    half = x.shape[-1] // 2
    order = torch.randperm(half * 2, generator=torch.Generator().manual_seed(1))
    x[..., order[half:]] = x[..., order[:half]] * sign
    if x.shape[-1] == 1:
        x.zero_()
    elif x.shape[-1] % 2:
        x[..., -1] = x[..., order[0]]
        if sign < 0:
            x[..., order[half]] *= 2
    return x


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
