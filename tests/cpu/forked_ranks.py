"""Ranks that are forked from one process, so that torch is imported once for all ranks of a run of tests.

An import of torch takes longer than the boot of a tiny model. Processes of ranks that start as in production are tested
by tests/api/test_tensor_parallel.py. A test that changes the environment has such processes, too, because variables are
read by imports.

``python -m tests.cpu.forked_ranks DESCRIPTOR`` is the process that forks.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from preheat.parallel import ranks
from preheat.parallel.ranks import Child, Started
from preheat.utils.gc import keep_imports, paused

IMPORTED = ("preheat.parallel.worker", "preheat.backends.cpu.backend", "torch.distributed")

_start_a_process = ranks._child


def _environment() -> dict[str, str]:
    """Return the variables that imports may read; settings come with a rank's orders."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREHEAT_", "PYTEST_"))}


class Forked:
    """A forked rank, with the methods of a child process that leaders and tests call."""

    reason = Child.reason

    def __init__(self, pid: int, status: Connection) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._status.poll():
            self._receive()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None:
            if not self._status.poll(timeout):
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            self._receive()
        return self.returncode

    def _receive(self) -> None:
        try:
            self.returncode = self._status.recv()
        except EOFError:  # the process that forks has ended, and killed its ranks
            self.returncode = -signal.SIGKILL

    def kill(self) -> None:
        if self.poll() is None:  # the process that forks reports a status before it frees the number
            os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        self.kill()
        self.wait()


class Forks:
    """Starts ranks by a process that forks them. The process begins with the first rank."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    def child(self, rank: int) -> Started:
        """Start ``rank`` as :func:`preheat.parallel.ranks._child` does."""
        if self._process is None:
            self._begin()
        if _environment() != self._environment:
            return _start_a_process(rank)
        assert self._line is not None
        ours, theirs = Pipe()
        status, reported = Pipe(duplex=False)
        with theirs, reported:
            socket.send_fds(self._line, [bytes([rank])], [theirs.fileno(), reported.fileno(), 1, 2])
            pid = status.recv()
        return Started(Forked(pid, status), ours, None, device=rank)

    def _begin(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = _environment()
        command = [sys.executable, "-m", "tests.cpu.forked_ranks", str(theirs.fileno())]
        path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip

    def close(self) -> None:
        if self._process is not None and self._line is not None:
            self._line.close()
            self._process.wait()


def fork_ranks(line: socket.socket) -> None:
    """Fork a rank for each message, and report its number and its status, until the line closes."""
    running: dict[int, tuple[int, Connection]] = {}  # by the descriptor of a rank's process
    ends = select.poll()
    ends.register(line, select.POLLIN)
    while True:
        for ready, _ in ends.poll():
            if ready != line.fileno():
                pid, reported = running.pop(ready)
                ends.unregister(ready)
                _report(pid, reported)
                os.close(ready)
                continue
            message, descriptors, *_ = socket.recv_fds(line, 1, 4)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return
            theirs, status, out, err = descriptors
            if (pid := os.fork()) == 0:
                _be(message[0], Connection(theirs), out, err, [line.fileno(), status, *running])
            for descriptor in (theirs, out, err):
                os.close(descriptor)
            reported = Connection(status)
            reported.send(pid)
            own = os.pidfd_open(pid)
            running[own] = pid, reported
            ends.register(own, select.POLLIN)


def _report(pid: int, reported: Connection) -> None:
    """Report the status of an ended rank before its number is free for another process."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    with reported:
        try:
            reported.send(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        except OSError:  # nobody waits for it
            pass
    os.waitpid(pid, 0)


def _be(rank: int, line: Connection, out: int, err: int, others: list[int]) -> None:
    """Be a rank, in a session of its own, as a new process would."""
    code = 1
    try:
        os.setsid()
        for descriptor in others:
            os.close(descriptor)
        os.dup2(out, 1)
        os.dup2(err, 2)
        importlib.import_module("preheat.parallel.worker").run(rank, line, door=None)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        os._exit(code)


def install() -> Callable[[], None]:
    """Fork the ranks of this process from now on, and return a function that ends this."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return lambda: None
    forks = Forks()
    ranks._child = forks.child

    def undo() -> None:
        ranks._child = _start_a_process
        forks.close()

    return undo


def main() -> None:
    with paused():
        for name in IMPORTED:
            importlib.import_module(name)
    keep_imports()
    fork_ranks(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
