"""Outstanding work of one engine, with times: heartbeats, results of steps, receipts of requests."""

from __future__ import annotations

import time

from preheat.core import FromEngine
from preheat.server.replicas.member import Transport
from preheat.server.replicas.replicas import Replicas


class EngineWatch:
    """Watch over one replica, given by its number.

    ``stalled`` is the reason why it gets no requests, if any.
    """

    def __init__(self, replicas: Replicas, replica: int) -> None:
        self._replicas, self.replica = replicas, replica
        self._heard_at = time.monotonic()
        self._offered_at: float | None = None
        self.stalled: str | None = None

    @property
    def _transport(self) -> Transport:
        return self._replicas.members[self.replica].process.transport

    def begin(self) -> None:
        """Note that the engine's process starts again."""
        self.stalled = None
        self.rest()

    @property
    def behind(self) -> bool:
        """Whether messages of the engine wait for the next :meth:`receive`."""
        return self._replicas.members[self.replica].behind

    def receive(self) -> list[FromEngine]:
        """Return the engine's messages; any message proves that the engine runs."""
        untaken = len(self._transport.untaken)
        messages = self._replicas.receive(self.replica)
        if messages or len(self._transport.untaken) != untaken:
            self._heard_at, self.stalled = time.monotonic(), None
        return messages

    def is_silent(self, limit: float) -> bool:
        """Return whether the last heartbeat is older than ``limit`` seconds."""
        if not self._replicas.members[self.replica].alive:
            return False
        beat_at = self._transport.beat_at
        return beat_at is not None and time.monotonic() - beat_at > limit

    def rest(self) -> None:
        """Note that the engine has no outstanding work now."""
        self._heard_at, self._offered_at = time.monotonic(), None

    def overdue(self, step: float, hand_over: float) -> tuple[bool, bool]:
        """Return whether a step is overdue, and whether a hand-over of requests is.

        A step is overdue after ``step`` seconds. A hand-over is overdue if the engine is idle and took no request for
        ``hand_over`` seconds.
        """
        now, unfinished = time.monotonic(), self._replicas.router.requests(self.replica)
        if not unfinished:
            self.rest()
            return False, False
        if {id for id, _ in self._transport.untaken} >= unfinished:
            self._offered_at = self._offered_at or now
        else:
            self._offered_at = None
        return now - self._heard_at > step, self._offered_at is not None and now - self._offered_at > hand_over

    def late(self, hand_over: float) -> list[int]:
        """Return the requests that the engine has not taken within ``hand_over`` seconds."""
        now, unfinished = time.monotonic(), self._replicas.router.requests(self.replica)
        return [id for id, at in self._transport.untaken if id in unfinished and now - at > hand_over]
