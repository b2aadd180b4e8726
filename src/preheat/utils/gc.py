"""Keeps long-lived objects away from the garbage collector, whose walks over them would delay requests."""

from __future__ import annotations

import functools
import gc
import sys
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


def give_back_memory(shutdown_ray: bool = False) -> None:
    """Give back the memory of engines that nothing refers to any more, on the host and on the device.

    It is vLLM's ``cleanup_dist_env_and_memory``; ``shutdown_ray``: leave Ray's cluster too.
    """
    gc.unfreeze()  # an engine was put away when it had booted
    settle()
    torch, ray = sys.modules.get("torch"), sys.modules.get("ray")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if shutdown_ray and ray is not None:
        ray.shutdown()
