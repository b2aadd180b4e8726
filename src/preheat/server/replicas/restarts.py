"""The rule when a dead engine is started again. Nothing here waits."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0
"""The time in which restarts are counted."""

MOST_FAILED = 2
"""Starts in a row that may fail."""


class Restarts:
    """The restarts of one engine: at most ``most`` within :data:`WINDOW_SECONDS`.

    An engine that fails :data:`MOST_FAILED` times in a row to become ready is not started again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times = deque[float]()
        self._failed = 0

    def allowed(self, now: float) -> bool:
        """Return whether the engine may be started again."""
        while self._times and now - self._times[0] > WINDOW_SECONDS:
            self._times.popleft()
        return len(self._times) < self._most and self._failed < MOST_FAILED

    def begin(self, now: float) -> None:
        """Note a restart; it counts as failed until :meth:`succeed`."""
        self._times.append(now)
        self._failed += 1

    def succeed(self) -> None:
        """Note that the engine is ready."""
        self._failed = 0
