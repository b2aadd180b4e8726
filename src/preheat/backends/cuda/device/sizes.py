"""Whole numbers for the sizes of launches. No Triton.

Triton has functions of the same names. Called on the host, each of them takes two microseconds, and a step of an 8B
model calls them five hundred times.
"""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Return ``a`` / ``b``, rounded up; both are positive, or ``a`` is zero."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is no less than ``n``; 0 for 0, as Triton's function."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
