"""When to prepare the next step: so late that who arrives meanwhile takes part, so early that the device never waits.

With a step in flight the next one could be prepared at once, but would then be closed to all who arrive while the one
in flight runs: they would wait for both. So the loop listens on until the step in flight is about to end, as far as can
be told from what steps of its shape took before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable

LEAST = 0.0005
"""Seconds kept in hand, beside twice what preparing a step took."""
EASE = 1.05
"""What a shape's seconds, or the preparation's, may grow or fade by from one step to the next: the shortest of late
counts, for to be early costs little and to be late leaves the device idle."""


class LaunchTimer:
    """Told of every step by the loop. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._took: dict[Hashable, float] = {}
        self._flying: deque[tuple[Hashable, float]] = deque()
        self._begun = self._ended = self._preparation = 0.0

    def preparing(self) -> None:
        """The next step begins to be prepared."""
        self._begun = self._clock()

    def launched(self, shape: Hashable) -> None:
        """It is in flight, behind those that are."""
        now = self._clock()
        self._preparation = max(now - self._begun, self._preparation / EASE)
        self._flying.append((shape, now))

    def settled(self) -> None:
        """The oldest step in flight has ended."""
        shape, launched = self._flying.popleft()
        now = self._clock()
        took = now - max(launched, self._ended)
        self._took[shape] = min(took, self._took.get(shape, took) * EASE)
        self._ended = now

    def spare(self) -> float:
        """Seconds until the next step must be prepared: 0 with more or fewer steps than one in flight, or with one of a
        shape that has never run.
        """
        if len(self._flying) != 1:
            return 0.0
        shape, launched = self._flying[0]
        took = self._took.get(shape)
        if took is None:
            return 0.0
        end = max(launched, self._ended) + took
        return max(end - 2 * self._preparation - LEAST - self._clock(), 0.0)
