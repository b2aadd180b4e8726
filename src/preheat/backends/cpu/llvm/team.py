"""Threads that share the work of compiled functions: they spin briefly for a job, then sleep."""

from __future__ import annotations

import threading
import weakref

import numpy as np
from torch import Tensor

from preheat.backends.cpu.llvm.kinds import COUNTERS, FRAME, FUNCTION, JOB, LAYER, LINE
from preheat.backends.cpu.llvm.machine import Code
from preheat.backends.cpu.llvm.memory import zeros

SPINS = 4_000
"""Empty turns before a thread sleeps: one to two milliseconds. All but the first 500 turns yield the processor."""

_WORDS = 64
_ROWS = FRAME["rows"]
_ENDED = -1
_END_SECONDS = 1.0


class _Shared:
    """The frame of a step and the sleep of its threads. Threads know this object alone, so that a team can go."""

    def __init__(self, code: Code) -> None:
        self.code, self.frame = code, zeros(_WORDS, np.int64)
        self.counters = zeros(COUNTERS * LINE, np.int64)
        self.frame[FRAME["counters"]] = self.counters.ctypes.data
        self.address = self.frame.ctypes.data
        self.wake, self.asleep, self._counting = threading.Event(), 0, threading.Lock()

    def work(self, number: int) -> None:
        """Take part in jobs, as thread ``number``, until the team ends."""
        seen = 0
        while (seen := self.code.work(self.address, number, SPINS, seen)) != _ENDED:
            self._sleep(seen)

    def _sleep(self, seen: int) -> None:
        """Sleep until a job follows the job ``seen``."""
        self.wake.clear()
        with self._counting:
            self.asleep += 1
        if self.frame[JOB] == seen:
            self.wake.wait()
        with self._counting:
            self.asleep -= 1


class Team:
    """The frame of a step, ``threads`` threads, the caller's among them, and the code that they run.

    The caller takes part in every job and needs no other thread to end it: a thread claims the units that it runs.
    The threads end with the team.
    """

    def __init__(self, code: Code, threads: int) -> None:
        self.code, self.threads, self._shared = code, threads, _Shared(code)
        self._frame = self._shared.frame
        self._frame[FRAME["threads"]] = threads
        others = [
            threading.Thread(target=self._shared.work, args=(number,), name=f"llvm-{number}", daemon=True)
            for number in range(1, threads)
        ]
        for thread in others:
            thread.start()
        weakref.finalize(self, _end, self._shared, others)

    def set(self, name: str, value: int) -> None:
        """Set a field of the frame."""
        self._frame[FRAME[name]] = value

    def point(self, name: str, tensor: Tensor) -> None:
        """Set a field of the frame to a tensor's address."""
        self._frame[FRAME[name]] = tensor.data_ptr()

    def run(self, function: int, layer: int, rows: int) -> None:
        """Run a function of ``rows`` rows with the frame of a layer; return when its results are there."""
        self._begin(rows)
        self.code.start(self._shared.address, function, layer)

    def run_all(self, jobs: int, count: int, rows: int) -> None:
        """Run ``count`` functions one after another; ``jobs`` is the address of (function, layer's frame) pairs."""
        self._begin(rows)
        self.code.run(self._shared.address, jobs, count)

    def _begin(self, rows: int) -> None:
        self._frame[_ROWS] = rows
        if self._shared.asleep:
            self._shared.wake.set()


def _end(shared: _Shared, threads: list[threading.Thread]) -> None:
    """End the threads: a job without a function."""
    shared.frame[FUNCTION] = shared.frame[LAYER] = 0
    shared.frame[JOB] += 1
    shared.wake.set()
    for thread in threads:
        thread.join(_END_SECONDS)
