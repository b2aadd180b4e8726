"""Threads that share the work of compiled functions: they spin briefly for a job, then sleep."""

from __future__ import annotations

import threading
import weakref
from threading import Lock

import numpy as np
from torch import Tensor

from preheat.backends.cpu.llvm.kinds import COUNTERS, FRAME, FUNCTION, JOB, LINE, POSTED, TAKEN
from preheat.backends.cpu.llvm.machine import Code
from preheat.backends.cpu.llvm.memory import zeros

SPINS = 4_000
"""Empty turns before a thread sleeps: one to two milliseconds. All but the first 500 turns yield the processor."""

_WORDS = 64
_ROWS = FRAME["rows"]
_ENDED = -1
_END_SECONDS = 1.0


class _Shared:
    """The frame of a step and the sleep of its threads. Threads know this object alone, so that a team can go.

    A sleeping thread waits for a lock of its own: no other thread takes its wake-up, and an early wake-up is kept.
    """

    def __init__(self, code: Code, threads: int) -> None:
        self.code, self.frame = code, zeros(_WORDS, np.int64)
        self.counters = zeros(COUNTERS * LINE, np.int64)
        self.frame[FRAME["counters"]] = self.counters.ctypes.data
        self.address = self.frame.ctypes.data
        self.asleep, self._locks = set[int](), [Lock() for _ in range(threads)]
        self.kept: object = None
        for lock in self._locks:
            lock.acquire()

    def work(self, number: int) -> None:
        """Take part in jobs, as thread ``number``, until the team ends."""
        seen = 0
        while (seen := self.code.work(self.address, number, SPINS, seen)) != _ENDED:
            self.sleep(number, seen)

    def sleep(self, number: int, seen: int) -> None:
        """Sleep, as thread ``number``, until a list of jobs is posted, or a job follows the job ``seen``."""
        self.asleep.add(number)
        if self.frame[JOB] == seen and self.frame[POSTED] == self.frame[TAKEN]:
            self._locks[number].acquire()
        self.asleep.discard(number)

    def wake(self) -> None:
        """Wake the threads that sleep or are about to sleep. Two threads never call this at once."""
        for number in tuple(self.asleep):
            if self._locks[number].locked():
                self._locks[number].release()


class Team:
    """The frame of a step, ``threads`` threads, the caller's among them, and the code that they run.

    The caller takes part in every job and needs no other thread to end it: a thread claims the units that it runs.
    A posted list of jobs may run while the caller does other work. The threads end with the team.

    ``kept`` holds the memory that functions read before they claim a unit: a late thread may read it after the job.
    """

    posted = False

    def __init__(self, code: Code, threads: int, kept: object = None) -> None:
        self.code, self.threads, self._shared = code, threads, _Shared(code, threads)
        self._frame = self._shared.frame
        self._frame[FRAME["threads"]] = threads
        others = [
            threading.Thread(target=self._shared.work, args=(number,), name=f"llvm-{number}", daemon=True)
            for number in range(1, threads)
        ]
        for thread in others:
            thread.start()
        weakref.finalize(self, _end, self._shared, others, kept)

    def set(self, name: str, value: int) -> None:
        """Set a field of the frame."""
        self._frame[FRAME[name]] = value

    def point(self, name: str, tensor: Tensor) -> None:
        """Set a field of the frame to a tensor's address."""
        self._frame[FRAME[name]] = tensor.data_ptr()

    def run(self, function: int, layer: int, rows: int) -> None:
        """Run a function of ``rows`` rows with the frame of a layer; return when its results are there."""
        self._begin(rows)
        self.code.start(self._shared.address, function, layer, 0)

    def run_all(self, jobs: int, count: int, rows: int) -> None:
        """Run ``count`` functions one after another; ``jobs`` is the address of listed jobs."""
        self._begin(rows)
        self.code.run(self._shared.address, jobs, count, 0)

    def post(self, jobs: int, count: int) -> None:
        """Let the threads run listed jobs; :meth:`join` waits for them. No field of the frame may change until then."""
        assert not self.posted, "a list of jobs is posted already"
        self.posted = True
        self.code.post(self._shared.address, jobs, count)
        if self._shared.asleep:
            self._shared.wake()

    def join(self) -> None:
        """Take part in the posted list until all its jobs are done. Return at once if no list is posted."""
        if self.posted:
            self.code.join(self._shared.address)
            self.posted = False

    def _begin(self, rows: int) -> None:
        assert not self.posted, "a posted list of jobs is not joined yet"
        self._frame[_ROWS] = rows
        if self._shared.asleep:
            self._shared.wake()


def _end(shared: _Shared, threads: list[threading.Thread], kept: object) -> None:
    """End the threads: a job without a function. Wait a second for each; a thread without a processor ends later.

    Such a thread may still read the last job's layer, so it takes over what is ``kept``.
    """
    shared.kept = kept
    shared.frame[FUNCTION] = 0
    shared.frame[JOB] += 1
    shared.wake()
    for thread in threads:
        if thread is not threading.current_thread():  # a garbage collection may run in each thread
            thread.join(_END_SECONDS)
