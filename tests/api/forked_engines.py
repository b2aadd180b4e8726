"""Engines that are forked from one process with torch: see ``tests/forked.py``.

Servers are forked from a process without torch, so an engine is no child of its server here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from preheat.server.replicas import process
from tests.forked import Forked, Forks

IMPORTED = (
    "preheat.server.replicas.process",
    "preheat.boot.engine",
    "preheat.backends.cpu.backend",
    "tests.api.scripted",
)

CODE = """
import os, sys
from preheat.server.replicas import process

os.dup2(int(sys.argv[-1]), 0)
os.close(int(sys.argv.pop()))
process.main()
"""

_start_a_process = process._start


class ForkedEngine(Forked):
    """A forked engine, which reads its standard input from a pipe, as a child process does."""

    stdin: BinaryIO


def install(descriptor: int) -> None:
    """Fork the engines of this process, a server, with the forks that ``descriptor`` lends.

    An engine that takes the place of another one starts as in production: tests look at the time without an engine.
    """
    forks, engines = Forks(process=ForkedEngine), list[ForkedEngine]()
    forks.borrow(descriptor)

    def start(arguments: list[str], environment: dict[str, str]):
        if not forks.fit(environment) or any(engine.poll() is not None for engine in engines):
            return _start_a_process(arguments, environment)
        theirs, ours = os.pipe()
        engine = forks.run(CODE, *arguments, environment=environment, more=[theirs])
        os.close(theirs)
        engine.stdin = os.fdopen(ours, "wb")
        engines.append(engine)
        return engine

    process._start = start


def engines_of(server: int) -> list[int]:
    """Return the processes of a server's engines, the oldest first.

    The standard input of an engine is a pipe that its server writes to, whichever process has started the engine.
    """
    held = {_read(each) for each in Path(f"/proc/{server}/fd").iterdir()} - {""}
    folders = [each for each in Path("/proc").glob("[0-9]*") if _read(each / "fd" / "0") in held and _is_engine(each)]
    return sorted((int(each.name) for each in folders), key=_began)


def _read(link: Path) -> str:
    """Return the pipe of a descriptor, empty if it has none."""
    try:
        return found if (found := os.readlink(link)).startswith("pipe:") else ""
    except OSError:  # closed meanwhile
        return ""


def _is_engine(folder: Path) -> bool:
    try:
        return b"preheat.server.replicas.process" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def _began(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
