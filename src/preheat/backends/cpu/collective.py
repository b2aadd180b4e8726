"""Ranks on one host exchange tensors through shared memory.

Each rank has two places in a file that all of them map, used in turn, and a counter. To gather, a rank copies its
tensor into its place, adds one to its counter, waits until every counter is as far, and reads all places. Whoever
writes a place again has seen that all others have passed the gathering in between, and so have read it. Only bytes are
moved, so there is no order of arrival in what is read.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PLACE_BYTES = 1 << 20
"""What is larger is gathered in parts."""

_LINE = 64  # bytes of a counter, so that ranks do not write into one cache line
_SPINS = 50  # looks at a counter, giving way to other processes, before it sleeps
_NAP_SECONDS = 2e-5
_LOOKS = 256  # between checks that all ranks live


class SharedMemory:
    """Rank ``rank`` of ``world``, who share a file in ``folder``. ``check`` raises where a rank has died."""

    def __init__(self, folder: Path, rank: int, world: int, check: Callable[[], None]) -> None:
        self.rank, self.world, self._check = rank, world, check
        self._epoch, self._fence = 0, threading.Lock()
        data = _mapped(folder / "gather", world * _LINE + 2 * world * PLACE_BYTES) if world > 1 else None
        if data is None:
            return
        self._counters = data[: world * _LINE].view(np.int64)[:: _LINE // 8]
        self._places = torch.from_numpy(data[world * _LINE :].reshape(2, world, PLACE_BYTES))

    def gather(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x.unsqueeze(0)
        mine = x.contiguous().view(-1).view(torch.uint8)
        found = mine.new_empty(self.world, len(mine))
        for start in range(0, len(mine), PLACE_BYTES):
            self._exchange(mine[start : start + PLACE_BYTES], found[:, start : start + PLACE_BYTES])
        return found.view(x.dtype).view(self.world, *x.shape)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See :class:`preheat.backends.base.Link`."""
        if self.world > 1:
            mine = x.view(-1).view(torch.uint8)
            for start in range(0, len(mine), PLACE_BYTES):
                self._pass(mine[start : start + PLACE_BYTES], source)
        return x

    def abort(self) -> None:
        """Whoever waits is told by ``check``."""

    def _exchange(self, mine: Tensor, found: Tensor) -> None:
        """Read what all ranks have written, [world, bytes]."""
        places = self._next_places()
        places[self.rank, : len(mine)].copy_(mine)
        self._meet()
        found.copy_(places[:, : len(mine)])

    def _pass(self, data: Tensor, source: int) -> None:
        """The same of one rank's bytes alone."""
        place = self._next_places()[source, : len(data)]
        if self.rank == source:
            place.copy_(data)
        self._meet()
        if self.rank != source:
            data.copy_(place)

    def _next_places(self) -> Tensor:
        self._epoch += 1
        return self._places[self._epoch % 2]

    def _meet(self) -> None:
        """Wait until all have written."""
        with self._fence:  # what was written is seen before the counter is
            self._counters[self.rank] = self._epoch
        for rank in range(self.world):
            self._wait(rank)

    def _wait(self, rank: int) -> None:
        looks = 0
        while self._counters[rank] < self._epoch:
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
            if not looks % _LOOKS:
                self._check()


def _mapped(path: Path, size: int) -> np.ndarray:
    """The bytes of a file that several processes map, zeros at first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
    finally:
        os.close(descriptor)
