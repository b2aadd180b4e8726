"""Messages from the leader to all other ranks, through shared memory, with a sequence number each.

The ring has slots of fixed size; a longer message takes several in a row. A slot is written only when every rank has
read what it held before, so a rank that is behind slows the leader down instead of losing anything. Whoever waits looks
often at first and ever more seldom, so that an idle engine costs next to nothing. No torch here.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from preheat.parallel.shared import Board, mapped

SLOTS = 64
SLOT_BYTES = 32 << 10
_HEADER = 24  # sequence number, bytes in the slot, whether more follow

_SPINS = 100  # looks, giving way to other processes, before the first nap
_FIRST_NAP, _LAST_NAP, _GROWTH = 2e-5, 2e-3, 1.05
_LOOKS = 256  # between checks that the engine is not over


def wait(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    """Until ``ready()``; ``check`` raises if that will never be."""
    looks, nap = 0, _FIRST_NAP
    while not ready():
        looks += 1
        if looks < _SPINS:
            os.sched_yield()
        else:
            time.sleep(nap)
            nap = min(nap * _GROWTH, _LAST_NAP)
        if not looks % _LOOKS:
            check()


class _Ring:
    def __init__(self, folder: Path, board: Board) -> None:
        data = mapped(folder / "commands", SLOTS * (_HEADER + SLOT_BYTES))
        self._headers = data[: SLOTS * _HEADER].view(np.int64).reshape(SLOTS, 3)
        self._slots = data[SLOTS * _HEADER :].reshape(SLOTS, SLOT_BYTES)
        self.board, self._next, self._fence = board, 1, threading.Lock()


class Sender(_Ring):
    """The leader's end. Any thread may send; messages of one arrive in its order."""

    def __init__(self, folder: Path, board: Board) -> None:
        super().__init__(folder, board)
        self._turn = threading.Lock()

    def send(self, message: Any) -> int:
        """Returns the message's number: that of its last slot."""
        data = np.frombuffer(pickle.dumps(message, protocol=5), np.uint8)
        with self._turn:
            for start in range(0, len(data), SLOT_BYTES):
                self._put(data[start : start + SLOT_BYTES], more=start + SLOT_BYTES < len(data))
            return self._next - 1

    def _put(self, data: np.ndarray, more: bool) -> None:
        number = self._next
        wait(lambda: bool((self.board.read[1:] > number - 1 - SLOTS).all()), self.board.check)
        slot = number % SLOTS
        self._slots[slot, : len(data)] = data
        self._headers[slot, 1:] = len(data), more
        with self._fence:  # what was written is seen before its number is
            self._headers[slot, 0] = number
        self._next += 1


class Receiver(_Ring):
    """Another rank's end."""

    def receive(self) -> Any:
        """The next message; waits for it."""
        parts = []
        while True:
            wait(self._arrived, self.board.check)
            slot = self._next % SLOTS
            with self._fence:
                parts.append(self._slots[slot, : self._headers[slot, 1]].tobytes())
            more = bool(self._headers[slot, 2])
            self.board.read[self.board.rank] = self._next
            self._next += 1
            if not more:
                return pickle.loads(b"".join(parts))

    def _arrived(self) -> bool:
        return bool(self._headers[self._next % SLOTS, 0] == self._next)
