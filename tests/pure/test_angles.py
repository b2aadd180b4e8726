"""Cosines, sines and powers: nearest to the true value, and the same numbers on every machine."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from hashlib import blake2b

import numpy as np

from preheat.utils.angles import cos_sin, log, power

DIGEST = "913c00482fb0c7bedcd89e5590fe30de"
"""Digest of the cosines and sines of :func:`sample`: every machine has it."""


def sample() -> np.ndarray:
    """Return angles up to 2^20, among them multiples of pi / 2 and the angles of a long text."""
    whole = np.arange(0, 1 << 20, 97, dtype=np.float32)
    quarters = (np.arange(40_000) * (math.pi / 2)).astype(np.float32)
    slow = np.outer(np.arange(500, dtype=np.float32), power(1e-4, np.arange(0, 1, 1 / 32)))
    return np.concatenate((whole, quarters, slow.reshape(-1), -whole[:100], np.float32([0.0, 1e-30])))


def digest(arrays: tuple[np.ndarray, np.ndarray]) -> str:
    return blake2b(b"".join(each.astype("<f4").tobytes() for each in arrays), digest_size=16).hexdigest()


def test_cosines_and_sines_are_nearest_to_the_true_ones():
    angles = sample()
    cos, sin = cos_sin(angles)
    assert np.array_equal(cos, np.array([math.cos(x) for x in angles.tolist()], np.float32))
    assert np.array_equal(sin, np.array([math.sin(x) for x in angles.tolist()], np.float32))


def test_every_machine_has_the_same_numbers_in_blocks_of_any_size(monkeypatch):
    angles = sample()
    found = cos_sin(angles)
    assert digest(found) == DIGEST
    monkeypatch.setattr("preheat.utils.angles._BLOCK", 1001)
    assert digest(cos_sin(angles)) == DIGEST
    nudged = found[0].copy()
    nudged[5] = np.nextafter(nudged[5], np.float32(0))
    assert digest((nudged, found[1])) != DIGEST


def test_powers_and_logarithms_are_nearest_to_the_true_ones():
    exponents = [np.float32(i / 64).item() for i in range(64)]
    with localcontext() as context:
        context.prec = 60
        true = np.array([float((Decimal(x) * Decimal(500_000).ln()).exp()) for x in exponents], np.float32)
    assert np.array_equal(power(500_000.0, exponents), true)
    assert math.isclose(log(8.0), math.log(8.0), rel_tol=1e-15)
