"""Sums of many rows at once are those of :func:`math.fsum`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.utils import exact_sums as module
from preheat.utils.exact_sums import exact_sums


def rows_of(seed: int, rows: int, size: int, spread: float) -> np.ndarray:
    """Return random rows; numbers differ by up to e ** (4 * ``spread``), and some are squares of float32."""
    draw = np.random.default_rng(seed)
    found = draw.standard_normal((rows, size)) * np.exp(spread * draw.standard_normal((rows, size)))
    found[::2] = found[::2].astype(np.float32).astype(np.float64) ** 2
    found[draw.random((rows, size)) < 0.1] = 0.0
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(0, 700), st.sampled_from([0.0, 2.0, 5.0, 12.0]))
def test_sums_are_exact(seed: int, rows: int, size: int, spread: float) -> None:
    given = rows_of(seed, rows, size, spread)
    assert exact_sums(given).tolist() == [math.fsum(row) for row in given.tolist()]


def test_cuts_are_enough_for_usual_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to math.fsum but the sum of the cuts, and one cut alone would show."""
    given, right = rows_of(1, 4, 1024, 1.0), [math.fsum(row) for row in rows_of(1, 4, 1024, 1.0).tolist()]
    monkeypatch.setattr(module.math, "fsum", lambda values: np.float64(sum(values)) if len(values) < 9 else math.nan)
    assert np.allclose(exact_sums(given), right, rtol=1e-15)
    assert given.sum(axis=1).tolist() != right


def test_numbers_that_are_not_finite() -> None:
    found = exact_sums(np.array([[1.0, math.inf], [math.nan, 1.0], [0.0, -0.0]]))
    assert found[0] == math.inf and math.isnan(found[1]) and found[2] == 0
