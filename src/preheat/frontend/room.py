"""The positions of a prompt that its images may take, counted before an image is decoded. No torch here, nor Pillow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.errors import ContextTooLong
from preheat.frontend.video import FRAMES, Frames


class Room:
    """The positions that are left for the images of one prompt, of at most ``most``.

    ``refusal`` returns the error of a prompt whose images take a number of positions.
    """

    def __init__(self, most: int, refusal: Callable[[int], ContextTooLong]) -> None:
        self._most, self._left, self._refusal = most, most, refusal

    def left_for(self, source: Any) -> int:
        """Return the most positions that the image ``source`` may take.

        All frames of a video have one size, so its first frames tell the positions of all.
        """
        return min(self._left, self._most // _alike(source))

    def take(self, positions: int) -> None:
        """Take the ``positions`` of a decoded image."""
        self._left -= positions

    def lacking(self, source: Any, positions: int) -> ContextTooLong:
        """Return the error of an image that takes more ``positions`` than are left for it."""
        return self._refusal(max(self._most - self._left + positions, positions * _alike(source)))


def _alike(source: Any) -> int:
    """Return the number of images that take as many positions as ``source``."""
    return -(-source.total // FRAMES) if isinstance(source, Frames) else 1
