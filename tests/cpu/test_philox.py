"""The noise: the generator's published vectors, its key, and independence of everything but the key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.ops import philox as module
from preheat.ops.philox import MAX_SPREAD, gumbel_at, gumbel_rows, philox
from tests.cpu.sampling_reference import gumbel, philox_words

word = st.integers(0, 2**32 - 1)


def on_arrays(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (np.array([c], np.uint64) for c in counter)
    k0, k1 = (np.array([k], np.uint64) for k in key)
    return tuple(int(out[0]) for out in philox((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The generator gives the known-answer vectors that Random123 publishes for Philox4x32-10."""
    assert on_arrays(counter, key) == expected
    assert philox_words(counter, key) == expected  # type: ignore[arg-type]


@given(counter=st.tuples(word, word, word, word), key=st.tuples(word, word))
@settings(max_examples=100, deadline=None)
def test_equals_plain_integers(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    assert on_arrays(counter, key) == philox_words(counter, key)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 127), st.integers(0, 300_000))
@settings(max_examples=100, deadline=None)
def test_noise_of_one_token(seed: int, position: int, choice: int, token: int) -> None:
    """Key and counter are laid out as documented."""
    got = gumbel_at(np.array([seed], np.uint64), np.array([position]), np.array([choice]), np.array([token]))
    assert got.dtype == np.float32
    assert float(got[0]) == pytest.approx(gumbel(seed, position, choice, token), rel=1e-5, abs=1e-5)


def a_key(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 2**64, rows, np.uint64), rng.integers(0, 5000, rows), rng.integers(0, 8, rows)


@pytest.mark.parametrize("vocab", [1, 3, 4, 1023, 4096])
def test_any_subset_has_the_bits_of_the_whole_row(vocab: int) -> None:
    seed, position, choice = a_key(7)
    whole = gumbel_rows(seed, position, choice, vocab)
    assert whole.shape == (7, vocab)
    rng = np.random.default_rng(2)
    rows, ids = rng.integers(0, 7, 333), rng.integers(0, vocab, 333)
    assert np.array_equal(gumbel_at(seed[rows], position[rows], choice[rows], ids), whole[rows, ids])
    for row in range(7):
        alone = gumbel_rows(seed[row : row + 1], position[row : row + 1], choice[row : row + 1], vocab)
        assert np.array_equal(alone[0], whole[row])


def test_a_key_that_holds_the_row_is_seen() -> None:
    """Control: noise keyed by the place in the batch fails the comparison above."""
    seed, position, choice = a_key(7)
    whole = gumbel_rows(seed + np.arange(7, dtype=np.uint64), position, choice, 64)
    assert not np.array_equal(gumbel_rows(seed[3:4], position[3:4], choice[3:4], 64)[0], whole[3])


def test_every_part_of_the_key_matters() -> None:
    def noise(seed: int, position: int, choice: int) -> bytes:
        return gumbel_rows(np.array([seed], np.uint64), np.array([position]), np.array([choice]), 64).tobytes()

    keys = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0), (2**32, 0, 0), (2**63, 0, 0), (1, 1, 1)]
    assert len({noise(*key) for key in keys}) == len(keys)


def test_logarithms_are_element_wise() -> None:
    """Each of the 2**23 possible variates has the same bits everywhere.

    It may be at any offset, in any length: no vector tail differs.
    """
    bits = np.arange(2**23, dtype=np.uint32) << np.uint32(9)
    whole = module._gumbel(bits)
    for offset, length in ((1, 2**23 - 1), (5, 1021), (2**23 - 3, 3), (2**22 + 7, 131)):
        assert np.array_equal(module._gumbel(bits[offset : offset + length]), whole[offset : offset + length])
    short = bits[: 7 * 1001].reshape(1001, 7)
    assert np.array_equal(module._gumbel(short).ravel(), whole[: 7 * 1001])
    assert np.isfinite(whole).all()
    assert float(whole.max()) - float(whole.min()) < MAX_SPREAD - 0.01


def test_uniform_and_independent() -> None:
    """Variates of consecutive seeds, positions, choices and ids fill 64 cells evenly (chi-square at 5 sigma)."""
    ones = np.ones(64, np.uint64)
    counted = np.arange(64)
    for key in (
        (counted.astype(np.uint64), counted * 0, counted * 0),
        (ones, counted, counted * 0),
        (ones, counted * 0, counted),
    ):
        noise = gumbel_rows(*key, 4096).astype(np.float64)
        u = np.exp(-np.exp(-noise))
        cells = np.bincount((u * 64).astype(int).ravel(), minlength=64)
        chi = float(((cells - u.size / 64) ** 2 / (u.size / 64)).sum())
        assert abs(chi - 63) < 5 * np.sqrt(2 * 63)
        assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 5 / np.sqrt(u.size)
        assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 5 / np.sqrt(u.size)
