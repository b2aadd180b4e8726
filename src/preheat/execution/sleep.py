"""Memory of an engine that a sleep can give back, by the tags of vLLM's ``wake_up``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from preheat.backends.base import Backend
from preheat.settings import Settings

logger = logging.getLogger(__name__)

WEIGHTS, CACHE = "weights", "kv_cache"


def sleepable(settings: Settings, backend: Backend, tag: str) -> AbstractContextManager[None]:
    """Let memory allocated inside sleep under ``tag``, if ``settings`` ask for it and addresses must stay."""
    memory = backend.sleep_memory() if settings.enable_sleep_mode else None
    return nullcontext() if memory is None else memory.taking(tag)


@contextmanager
def sleepable_weights(settings: Settings, backend: Backend) -> Iterator[None]:
    """Let weights allocated inside sleep, and pin host memory for them at the end, once.

    A sleep of level 1 copies the weights there.
    """
    with sleepable(settings, backend, WEIGHTS):
        yield
    if settings.enable_sleep_mode and (memory := backend.sleep_memory()) is not None:
        started = time.monotonic()
        size = memory.pin(WEIGHTS)
        seconds = time.monotonic() - started
        logger.info("Sleep: %.2f GiB of the host are pinned for the weights, in %.1f s", size / 2**30, seconds)
