"""The places of a prompt's tokens on three axes: time, row and column.

A text goes on by one place on all axes with each token. An image begins at the place of the next token: all its cells
have this place in time, and the place plus their row, and plus their column, on the other axes. The text behind the
image goes on behind the greatest place. So the places of a token are decided by the starts and grids of the images
before it. A block's hash covers the hashes and starts of these images, and an image's hash covers its grid. Equal
hashes therefore mean equal places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from preheat.core import Segment


class Places(NamedTuple):
    """The places of a prompt's tokens.

    ``within`` int32 [3, end] are the places of the tokens up to the end of the last image. Behind it a place is the
    position plus ``shift``, on all axes.
    """

    within: np.ndarray
    shift: int


def places_of(segments: Sequence[Segment]) -> Places | None:
    """Return the places of a prompt with these images; None if places are positions."""
    if not segments or segments[0].image.grid is None:
        return None
    within, at, shift = np.zeros((3, segments[-1].end), np.int32), 0, 0
    for segment in segments:
        assert segment.image.grid is not None, "some images of the prompt have a grid, and others have none"
        rows, columns = segment.image.grid
        within[:, at : segment.start] = np.arange(at, segment.start, dtype=np.int32) + shift
        place = segment.start + shift
        row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
        within[:, segment.start : segment.end] = place
        within[1, segment.start : segment.end] += row
        within[2, segment.start : segment.end] += column
        at, shift = segment.end, place + max(rows, columns) - segment.end
    return Places(within, shift)
