"""Exact sums of many rows at once."""

from __future__ import annotations

import math

import numpy as np

_CUTS = 3
"""The most cuts of the numbers, each about 40 bits for 1,000 numbers a row."""

_MANY = 3
"""The fewest rows that are cut: math.fsum takes less time for fewer."""


def exact_sums(rows: np.ndarray) -> np.ndarray:
    """Return the sum of each of the ``rows`` float64 [n, size], exact and rounded once, as :func:`math.fsum` does.

    Numbers are cut into multiples of a unit, and a rest below the unit. The sum of the multiples is exact in any order:
    each partial sum is at most 2**53 units. Rows that have a rest after the last cut are summed by math.fsum, as are
    few rows, and all rows if a number is not finite.
    """
    if len(rows) < _MANY or not np.isfinite(rows).all():
        return np.array([math.fsum(row) for row in rows.tolist()], np.float64)
    parts, rest = list[list[float]](), rows
    room = math.ceil(math.log2(max(rows.shape[1], 2)))
    for _ in range(_CUTS):
        _, exponents = np.frexp(np.abs(rest).max(axis=1, initial=0.0))
        beyond = np.ldexp(1.0, exponents + room)[:, None]  # more than the sum of all numbers of the row
        multiples = (rest + beyond) - beyond
        parts.append(multiples.sum(axis=1).tolist())
        rest = rest - multiples
        if not rest.any():
            break
    found = [math.fsum(cuts) for cuts in zip(*parts, strict=True)]
    for row in np.flatnonzero(rest.any(axis=1)).tolist():
        found[row] = math.fsum(rows[row].tolist())
    return np.array(found, np.float64)
