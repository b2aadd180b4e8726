"""Rotations of tokens that have a place on three axes: time, row and column.

A token of a text has one place on all axes, and turns as with one axis. A token of an image has a place on each.

Contract. A pair turns by the token's place on one axis. With sections (t, r, c), pair i turns by the row if i % 3 is 1
and i < 3 * r, by the column if i % 3 is 2 and i < 3 * c, and by the time otherwise. Angles, cosines and sines are the
rows of the table of all places (:func:`preheat.model.rope.rope_table`): a token's row is put together from three of
them, and nothing is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

AXES = 3
"""Places of a token: time, row and column."""


class StepTurns:
    """The rotations of a step's tokens: row i of ``rows`` [tokens, 2, 1, dim] belongs to the token i of the step.

    ``table`` [places, 2, 1, dim] has the rotation of each place.
    """

    def __init__(self, table: Tensor, sections: tuple[int, ...], tokens: int) -> None:
        self.table, self.rows = table, torch.zeros(tokens, *table.shape[1:], dtype=table.dtype, device=table.device)
        half = axis_of_pairs(sections, table.shape[-1] // 2).to(table.device)
        self._axis = half.repeat(4)  # cosines and sines, each of two halves
        self._flat, self._out = table.view(len(table), -1), self.rows.view(tokens, -1)

    def turn(self, places: Tensor) -> None:
        """Write the rows of a step's tokens; ``places`` int32 [3, tokens] are their places on each axis."""
        index = places.to(torch.int64).index_select(0, self._axis).t()
        torch.gather(self._flat, 0, index, out=self._out[: places.shape[1]])


def axis_of_pairs(sections: tuple[int, ...], pairs: int) -> Tensor:
    """Return the axis of each pair, int64 [pairs]."""
    found = torch.zeros(pairs, dtype=torch.int64)
    for axis in range(1, AXES):
        found[axis : AXES * sections[axis] : AXES] = axis
    return found
