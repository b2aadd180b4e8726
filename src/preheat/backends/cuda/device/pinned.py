"""Pinned memory of the host for many small tensors.

The driver takes a millisecond to pin memory, whatever its size. An adapter of an 8B model has 384 tensors.
"""

from __future__ import annotations

import math
from threading import Lock

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
"""Bytes that are pinned at once. torch keeps a piece that nothing uses any more, and gives it to the next adapter."""

ALIGNMENT = 256


class PinnedPieces:
    """Tensors cut out of pieces of pinned memory. Any thread may ask for one.

    A piece lives as long as a tensor in it. ``pinned`` may be False in tests without a device.
    """

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned, self._lock = pinned, Lock()
        self._piece, self._used = torch.empty(0, dtype=torch.uint8), 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return pinned zeros; a tensor larger than a piece has a piece of its own."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            room = self._cut(size)
        room.numpy().fill(0)  # torch would wake all its threads
        return room.view(dtype).view(shape)

    def _cut(self, size: int) -> Tensor:
        if size > PIECE_BYTES:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        if self._used + size > len(self._piece):
            self._piece, self._used = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._pinned), 0
        start, self._used = self._used, -(-(self._used + size) // ALIGNMENT) * ALIGNMENT
        return self._piece[start : start + size]


ADAPTERS = PinnedPieces()
"""The pieces that hold adapters of this process."""
