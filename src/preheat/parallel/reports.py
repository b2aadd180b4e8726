"""What a rank tells the leader, by the connection that every one of them has: that it lives, what it answers, what was
cold, what became of an adapter, why it fails. No torch here.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


class Reporter:
    """A rank's end. Any thread may report. A leader who has gone is told nothing: this process ends soon."""

    def __init__(self, line: Connection) -> None:
        self._line, self._turn = line, threading.Lock()

    def beat(self) -> None:
        self._tell("beat")

    def answer(self, answer: object) -> None:
        """What a call returned, or the WireError that it ended with."""
        self._tell("answer", answer)

    def adapter(self, number: int, answer: object) -> None:
        """What became of the reading with this number."""
        self._tell("adapter", number, answer)

    def cold(self, detail: str) -> None:
        """A cold event was noticed."""
        self._tell("cold", detail)

    def fail(self, why: str) -> None:
        """This rank cannot go on."""
        self._tell("fail", why)

    def _tell(self, kind: str, *said: object) -> None:
        with self._turn, contextlib.suppress(OSError):
            self._line.send_bytes(pickle.dumps((kind, said)))


class Heard:
    """The leader's end: what a rank has said so far. ``heard`` is when its last heartbeat came, None before the first;
    ``adapters`` are its answers by the number of the reading.
    """

    def __init__(self, line: Connection) -> None:
        self.line, self.open = line, True
        self.heard: float | None = None
        self.failure = ""
        self.cold_events, self.last_cold_event = 0, ""
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.adapters: dict[int, Any] = {}
        self._hear: dict[str, Callable[..., None]] = {
            "beat": self._beat,
            "answer": self.answers.put,
            "adapter": self.adapters.__setitem__,
            "cold": self._cold,
            "fail": self._fail,
        }

    def listen(self) -> None:
        """Take what has arrived; not ``open`` once there will be no more."""
        try:
            while self.open and self.line.poll():
                kind, said = pickle.loads(self.line.recv_bytes())
                self._hear[kind](*said)
        except (EOFError, OSError):
            self.open = False

    def _beat(self) -> None:
        self.heard = time.monotonic()

    def _cold(self, detail: str) -> None:
        self.last_cold_event = detail
        self.cold_events += 1

    def _fail(self, why: str) -> None:
        self.failure = why
