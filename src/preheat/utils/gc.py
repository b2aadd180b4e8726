"""Keeps long-lived objects away from the garbage collector, whose walks over them would delay requests."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def settle() -> None:
    """Collect once, and never look at the remaining objects again."""
    gc.collect()
    gc.freeze()


@functools.cache
def keep_imports() -> None:
    """Settle after torch was imported, the first time only: its modules are most of the objects of a process."""
    settle()


@contextmanager
def paused() -> Iterator[None]:
    """Let nothing be collected inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
