"""Keep long-lived objects from the garbage collector: its walks over them would delay requests."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 20_000, 20, 20
"""Objects that are made between two walks over the youngest, such walks to one over older objects, and so on."""


def collect_and_freeze() -> None:
    """Collect once, and never look at the remaining objects again."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Collect once, never look at the remaining objects again, and look at new ones seldom.

    For a server: a request may bring 100,000 objects, and by Python's thresholds each 700 of them cause a walk. A walk
    over 20,000 takes about 2 ms. Cycles are few, as most objects end with their request.
    """
    collect_and_freeze()
    gc.set_threshold(*SELDOM)


@functools.cache
def keep_imports() -> None:
    """Collect and freeze once torch is imported, the first time only: most objects of a process are its modules."""
    collect_and_freeze()


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
