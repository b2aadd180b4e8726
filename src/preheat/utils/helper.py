"""Work on clients' data in processes with bounded time and memory.

The cost of an image or a chat template is not known beforehand. A :class:`Helper` does one job after the other in a
child process. A job that uses too much CPU time or memory, or that nobody wants any more, ends with its process. The
next job has a new process. The child ends with its parent.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue
from typing import Literal

from preheat.utils.children import child_environment, python_command

Work = Callable[[bytes], bytes]
"""A function that does a job: from bytes to bytes."""

Reason = Literal["time", "memory", "given up", "died"]

_STDIN = 0
_LAST_SECONDS = 1.0  # for a child to exit once its line is closed
_NO_MEMORY = 77  # the exit status of a child without memory
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1",
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Settings that give freed memory back to the system, and use one thread."""


class HelperEnded(Exception):
    """The process ended in the middle of a job, for this ``reason``."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True)
class Kind:
    """The kind of a helper.

    ``entry`` ("module:function") makes the work from ``config`` in the child. A job may use ``cpu_seconds`` of CPU time
    and ``memory`` bytes beyond the idle child's.
    """

    entry: str
    config: bytes
    cpu_seconds: float
    memory: int


class Helper:
    """One process of a ``kind``, for one job at a time; the first job starts it."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._lock = threading.Lock()  # guards the next two
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up: bool | None = None  # None: no job
        self._line: Connection | None = None
        self._end: Callable[[], object] = _nothing

    def run(self, job: bytes) -> bytes:
        """Return the result of ``job``. Raises HelperEnded."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._given_up = False
        assert self._line is not None
        try:
            self._line.send_bytes(job)
            return self._line.recv_bytes()
        except (EOFError, OSError):
            raise HelperEnded(self._ended()) from None
        finally:
            with self._lock:
                self._given_up = None

    def give_up(self) -> None:
        """End the running job, if there is one: its ``run`` raises HelperEnded. Call it from another thread."""
        with self._lock:
            if self._given_up is False and self._process is not None:
                self._given_up = True
                self._process.kill()

    def _start(self) -> None:
        ours, theirs = Pipe()
        kind = self._kind
        words = [kind.entry, str(theirs.fileno()), str(kind.cpu_seconds), str(kind.memory)]
        self._process = subprocess.Popen(
            python_command("preheat.utils.helper", *words, warns=False),
            stdin=subprocess.PIPE,  # closes with this process; the child notices
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C does not reach it
            env=child_environment(_ENVIRONMENT),
        )
        theirs.close()
        self._line = ours
        self._end()  # of the process before
        self._end = weakref.finalize(self, _end, self._process, ours)
        with suppress(OSError):  # the child has left already; the job will notice
            ours.send_bytes(kind.config)

    def _ended(self) -> Reason:
        """Return the reason why the process ended, or ends: its line is closed."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_SECONDS)
        self._end()
        if self._given_up:
            return "given up"
        status = self._process.returncode
        return {-signal.SIGPROF: "time", _NO_MEMORY: "memory"}.get(status, "died")  # type: ignore[return-value]


def _end(process: subprocess.Popen[bytes], line: Connection) -> None:
    process.kill()
    process.wait()
    line.close()
    if process.stdin is not None:
        process.stdin.close()


def _nothing() -> object:
    """Do nothing: there is no process yet."""


class Helpers:
    """``count`` helpers of a ``kind``; the one used last is taken first."""

    def __init__(self, kind: Kind, count: int) -> None:
        self.count = count
        self._idle: LifoQueue[Helper] = LifoQueue()
        for _ in range(count):
            self._idle.put(Helper(kind))

    @contextmanager
    def lend(self) -> Iterator[Helper]:
        """Wait for an idle helper, and lend it."""
        helper = self._idle.get()
        try:
            yield helper
        finally:
            self._idle.put(helper)

    def run(self, job: bytes) -> bytes:
        """Return the result of ``job`` from the next idle helper. Raises HelperEnded."""
        with self.lend() as helper:
            return helper.run(job)

    def run_on_each(self, job: bytes) -> list[bytes]:
        """Return the results of ``job`` from all helpers at once; afterwards, all are warm. Raises HelperEnded."""
        with ThreadPoolExecutor(self.count) as threads:
            together = threading.Barrier(self.count)  # so that no helper is taken twice

            def run() -> bytes:
                with self.lend() as helper:
                    together.wait()
                    return helper.run(job)

            return [each.result() for each in [threads.submit(run) for _ in range(self.count)]]


# --- the child ---


def main() -> None:
    """Do the jobs that come over the line, one after the other, until the parent leaves."""
    entry, line_number, cpu_seconds, memory = sys.argv[1:]
    threading.Thread(target=_leave_with_parent, daemon=True, name="parent-exit").start()
    line = Connection(int(line_number))
    module, _, function = entry.partition(":")
    make = getattr(importlib.import_module(module), function)
    work: Work = make(_heard(line))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(int(memory))
    try:
        while True:
            _do(work, line, float(cpu_seconds))
    except MemoryError:
        os._exit(_NO_MEMORY)


def _do(work: Work, line: Connection, cpu_seconds: float) -> None:
    """Do the next job. Beyond its CPU time a signal ends this process."""
    job = _heard(line)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    result = work(job)
    with _leaving():
        line.send_bytes(result)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _heard(line: Connection) -> bytes:
    """Return the next message."""
    with _leaving():
        return line.recv_bytes()


@contextmanager
def _leaving() -> Iterator[None]:
    """Exit without a word if the parent closes the line.

    A line that closes with a message unread is reset: the next call fails as a ConnectionError, not as EOFError.
    """
    try:
        yield
    except (EOFError, ConnectionError):
        os._exit(0)


def _leave_with_parent() -> None:
    while os.read(_STDIN, 1):
        pass
    os._exit(1)


def _limit_memory(more: int) -> None:
    """Allow ``more`` bytes of data than now, if the system can tell the present number."""
    status = Path("/proc/self/status")
    if status.exists():
        now = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = now * 1024 + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


if __name__ == "__main__":
    main()
