"""How attention is cut into pieces, on the host."""

import numpy as np
import pytest

from preheat.ops.cuda.work import decode_work, prefill_tiles


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


def test_runs_are_cut_into_tiles_the_costliest_first():
    starts, extends, positions = np.array([0, 5, 38]), np.array([5, 33, 16]), np.array([100, 0, 17])
    tiles = prefill_tiles(starts, extends, positions, 16)
    assert tiles.dtype == np.int32
    assert tiles.tolist() == [[0, 5], [37, 1], [38, 16], [21, 16], [5, 16]]


def test_nothing_is_cut_into_nothing():
    none = np.array([], np.int64)
    assert decode_work(none, none, 64, None).shape == (0, 2)
    assert prefill_tiles(none, none, none, 16).shape == (0, 2)
