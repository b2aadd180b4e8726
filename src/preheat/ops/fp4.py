"""Numbers of four bits, e2m1: a sign, two bits of exponent and one of mantissa.

Contract. The magnitudes are 0, 1/2, 1, 3/2, 2, 3, 4 and 6. A weight holds twice the number, an integer in int8, and
half the scale: both are exact, so the product is the product of the number and the scale. Zero with a sign is read as
zero. A block of numbers shares a scale: 32 numbers and a power of two, stored as its exponent (e8m0, MXFP4), or 16
numbers and an e4m3 number divided by a factor of the whole matrix (NVFP4). The division is IEEE's, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 12
"""The greatest code: twice the greatest number."""

_SIZES = (0, 1, 2, 3, 4, 6, 8, 12)
_NUMBERS = (*_SIZES, *(-size for size in _SIZES))
_EXPONENT_BIAS = 127


def codes_of(nibbles: Tensor) -> Tensor:
    """Return the codes, int8, of ``nibbles`` between 0 and 15."""
    return torch.tensor(_NUMBERS, dtype=torch.int8, device=nibbles.device)[nibbles.int()]


def unpacked(packed: Tensor) -> Tensor:
    """Return the codes of uint8 ``packed`` [..., n]: int8 [..., 2 n]. The low bits of a byte come first."""
    return codes_of(torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2))


def nibbles_of(codes: Tensor) -> Tensor:
    """Return the nibbles, uint8, of int8 ``codes``. No copy is wider than the codes."""
    found, sizes = codes.lt(0).to(torch.uint8) << 3, codes.abs()
    for least in _SIZES[1:]:
        found += sizes >= least
    return found


def nearest(numbers: Tensor) -> Tensor:
    """Return the codes nearest to ``numbers``, which are doubled; a tie goes to the greater magnitude."""
    sizes = torch.tensor(_SIZES, dtype=torch.float32, device=numbers.device)
    bounds = (sizes[1:] + sizes[:-1]) / 2
    size = sizes[torch.searchsorted(bounds, numbers.abs().float(), right=True)]
    return torch.where(numbers < 0, -size, size).to(torch.int8)


def powers(exponents: Tensor) -> Tensor:
    """Return the fp32 scales of uint8 ``exponents``, e8m0, halved for codes. All are exact."""
    return torch.exp2(exponents.double() - (_EXPONENT_BIAS + 1)).float()


def quotients(scales: Tensor, whole: Tensor) -> Tensor:
    """Return fp32 ``scales`` divided by the factor ``whole`` of the matrix, halved for codes."""
    return scales / whole * 0.5
