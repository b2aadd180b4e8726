"""Machine code that the processes of a run of tests share: LLVM compiles each source once a run.

A compilation takes a child process up to ten seconds. The call that counts compilations is replaced, so that a source
is new to each test. The folder is in the form of a boot's cache: servers of tests/api take code from it, too.

Writing the sources takes two fifths of the boot of a tiny model. A process writes the sources of a kind of model once,
and again while a test has replaced part of the code that writes them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from operator import is_
from pathlib import Path
from typing import Any

import pytest

SILENT = ("__init__", "compiler", "machine")
"""Modules that write no sources."""


def folder_of(paths: pytest.TempPathFactory) -> Path:
    """Return the cache folder that all processes of a run have in common."""
    base = paths.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "machine_code"


def share(folder: Path) -> Callable[[], None]:
    """Take machine code from ``folder`` where it has some, and return a function that ends this."""
    from preheat.backends.cpu.llvm import machine, model, targets

    inner, write = machine._in_child, model._sources
    written: dict[Any, tuple[list[object], tuple[str, ...]]] = {}

    @functools.wraps(write)
    def sources(*what: Any) -> tuple[str, ...]:
        *kinds, norm, width = what
        key = (targets.here(), *(tuple(each.items()) for each in kinds), norm, width)
        parts = writers()
        if key not in written or not same(written[key][0], parts):
            written[key] = parts, write(*what)
        return written[key][1]

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

    machine._in_child, model._sources = in_child, sources

    def undo() -> None:
        machine._in_child, model._sources = inner, write

    return undo


def writers() -> list[object]:
    """Return the code and the constants that write the sources: a test that plants a fault replaces one of them."""
    package = "preheat.backends.cpu.llvm."
    modules = [sys.modules[name] for name in _module_names(package) if name in sys.modules]
    found = [value for module in modules for value in vars(module).values()]
    classes = [value for value in found if isinstance(value, type) and value.__module__.startswith(package)]
    return found + [value for each in classes for value in tuple(vars(each).values())]


@functools.cache
def _module_names(package: str) -> list[str]:
    """Return the names of the modules of ``package`` that write sources: machine counts, and writes nothing."""
    (folder,) = sys.modules[package.rstrip(".")].__path__
    return sorted(f"{package}{path.stem}" for path in Path(folder).glob("*.py") if path.stem not in SILENT)


def same(one: list[object], other: list[object]) -> bool:
    """Return whether two lists have the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))
