"""Keep long-lived objects from the garbage collector: its walks over them would delay requests."""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 10_000, 5, 2**31 - 1
"""Objects that are made between two walks over the youngest, such walks to one over older objects, and so on.

Nothing walks over the oldest objects but :class:`WholeWalks`.
"""

SHORT_WALK = 100_000
"""Most blocks of memory that are made since a server was ready and allow a walk over all objects, of about 5 ms."""

WALK_SECONDS = 60.0
"""Fewest seconds between two walks over all objects."""


def collect_and_freeze() -> None:
    """Collect once, and never look at the remaining objects again."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Collect once, never look at the remaining objects again, and look at new ones seldom.

    For a server: a request may bring 100,000 objects, and by Python's thresholds each 700 of them cause a walk. A walk
    over 10,000 takes about 1 ms. Cycles are few, as most objects end with their request. :class:`WholeWalks` collects
    cycles of old objects.
    """
    collect_and_freeze()
    gc.set_threshold(*SELDOM)


class WholeWalks:
    """Walks over all objects that were made since a server was ready.

    Python's own rule walks over a million objects of large requests, and no request is answered meanwhile.
    """

    def __init__(self) -> None:
        self._first = self._kept = sys.getallocatedblocks()  # kept: after the last walk
        self._next = 0.0

    def due(self, blocks: int, now: float) -> bool:
        """Return whether to walk now: few ``blocks`` of memory are used, or twice those after the last walk.

        So a leak of cycles costs one long walk each time that the memory doubles.
        """
        return now >= self._next and (blocks - self._first < SHORT_WALK or blocks > 2 * self._kept)

    def walk(self) -> None:
        """Collect objects of all ages if it is time."""
        now = time.monotonic()
        if self.due(sys.getallocatedblocks(), now):
            if gc.get_count()[2]:  # objects have grown old since the last walk
                gc.collect()
            self._kept, self._next = sys.getallocatedblocks(), now + WALK_SECONDS


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


@contextmanager
def kept_imports() -> Iterator[None]:
    """Import torch inside, and never look at the objects of a process so far, the first time only.

    Most objects of a process are its modules. The walk over all objects comes before the import, where they are few: of
    320,000 objects behind it, it would find 7,000 without references in 0.2 s.
    """
    _collect_first()
    with paused():
        yield
    _freeze_first()


_collect_first, _freeze_first = functools.cache(gc.collect), functools.cache(gc.freeze)


def give_back_memory(shutdown_ray: bool = False) -> None:
    """Give back the memory of engines without references, on host and device.

    The counterpart of vLLM's ``cleanup_dist_env_and_memory``. ``shutdown_ray``: leave Ray's cluster too.
    """
    gc.unfreeze()  # an engine was put away when it had booted
    collect_and_freeze()
    torch, ray = sys.modules.get("torch"), sys.modules.get("ray")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if shutdown_ray and ray is not None:
        ray.shutdown()
