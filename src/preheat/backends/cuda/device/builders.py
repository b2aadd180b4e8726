"""Processes that compile kernels while a boot waits for them.

Triton's compiler is partly written in Python, and Python's threads take turns. So one process compiles hardly more than
two kernels at a time, on however many cores. Each builder is a process of its own; all of them are forks of one process
(:mod:`preheat.backends.cuda.device.builder`) that has imported the kernels. They leave compiled kernels in Triton's
cache. There is neither torch nor Triton here, so that builders can start before either is imported.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from preheat.utils.children import child_environment, python_command

logger = logging.getLogger(__name__)

MOST = 32
FEWEST = 4
"""With fewer cores a boot compiles as fast by threads: importing torch and Triton again takes a core two seconds."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process with threads cannot be forked safely."""


class Builders:
    """``count`` processes that compile kernels; they end when this process ends or calls :meth:`close`."""

    def __init__(self, count: int) -> None:
        self._idle = SimpleQueue[Connection | None]()
        ours, theirs = zip(*(Pipe() for _ in range(count)), strict=True)
        numbers = [each.fileno() for each in theirs]
        self._process = subprocess.Popen(
            python_command("preheat.backends.cuda.device.builder", *numbers, warns=False),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C does not reach them
            env=child_environment(_ENVIRONMENT),
        )
        for each in theirs:
            each.close()
        self._lines: tuple[Connection, ...] = ours
        for line in ours:
            self._idle.put(line)

    def build(self, job: bytes) -> None:
        """Let an idle builder compile the kernel of ``job``, and wait for its end.

        Nothing is built if the builder ends, and after :meth:`close`.
        """
        line = self._idle.get()
        if line is not None:
            try:
                line.send_bytes(job)
                line.recv_bytes()
            except (EOFError, OSError):
                line = None
        self._idle.put(line)

    def close(self) -> None:
        """End all builders. No thread may be building."""
        for line in self._lines:
            line.close()
        self._process.wait()


class Crew:
    """The builders of this process, while it boots engines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boots = 0
        self._builders: Builders | None = None
        self._refused = False

    def join(self) -> None:
        """Keep the builders until this boot leaves, too."""
        with self._lock:
            self._boots += 1

    def leave(self) -> None:
        """End the builders, if there are any, with the last boot."""
        with self._lock:
            self._boots -= 1
            if self._builders is not None and not self._boots:
                self._builders.close()
                self._builders = None

    def start(self) -> Builders | None:
        """Return the builders, started if need be; None on few cores, and where processes cannot be started."""
        cores = len(os.sched_getaffinity(0))
        if cores < FEWEST:
            return None
        with self._lock:
            if self._builders is None and not self._refused:
                try:
                    self._builders = Builders(min(cores, MOST))
                except OSError as error:
                    self._refused = True
                    logger.warning("Threads compile the kernels, which takes longer: no process starts (%s)", error)
            return self._builders

    def start_if_cold(self) -> None:
        """Start the builders if nothing has been compiled on this machine, so that they are ready when torch is.

        A boot that has failed meanwhile has left, and starts none.
        """
        if self._boots and os.environ.get("TRITON_INTERPRET") != "1" and not _has_files(_triton_cache()):
            self.start()


CREW = Crew()


def _triton_cache() -> Path:
    """Return the folder of Triton's cache, found as Triton does."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _has_files(folder: Path) -> bool:
    with suppress(OSError):
        return any(folder.iterdir())
    return False
