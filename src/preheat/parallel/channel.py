"""Messages from the leader to all other ranks.

All ranks receive them in one order. On one node they go through a ring in shared memory. Its slots have a sequence
number and a fixed size; a longer message takes several in a row. A slot is written only when every rank has read its
last content. So a rank that is behind slows the leader down, and no message is lost. A waiting process looks often at
first and less often later, so an idle engine costs next to nothing. Ranks on several nodes receive the same bytes, each
through its own connection. No torch here.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from preheat.utils.shared_files import mapped

SLOTS = 64
SLOT_BYTES = 32 << 10
_HEADER = 24  # sequence number, bytes in the slot, whether more follow

_SPINS = 100  # looks, giving way to other processes, before the first nap
_FIRST_NAP, _LAST_NAP, _GROWTH = 2e-5, 2e-3, 1.05
_LOOKS = 256  # between checks that the engine is not over


def wait(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait until ``ready()``; ``check`` raises if the engine is over."""
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


class Sender(Protocol):
    """The leader's end.

    Any thread may send; messages of one thread arrive in its order.
    """

    def send(self, message: Any) -> None:
        """Send ``message``; wait for ranks that are too far behind.

        Raises RankDied, or OSError where a connection has ended.
        """


class Receiver(Protocol):
    """Another rank's end."""

    def receive(self) -> Any:
        """Wait for the next message and return it."""


class _Ring:
    """The ring of ``world`` ranks.

    ``read`` int64 [ranks] is the last message that each has read.
    """

    def __init__(self, folder: Path, world: int) -> None:
        slots = SLOTS * (_HEADER + SLOT_BYTES)
        data = mapped(folder / "commands", slots + 8 * world)
        self._headers = data[: SLOTS * _HEADER].view(np.int64).reshape(SLOTS, 3)
        self._slots = data[SLOTS * _HEADER : slots].reshape(SLOTS, SLOT_BYTES)
        self.read = data[slots:].view(np.int64)
        self._next, self._fence = 1, threading.Lock()


class RingSender(_Ring):
    """A :class:`Sender` through the ring; ``check`` raises if the engine is over."""

    def __init__(self, folder: Path, world: int, check: Callable[[], None]) -> None:
        super().__init__(folder, world)
        self._turn, self._check = threading.Lock(), check

    def send(self, message: Any) -> None:
        data = np.frombuffer(pickle.dumps(message, protocol=5), np.uint8)
        with self._turn:
            for start in range(0, len(data), SLOT_BYTES):
                self._put(data[start : start + SLOT_BYTES], more=start + SLOT_BYTES < len(data))

    def _put(self, data: np.ndarray, more: bool) -> None:
        number = self._next
        wait(lambda: bool((self.read[1:] > number - 1 - SLOTS).all()), self._check)
        slot = number % SLOTS
        self._slots[slot, : len(data)] = data
        self._headers[slot, 1:] = len(data), more
        with self._fence:  # the data becomes visible before its number
            self._headers[slot, 0] = number
        self._next += 1


class RingReceiver(_Ring):
    """The :class:`Receiver` of ``rank``.

    The end of an engine kills its waiting ranks.
    """

    def __init__(self, folder: Path, world: int, rank: int) -> None:
        super().__init__(folder, world)
        self._rank = rank

    def receive(self) -> Any:
        parts = []
        while True:
            wait(self._arrived, lambda: None)
            slot = self._next % SLOTS
            with self._fence:
                parts.append(self._slots[slot, : self._headers[slot, 1]].tobytes())
            more = bool(self._headers[slot, 2])
            self.read[self._rank] = self._next
            self._next += 1
            if not more:
                return pickle.loads(b"".join(parts))

    def _arrived(self) -> bool:
        return bool(self._headers[self._next % SLOTS, 0] == self._next)


class LineSender:
    """A :class:`Sender` through connections to all ranks.

    A full buffer of one rank blocks it.
    """

    def __init__(self, lines: Sequence[Connection]) -> None:
        self._lines, self._turn = lines, threading.Lock()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        with self._turn:
            for line in self._lines:
                line.send_bytes(data)


class LineReceiver:
    """A :class:`Receiver` through a connection.

    Raises EOFError or OSError where the connection has ended.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line

    def receive(self) -> Any:
        return pickle.loads(self._line.recv_bytes())
