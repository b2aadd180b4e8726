"""Cutting attention into pieces, on the host."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.backends.cuda.attention.work import BEHIND, decode_work, prefill_tiles, steady_steps


@pytest.mark.parametrize("window", [None, 1, 100, 256])
def test_single_queries_are_cut_where_their_window_reaches(window):
    positions = np.array([0, 63, 64, 700, 129])
    tokens = np.array([3, 4, 0, 1, 9])
    expected = []
    for token, position in zip(tokens, positions, strict=True):
        oldest = 0 if window is None else max(position - window + 1, 0)
        expected += [[token, split] for split in range(oldest // 64, position // 64 + 1)]
    work = decode_work(tokens, positions, 64, window)
    assert work.dtype == np.int32
    assert work.tolist() == expected


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.sampled_from([None, 1, 2, 63, 64, 65, 100]))
def test_pieces_are_known_to_stay_the_same_for_as_long_as_they_do(positions, window):
    positions = np.array(positions)
    tokens, steady = np.arange(len(positions)), steady_steps(positions, 64, window)
    pieces = [decode_work(tokens, positions + step, 64, window).tolist() for step in range(steady + 2)]
    assert pieces[:-1] == pieces[:1] * (steady + 1)
    assert pieces[-1] != pieces[0]


def test_runs_are_cut_into_tiles_the_costliest_first():
    starts, extends, positions = np.array([0, 5, 38]), np.array([5, 33, 16]), np.array([100, 0, 17])
    tiles = prefill_tiles(starts, extends, positions, 16)
    assert tiles.dtype == np.int32
    assert tiles.tolist() == [[0, 5], [37, 1], [38, 16], [21, 16], [5, 16]]
    both = prefill_tiles(starts, extends, np.zeros(3, int), 16, sides=True)
    assert both.tolist() == [[5, 16 + 17 * BEHIND], [21, 16 + BEHIND], [37, 1], [38, 16], [0, 5]]


def test_nothing_is_cut_into_nothing():
    none = np.array([], np.int64)
    assert decode_work(none, none, 64, None).shape == (0, 2)
    assert prefill_tiles(none, none, none, 16).shape == (0, 2)
