"""The other ranks as the leader sees them: it starts them, tells them what to do, and ends all when one of them dies.

A rank is a process that runs :mod:`preheat.parallel.worker`. It reads its settings from standard input and ends when
that closes, so it never outlives the leader. A thread of the leader watches the processes and their heartbeats. No
torch here.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec

from preheat.errors import PreheatError, RankDied, WireError
from preheat.parallel.channel import Sender
from preheat.parallel.groups import world_size
from preheat.parallel.shared import Board, remove_folder, shared_folder
from preheat.settings import Settings

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.1
_LAST_WORDS_SECONDS = 3.0


class RankProcess(Protocol):
    """A rank's process as the leader sees it. ``reason``: why it ended, as far as that is known, else empty."""

    @property
    def reason(self) -> str: ...

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def kill(self) -> None: ...

    def leave(self) -> None:
        """Kill it and give back what it held."""


class Child(subprocess.Popen[bytes]):
    """A process of this machine."""

    @property
    def reason(self) -> str:
        return ": it was killed, perhaps because the machine ran out of memory" * (self.returncode == -signal.SIGKILL)

    def leave(self) -> None:
        self.kill()
        self.wait()
        if self.stdin is not None:
            self.stdin.close()


Start = Callable[[Path, int, Settings, Path | None], tuple[RankProcess, Connection]]
"""Starts a rank: the leader's folder, the rank's number, the settings, the folder of stores. Returns the process and
what it answers by.
"""


def start_child(folder: Path, rank: int, settings: Settings, cache: Path | None) -> tuple[RankProcess, Connection]:
    """A rank that is a child of this process."""
    ours, theirs = Pipe(duplex=False)
    command = [sys.executable, "-m", "preheat.parallel.worker", str(folder), str(rank), str(theirs.fileno())]
    child = Child(
        command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True
    )  # Ctrl-C does not reach it
    theirs.close()
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has exited already, as the watch will see
        child.stdin.write(msgspec.json.encode((settings, None if cache is None else str(cache))) + b"\n")
        child.stdin.flush()
    return child, ours


class Ranks:
    """The ranks 1 and up that ``settings`` ask for, each begun by ``start``. ``cache`` is the folder of stores."""

    def __init__(self, settings: Settings, cache: Path | None, start: Start = start_child) -> None:
        self.world = world_size(settings)
        self.folder = shared_folder()
        self.board = Board(self.folder, 0, self.world)
        self._sender = Sender(self.folder, self.board)
        self._processes: list[RankProcess] = []
        self._pipes: list[Connection] = []
        self._watch = _Watch(self.board, self.folder, self._processes, settings.engine_heartbeat_timeout_s)
        self.close = weakref.finalize(self, _end, self._watch, self._processes, self.folder)
        for rank in range(1, self.world):
            process, pipe = start(self.folder, rank, settings, cache)
            self._processes.append(process)
            self._pipes.append(pipe)
        self._watch.start()

    def on_death(self, report: Callable[[PreheatError], None]) -> None:
        """``report`` is called, in a thread, when a rank has died."""
        self._watch.report = report

    def on_end(self, abort: Callable[[], None]) -> None:
        """``abort`` is called, in a thread, after that."""
        self._watch.abort = abort

    def tell(self, name: str, *args: Any) -> None:
        """Have every rank call ``name(*args)``, after all that it was told before. Raises RankDied."""
        self.board.check()
        self._sender.send((name, args))

    def call(self, name: str, *args: Any) -> list[Any]:
        """As :meth:`tell`; waits for what each one returns."""
        self.tell(name, *args)
        return self.answers()

    def answers(self) -> list[Any]:
        """What each rank answers next. Raises the error that one answers with, and RankDied."""
        found = []
        for pipe in self._pipes:
            try:
                while not pipe.poll(_WATCH_SECONDS):
                    self.board.check()
                answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                raise self.death() from None
            if isinstance(answer, WireError):
                raise answer.restore()
            found.append(answer)
        return found

    def death(self, error: BaseException | None = None) -> RankDied:
        """The reason why a step cannot go on: a rank that died, else the leader's own ``error``, which ends all."""
        until = time.monotonic() + (_LAST_WORDS_SECONDS if error is None else 2 * _WATCH_SECONDS)
        while time.monotonic() < until:
            try:
                self.board.check()
            except RankDied as died:
                return died
            time.sleep(_WATCH_SECONDS / 10)
        said = "a rank has gone" if error is None else f"rank 0: {type(error).__name__}: {error}"
        self._watch.end(f"A step of several ranks failed in the middle, so none can go on: {said}")
        return RankDied(self.board.failure(0))


class _Watch:
    """The thread that notices when a rank dies. It does not know the :class:`Ranks`, so that those can be collected."""

    def __init__(self, board: Board, folder: Path, processes: list[RankProcess], limit: float) -> None:
        self._board, self._folder, self._processes, self._limit = board, folder, processes, limit
        self.report: Callable[[PreheatError], None] = lambda error: None
        self.abort: Callable[[], None] = lambda: None
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="ranks").start()

    def end(self, why: str) -> None:
        """Once: note the reason, end all ranks."""
        with self._lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
        logger.error("%s", why)
        self._board.end(why)
        for process in self._processes:
            process.kill()
        remove_folder(self._folder)  # nobody else is left to do it if this process is killed next
        self.report(RankDied(why))
        self.abort()

    def _run(self) -> None:
        heard = {rank: (0, time.monotonic()) for rank in range(1, len(self._processes) + 1)}
        while not self.stopped.wait(_WATCH_SECONDS):
            for rank, process in enumerate(self._processes, 1):
                beats, now = self._board.beats(rank), time.monotonic()
                if beats != heard[rank][0]:
                    heard[rank] = beats, now
                if (code := process.poll()) is not None:
                    self.end(f"Rank {rank} ended with status {code}{_why(self._board, rank, process)}")
                elif beats and now - heard[rank][1] > self._limit:
                    self.end(
                        f"Rank {rank} has sent no heartbeat for {self._limit:g} s (--engine-heartbeat-timeout-s): its "
                        "process is stopped"
                    )


def _why(board: Board, rank: int, process: RankProcess) -> str:
    return f": {said}" if (said := board.failure(rank)) else process.reason


def _end(watch: _Watch, processes: list[RankProcess], folder: Path) -> None:
    watch.stopped.set()
    for process in processes:
        process.leave()
    remove_folder(folder)
