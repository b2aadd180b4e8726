"""Processes that are forked from one process, so that modules are imported once for all processes of a run of tests.

Imports take a server longer than its start, and an engine or a rank longer than the boot of a tiny model. Processes
that start as in production are tested by test_command_lines.py, test_cli_serve.py and test_start_and_stop.py, ranks by
test_tensor_parallel.py, all in tests/api. A process whose environment is another starts as in production, too, because
variables are read by imports.

``python -m tests.forked DESCRIPTOR MODULE ...`` is the process that forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from preheat.utils.gc import kept_imports

SET = "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TOKENIZERS_PARALLELISM"
"""Variables that processes set while they run: at the first compilation by Inductor, and at the start of a server."""

OWN = ("PREHEAT_", "PYTEST_", "PYTHONPATH", "PATH", "LOOP_WATCH", "PT_HPU_", *SET)
"""Beginnings of variables that no import reads: a forked process may have others.

Variables of a Gaudi are read by its simulator. No process has imported the simulator before it forks. A forked process
finds modules in the folders of its PYTHONPATH first.
"""

MOST_BYTES = 1 << 17
"""Most bytes of a message."""


def variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that imports may read."""
    return {name: value for name, value in environment.items() if not name.startswith(OWN)}


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that tests call."""

    def __init__(self, pid: int, status: Connection) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None
        self._lock = threading.Lock()  # a thread waits while others poll, or end the process

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._status.poll():
                self._receive()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        with contextlib.suppress(ProcessLookupError):  # its status is here
            self._wait_for_its_end(timeout)
        with self._lock:
            if self.returncode is None:
                self._receive()
            return self.returncode

    def _wait_for_its_end(self, timeout: float | None) -> None:
        """Wait without the lock. Raises ProcessLookupError if the process is no more."""
        if self.returncode is not None:  # its number may be another process's
            return
        own, ends = os.pidfd_open(self.pid), select.poll()
        try:
            ends.register(own, select.POLLIN)
            if not ends.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        finally:
            os.close(own)

    def _receive(self) -> None:
        try:
            self.returncode = self._status.recv()
        except EOFError:  # the process that forks has ended, and killed its processes
            self.returncode = -signal.SIGKILL
        self._status.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # the process that forks reports a status before it frees the number
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = TypeVar("Process", bound=Forked)


class Forks(Generic[Process]):
    """Forks processes from one that has imported ``modules``. That one begins with the first."""

    def __init__(self, *modules: str, process: type[Process]) -> None:
        self._modules, self._as = modules, process
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._variables: dict[str, str] = {}

    def fit(self, environment: dict[str, str]) -> bool:
        """Return whether a forked process is as a new process with ``environment`` would be."""
        if not hasattr(os, "pidfd_open"):  # not Linux
            return False
        if self._line is None:
            self._begin()
        return variables(environment) == self._variables

    def lend(self) -> int:
        """Return the descriptor with which another process calls :meth:`borrow`."""
        assert self._line is not None
        return self._line.fileno()

    def borrow(self, descriptor: int) -> None:
        """Fork from the process of another one's forks. Its variables are those that this process has now."""
        self._line, self._variables = socket.socket(fileno=descriptor), variables(dict(os.environ))

    def run(
        self, code: str, *arguments: str, environment: dict[str, str],
        out: int = 1, errors: int = 2, more: Sequence[int] = (),
    ) -> Process:  # fmt: skip
        """Run ``code`` as ``python -c`` does, in a session of its own, and return the process.

        ``out`` and ``errors`` are the descriptors of its output. The numbers of ``more`` are its last arguments.
        """
        assert self._line is not None
        status, reported = Pipe(duplex=False)
        message = json.dumps([code, arguments, environment, os.getcwd()])
        with reported:
            socket.send_fds(self._line, [message.encode()], [reported.fileno(), out, errors, *more])
        return self._as(status.recv(), status)

    def _begin(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._variables = variables(dict(os.environ))
        command = [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *self._modules]
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


def fork_each(line: socket.socket) -> str:
    """Fork a process for each message, and report its number and its status, until the line closes.

    Return only in a forked process: its code.
    """
    running: dict[int, tuple[int, Connection]] = {}  # by the descriptor of a process
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
            message, descriptors, *_ = socket.recv_fds(line, MOST_BYTES, 8)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            status, *theirs = descriptors
            if (pid := os.fork()) == 0:
                for descriptor in (line.detach(), status, *running):
                    os.close(descriptor)
                return _become(message, theirs)
            for descriptor in theirs:
                os.close(descriptor)
            reported = Connection(status)
            reported.send(pid)
            own = os.pidfd_open(pid)
            running[own] = pid, reported
            ends.register(own, select.POLLIN)


def _report(pid: int, reported: Connection) -> None:
    """Report the status of an ended process before its number is free for another process."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    with reported:
        try:
            reported.send(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        except OSError:  # nobody waits for it
            pass
    os.waitpid(pid, 0)


def _become(message: bytes, descriptors: list[int]) -> str:
    """Become the process that ``message`` describes, and return its code."""
    os.setsid()
    code, arguments, environment, folder = json.loads(message)
    out, err, *more = descriptors
    for descriptor, number in ((out, 1), (err, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    own = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [each for each in own if each not in sys.path]
    sys.argv = ["-c", *arguments, *map(str, more)]
    return str(code)


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    with kept_imports():
        for name in sys.argv[2:]:
            importlib.import_module(name)
    code = fork_each(line)
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), program.__dict__)


if __name__ == "__main__":
    main()
