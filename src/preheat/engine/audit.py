"""The audit: an engine reads its own memory between steps, and runs one check of the boot in turn. No torch here.

A pass reads every slice once. Slices are spread over ``every`` seconds, one between two steps at most, so a step waits
for one slice only. A request for a pass reads without pauses. If nothing is in flight at the end of a pass, the next
check of the boot runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from preheat.core import AuditStats

Done = Callable[[], None]


class Memory(Protocol):
    """Slices of memory with their digests. A slice that differs raises MemoryFault."""

    @property
    def pending(self) -> bool:
        """Whether a slice has no digest yet."""

    def __len__(self) -> int:
        """Return the number of slices of a pass, known from :meth:`begin` on."""

    def begin(self) -> None:
        """Choose the slices of a pass."""

    def check(self, index: int) -> None:
        """Read a slice again."""

    def take(self) -> bool:
        """Take the digest of one slice that has none yet. Return False if there is none."""

    def retake(self) -> None:
        """Take all digests again: the contents were replaced."""

    def suspend(self) -> None:
        """Read nothing until :meth:`retake`: memory is released."""

    def adapters_changed(self) -> None:
        """Take the digests of the adapter slots again, in the next turns."""


class Audit:
    """The audit of ``memory`` every ``every`` seconds. ``rows`` are the checks of the boot."""

    def __init__(
        self,
        memory: Memory,
        every: float,
        rows: Sequence[Callable[[], None]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory, self.stats = memory, AuditStats()
        self._every, self._rows, self._clock = every, rows, clock
        self._asked: list[Done] = []
        self._row, self._suspended = 0, False
        self._restart()

    def patience(self) -> float | None:
        """Return the seconds for which an idle engine may wait until the next turn; None without one."""
        if self._suspended:
            return None
        return 0.0 if self.memory.pending else max(self._due() - self._clock(), 0.0)

    def ask(self, done: Done) -> None:
        """Read everything now, without pauses. ``done`` is called after the pass."""
        if not self._asked:
            self._restart()
        self._asked.append(done)

    def suspend(self) -> None:
        """Read nothing until :meth:`retake`. Passes that were asked for end here."""
        self._suspended = True
        self.memory.suspend()
        self._answer()

    def retake(self) -> None:
        """Take the digests of replaced contents."""
        self.memory.retake()
        self._suspended = False
        self._restart()

    def turn(self, idle: bool) -> None:
        """Read one slice, if one is due. ``idle``: nothing is in flight. Raise MemoryFault for one that differs."""
        if self._suspended or not (self.memory.pending or self._clock() >= self._due()):
            return
        started = time.perf_counter()
        try:
            if not self.memory.take():
                self._read(idle)
        except Exception:
            self.stats.faults += 1
            raise
        finally:
            spent = time.perf_counter() - started
            self.stats.seconds += spent
            self.stats.slowest = max(self.stats.slowest, spent)

    def _read(self, idle: bool) -> None:
        """Check one slice; end the pass behind the last one."""
        if not self._at:
            self.memory.begin()
        if self._at < len(self.memory):
            self.memory.check(self._at)
            self._at += 1
            self.stats.slices += 1
        if self._at >= len(self.memory):
            self._end(idle)

    def _end(self, idle: bool) -> None:
        if idle and self._rows:
            self._rows[self._row]()
            self._row = (self._row + 1) % len(self._rows)
            self.stats.checks += 1
        self.stats.passes += 1
        self._answer()
        self._restart()

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        for done in asked:
            done()

    def _restart(self) -> None:
        self._at, self._begun = 0, self._clock()

    def _due(self) -> float:
        """Return the time of the next slice; a pass that was asked for does not wait."""
        if self._asked:
            return 0.0
        share = (self._at + 1) / (len(self.memory) + 1)
        return self._begun + self._every * share
