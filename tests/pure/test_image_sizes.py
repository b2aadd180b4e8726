"""Images of any size: the places of their tokens, the sizes to which they pad, and the pixels of their patches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core import Image, Segment
from preheat.errors import InvalidRequest
from preheat.frontend.grid_config import GridConfig
from preheat.frontend.image_config import PixelConfig
from preheat.schedule.turns import places_of
from preheat.utils.rungs import rung_of, rungs_up_to

PARTS = st.lists(st.one_of(st.integers(0, 4), st.tuples(st.integers(1, 4), st.integers(1, 4))), max_size=8)


def segments_of(parts) -> tuple[list[Segment], int]:
    """Return the segments of a prompt of so many tokens of text, and of images of such grids; and its length."""
    found, at = list[Segment](), 0
    for part in parts:
        if isinstance(part, tuple):
            found.append(Segment(at, at + part[0] * part[1], Image(b"", b"", grid=part)))
        at += part if isinstance(part, int) else part[0] * part[1]
    return found, at


def walked(parts) -> list[tuple[int, int, int]]:
    """Return the places of all tokens, one after the other, as the reference's ``get_rope_index`` does."""
    found, place = list[tuple[int, int, int]](), 0
    for part in parts:
        if isinstance(part, int):
            found += [(place + each,) * 3 for each in range(part)]
            place += part
            continue
        rows, columns = part
        found += [(place, place + row, place + column) for row in range(rows) for column in range(columns)]
        place += max(part)
    return [*found, (place,) * 3]


@given(PARTS)
def test_places_are_those_of_a_walk(parts):
    segments, length = segments_of(parts)
    places, right = places_of(segments), walked(parts)
    if not segments:
        assert places is None and right == [(each,) * 3 for each in range(length + 1)]
        return
    end = segments[-1].end
    assert places.within.T.tolist() == [list(each) for each in right[:end]]
    assert [each + places.shift for each in range(end, length + 1)] == [each[0] for each in right[end:]]
    assert max(map(max, right)) <= length, "a place is never behind the position, so the table has a row for it"


@given(PARTS, st.integers(0, 7))
def test_places_depend_on_earlier_images_alone(parts, cut):
    segments, _ = segments_of(parts)
    places, before = places_of(segments), places_of(segments[:cut])
    if places is not None and before is not None:
        assert (places.within[:, : before.within.shape[1]] == before.within).all()


@given(st.integers(1, 1 << 15))
def test_a_rung_holds_an_image_and_is_one_of_the_enumerated(cells):
    rung = rung_of(cells)
    assert cells <= rung <= max(16, 1.5 * cells)
    assert rungs_up_to(cells)[-1] == rung and list(rungs_up_to(cells)) == sorted({*map(rung_of, range(1, cells + 1))})


PIXELS = PixelConfig(
    shortest_edge=None, height=None, width=None, resample=3, crop=None, rescale=1 / 255, mean=None, std=None
)
CONFIG = GridConfig(pixels=PIXELS, patch=2, merge=2, least=64, most=1024)


@given(st.integers(1, 300), st.integers(1, 300))
def test_sizes_keep_to_the_bounds(width, height):
    try:
        found = CONFIG.size_of(width, height)
    except InvalidRequest:
        assert max(width, height) > 16 * min(width, height)
        return
    assert all(side % 4 == 0 for side in found) and found[0] * found[1] <= 1024


def test_patches_lie_cell_by_cell():
    planes = np.arange(3 * 8 * 12, dtype=np.float32).reshape(3, 8, 12)
    patches, grid = CONFIG.arranged(planes)
    assert grid == (2, 3) and patches.shape == (24, 12)
    for cell, patch in ((0, 0), (0, 3), (4, 1)):
        row, column = 4 * (cell // 3) + 2 * (patch // 2), 4 * (cell % 3) + 2 * (patch % 2)
        assert (patches[4 * cell + patch] == planes[:, row : row + 2, column : column + 2].reshape(-1)).all()


def test_a_far_longer_side_is_refused():
    with pytest.raises(InvalidRequest, match="more than 200 times as long"):
        CONFIG.size_of(201, 1)
