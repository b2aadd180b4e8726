"""The time to prepare the next step: late, but not too late.

If the next step were prepared as soon as one is in flight, requests that arrive meanwhile would wait for both. So the
loop keeps listening until the step in flight is about to end, estimated from earlier steps of the same bucket. Then new
requests can join the next step. But the device must not run out of work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable

LEAST = 0.0005
"""Seconds of margin, added to twice the preparation time of a step."""
EASE = 1.05
"""The factor by which estimates change in a step.

The estimate for a bucket may grow by it, and the preparation's estimate may fade by it. The shortest recent time of a
bucket counts: being early costs little, being late leaves the device idle.
"""


class LaunchTimer:
    """Estimator of the time to prepare the next step.

    The loop reports its steps. ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._took: dict[Hashable, float] = {}
        self._in_flight: deque[tuple[Hashable, float]] = deque()
        self._begun = self._ended = self._preparation = 0.0

    def preparing(self) -> None:
        """Note that the preparation of the next step begins."""
        self._begun = self._clock()

    def launched(self, bucket: Hashable) -> None:
        """Note that the prepared step is in flight, behind the steps launched before."""
        now = self._clock()
        self._preparation = max(now - self._begun, self._preparation / EASE)
        self._in_flight.append((bucket, now))

    def finished(self) -> None:
        """Note that the oldest step in flight has ended."""
        bucket, launched = self._in_flight.popleft()
        now = self._clock()
        took = now - max(launched, self._ended)
        self._took[bucket] = min(took, self._took.get(bucket, took) * EASE)
        self._ended = now

    def running(self) -> float:
        """Return the seconds since the oldest step in flight began on the device.

        It is 0 without a step in flight. May be called in any thread.
        """
        try:
            _, launched = self._in_flight[0]
        except IndexError:
            return 0.0
        return self._clock() - max(launched, self._ended)

    def spare(self) -> float:
        """Return the seconds until the next step must be prepared.

        It is 0 unless exactly one step is in flight and its bucket has run before.
        """
        if len(self._in_flight) != 1:
            return 0.0
        bucket, launched = self._in_flight[0]
        took = self._took.get(bucket)
        if took is None:
            return 0.0
        end = max(launched, self._ended) + took
        return max(end - 2 * self._preparation - LEAST - self._clock(), 0.0)
