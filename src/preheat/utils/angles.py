"""Cosines, sines and powers by arithmetic of our own, the same on every machine.

Contract. :func:`power` is computed with 40 decimal digits and rounded to float64, then to float32. :func:`cos_sin`
works in float64 with single additions, multiplications and roundings; every processor rounds them alike. An angle less
its multiple of pi / 2, in three parts, goes through Taylor's polynomials, from the highest term on. The result is
rounded to float32; it is the nearest float32 to the true value nearly always.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext

import numpy as np

_DIGITS = 40
_BLOCK = 1 << 14
"""Angles at once: their float64 numbers fit into a processor's cache."""

_QUARTER = tuple(map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")))
"""Pi / 2 in three parts; products of the first two with whole numbers below 2^20 are exact."""

_SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(6, 0, -1))
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(7, 0, -1))


def power(base: float, exponents: Iterable[float]) -> np.ndarray:
    """Return ``base`` to the power of each exponent, float32."""
    with localcontext() as context:
        context.prec = _DIGITS
        return np.array([float(Decimal(base) ** Decimal(float(each))) for each in exponents], np.float32)


def log(x: float) -> float:
    """Return the natural logarithm of ``x``."""
    with localcontext() as context:
        context.prec = _DIGITS
        return float(Decimal(x).ln())


def cos_sin(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines of float32 ``angles`` below 2^20, as float32 arrays of the same shape."""
    flat = np.ascontiguousarray(angles, np.float32).reshape(-1)
    cos, sin = np.empty_like(flat), np.empty_like(flat)

    def fill(first: int) -> None:
        part = slice(first, first + _BLOCK)
        cos[part], sin[part] = _cos_sin(flat[part].astype(np.float64))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, len(flat), _BLOCK)))
    return cos.reshape(angles.shape), sin.reshape(angles.shape)


def _cos_sin(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    turns = np.rint(x * (2 / math.pi))
    for part in _QUARTER:
        x -= turns * part
    square = x * x
    sin = _polynomial(_SIN, square)
    sin *= x
    sin += x
    cos = _polynomial(_COS, square)
    cos += 1.0
    quarter = turns.astype(np.int64) & 3
    odd = (quarter & 1).astype(bool)
    signs = np.array([1.0, -1.0, -1.0, 1.0]), np.array([1.0, 1.0, -1.0, -1.0])
    return np.where(odd, sin, cos) * signs[0][quarter], np.where(odd, cos, sin) * signs[1][quarter]


def _polynomial(terms: tuple[float, ...], square: np.ndarray) -> np.ndarray:
    """Return the sum of ``terms`` times powers of ``square``: the last term has the first power."""
    total = square * terms[0]
    for term in terms[1:]:
        total += term
        total *= square
    return total
