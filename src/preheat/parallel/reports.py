"""Reports of a rank to the leader.

They go through the connection that every rank has. A rank reports heartbeats, answers, cold events, the outcomes
of what it does beside its steps, and the reason of a failure. No torch here.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from preheat.errors import PreheatError

T = TypeVar("T")


def outcome_of(run: Callable[[], T]) -> T | PreheatError:
    """Return the result of ``run``, or its error as a PreheatError."""
    try:
        return run()
    except PreheatError as error:
        return error
    except Exception as error:
        return PreheatError(f"{type(error).__name__}: {error}")


class Reporter:
    """A rank's end; any thread may report.

    If the leader has gone, nothing is sent: this process ends soon.
    """

    def __init__(self, line: Connection) -> None:
        self._line, self._turn = line, threading.Lock()

    def beat(self) -> None:
        self._tell("beat")

    def answer(self, answer: object) -> None:
        """Report the result of a call, or its WireError."""
        self._tell("answer", answer)

    def outcome(self, number: int, answer: object) -> None:
        """Report the outcome of what the rank does beside its steps under this number."""
        self._tell("outcome", number, answer)

    def cold(self, detail: str) -> None:
        """Report a cold event."""
        self._tell("cold", detail)

    def fail(self, why: str) -> None:
        """Report that this rank cannot go on."""
        self._tell("fail", why)

    def _tell(self, kind: str, *said: object) -> None:
        with self._turn, contextlib.suppress(OSError):
            self._line.send_bytes(pickle.dumps((kind, said)))


class Heard:
    """The leader's end: all reports of a rank so far.

    ``heard`` is the time of its last heartbeat, None before the first. ``outcomes`` are those of what it does beside
    its steps, by number.
    """

    def __init__(self, line: Connection) -> None:
        self.line, self.open = line, True
        self.heard: float | None = None
        self.failure = ""
        self.cold_events, self.last_cold_event = 0, ""
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.outcomes: dict[int, Any] = {}
        self._hear: dict[str, Callable[..., None]] = {
            "beat": self._beat,
            "answer": self.answers.put,
            "outcome": self.outcomes.__setitem__,
            "cold": self._cold,
            "fail": self._fail,
        }

    def listen(self) -> None:
        """Take all arrived reports.

        ``open`` becomes False once no more can come.
        """
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
