"""The sizes of images of any size after padding. Few programs encode all of them.

A rung is a number of cells (:mod:`preheat.model.grid_specs`). The rung of an image depends on the image alone, and on
no option, so its embeddings do not either.
"""

from __future__ import annotations

SMALLEST = 16
"""Cells of the first rung."""


def rung_of(cells: int) -> int:
    """Return the cells of the least rung that holds ``cells``: 16, 24, 32, 48, 64, 96 and so on."""
    rung = SMALLEST
    while rung < cells:
        rung = rung // 2 * 3 if rung & (rung - 1) == 0 else rung // 3 * 4
    return rung


def rungs_up_to(cells: int) -> tuple[int, ...]:
    """Return all rungs, in rising order, up to the rung of ``cells``."""
    found = [SMALLEST]
    while found[-1] < cells:
        found.append(rung_of(found[-1] + 1))
    return tuple(found)
