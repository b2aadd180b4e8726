"""Machine code that the processes of a run of tests share: LLVM compiles each source once a run.

A compilation takes a child process up to ten seconds. The call that counts compilations is replaced, so that a source
is new to each test. The folder is in the form of a boot's cache: servers of tests/api take code from it, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def folder_of(paths: pytest.TempPathFactory) -> Path:
    """Return the cache folder that all processes of a run have in common."""
    base = paths.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "machine_code"


def share(folder: Path) -> Callable[[], None]:
    """Take machine code from ``folder`` where it has some, and return a function that ends this."""
    from preheat.backends.cpu.llvm import machine

    inner = machine._in_child

    @functools.wraps(inner)
    def in_child(source: str, target: machine.Target) -> bytes:
        key = machine._digest(repr((source, *target, machine.version())).encode())
        path = folder / "llvm" / f"{key.hex()}.o"
        if (found := machine._read(path, key)) is None:
            found = inner(source, target)
            machine._keep(path, machine._digest(key + found) + found)
        else:
            with machine._COUNTING:
                machine.compilations += 1
        return found

    machine._in_child = in_child

    def undo() -> None:
        machine._in_child = inner

    return undo
