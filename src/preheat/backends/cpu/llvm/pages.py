"""Memory in large pages, for weights: a processor finds an address in them with fewer looks at its tables.

A step reads all weights once, and a small page ends after some dozens of cache lines. On a virtual machine each look at
the tables is a walk through two of them.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

LARGE_PAGE = 1 << 21
_ALIGNMENT = 64
_OWN = 2 * LARGE_PAGE
"""The least size of a tensor with memory of its own. Smaller ones share."""

_SHARED = 4 * LARGE_PAGE
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class _Chunk:
    """Memory for several small tensors. It goes when the last of them has gone."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Return ``size`` bytes, of new memory if none is left."""
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        if room > len(self._left):
            self._left = _mapped(_SHARED)
        found, self._left = self._left[:size], self._left[room:]
        return found


_CHUNK = _Chunk()


def in_large_pages(x: Tensor) -> Tensor:
    """Return a contiguous copy of ``x`` in large pages, as far as the system has them."""
    size = x.numel() * x.element_size()
    if not size:
        return x
    memory = _mapped(size) if size >= _OWN else _CHUNK.take(size)
    return torch.from_numpy(memory).view(x.dtype).view(x.shape).copy_(x)


def _mapped(size: int) -> np.ndarray:
    """Return new memory that begins with a large page. Its whole large pages are asked for."""
    mapped = mmap.mmap(-1, size + LARGE_PAGE, **_PRIVATE)
    everything = np.frombuffer(mapped, np.uint8)
    first = -everything.ctypes.data % LARGE_PAGE
    whole = size // LARGE_PAGE * LARGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE") and whole:
        with suppress(OSError):  # this kernel has none
            mapped.madvise(mmap.MADV_HUGEPAGE, first, whole)
    return everything[first : first + size]
