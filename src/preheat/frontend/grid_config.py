"""How an image of any size becomes patches: the image processor of Qwen2-VL and its successors. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from preheat.errors import InvalidRequest
from preheat.frontend.image_config import PixelConfig

MOST_RATIO = 200
"""The most times that a side may be as long as the other; the limit of transformers."""


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """The sizes of images and the values of ``pixels``.

    Both sides are resized to multiples of ``patch`` * ``merge`` pixels, so that the image has ``least`` to ``most``
    pixels. A cell is ``merge`` by ``merge`` patches.
    """

    pixels: PixelConfig
    patch: int
    merge: int
    least: int
    most: int

    @property
    def resample(self) -> int:
        return self.pixels.resample

    crop: ClassVar[None] = None
    resizes: ClassVar[bool] = True

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after resizing. Raises InvalidRequest for a side that is far longer than the other.

        The rule is ``smart_resize`` of transformers, in the same floating-point operations.
        """
        if max(width, height) > MOST_RATIO * min(width, height):
            raise InvalidRequest(
                f"The image of {width} x {height} pixels has a side more than {MOST_RATIO} times as long as the other: "
                "crop it",
                param="messages",
            )
        unit = self.patch * self.merge
        sides = [round(side / unit) * unit for side in (width, height)]
        if sides[0] * sides[1] > self.most:
            factor = math.sqrt((height * width) / self.most)
            sides = [max(unit, math.floor(side / factor / unit) * unit) for side in (width, height)]
        elif sides[0] * sides[1] < self.least:
            factor = math.sqrt(self.least / (height * width))
            sides = [math.ceil(side * factor / unit) * unit for side in (width, height)]
        cells, most = sides[0] * sides[1] // unit**2, max(self.most // unit**2, 1)
        if cells > most:
            raise InvalidRequest(
                f"The image of {width} x {height} pixels takes {cells} positions of a prompt, and the image processor "
                f"allows {most}: crop it, or send it with sides of more similar lengths",
                param="messages",
            )
        return sides[0], sides[1]

    def positions(self, width: int, height: int) -> int:
        """Return the positions of a prompt that an image takes, by its size after resizing: one for each cell."""
        return width * height // (self.patch * self.merge) ** 2

    def table(self) -> np.ndarray:
        """Return the final value of each 8-bit value, by channel: float32 [channels, 256]."""
        return self.pixels.table()

    def arranged(self, planes: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Return patches, float32 [patches, channels * patch * patch], and the grid of cells.

        ``planes`` are [channels, height, width]. Cells go from left to right, then down, and so do the patches of one.
        """
        channels, height, width = planes.shape
        unit = self.patch * self.merge
        rows, columns = height // unit, width // unit
        parts = planes.reshape(channels, rows, self.merge, self.patch, columns, self.merge, self.patch)
        patches = parts.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels * self.patch**2)
        return np.ascontiguousarray(patches), (rows, columns)
