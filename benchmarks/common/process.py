"""Child processes: Python with this package importable, and servers.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from benchmarks.common.machine import ROOT
from benchmarks.common.ports import free_port
from preheat.errors import PreheatError


def environment(**more: str) -> dict[str, str]:
    """Return our environment with ``more``.

    In it ``python -m benchmarks`` works from any folder.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def flags(options: dict[str, Any]) -> list[str]:
    """Return ``options`` as words of a command line."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            found += [f"--{flag}", *map(str, value)]
        else:
            found.append(f"--{flag}={value}")
    return found


@dataclass
class ServerProcess:
    """``preheat serve`` in a process of its own, started at ``started`` (of ``time.perf_counter``)."""

    process: subprocess.Popen[bytes]
    port: int
    started: float

    def wait_for(self, path: str, seconds: float = float("inf")) -> float:
        """Return the seconds from the start until ``path`` answers with 200.

        Raises PreheatError if the server leaves before, or if more than ``seconds`` pass from now on.
        """
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if self.process.poll() is not None:
                raise PreheatError(f"the server left with status {self.process.returncode}")
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", path)
                status = connection.getresponse().status
                connection.close()
                if status == 200:
                    return time.perf_counter() - self.started
            time.sleep(0.02)
        raise PreheatError("the server was not ready in time")


@contextlib.contextmanager
def serving(
    options: dict[str, Any],
    *,
    stderr: IO[bytes] | int | None = None,
    env: dict[str, str] | None = None,
    module: str = "preheat",
) -> Iterator[ServerProcess]:
    """Yield a server with ``options``, just started, and tell it to end afterwards.

    ``module`` has the command line of preheat.
    """
    port = free_port()
    command = [sys.executable, "-m", module, "serve", f"--port={port}", *flags(options)]
    started = time.perf_counter()
    server = subprocess.Popen(command, stderr=stderr, env=env)
    try:
        yield ServerProcess(server, port, started)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
