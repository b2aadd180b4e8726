"""Memory of an engine that a sleep can give back.

The tags are the tags of vLLM's ``wake_up``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from preheat.backends.base.backend import Backend
from preheat.settings import Settings

logger = logging.getLogger(__name__)

WEIGHTS, CACHE = "weights", "kv_cache"


def sleepable(settings: Settings, backend: Backend, tag: str) -> AbstractContextManager[None]:
    """Make memory allocated inside able to sleep under ``tag``.

    This applies if ``settings`` ask for sleep mode and addresses must stay.
    """
    memory = backend.sleep_memory() if settings.enable_sleep_mode else None
    return nullcontext() if memory is None else memory.taking(tag)


@contextmanager
def sleepable_weights(settings: Settings, backend: Backend) -> Iterator[None]:
    """Make weights allocated inside able to sleep.

    Host memory is pinned for them at the end, once. A sleep of level 1 copies the weights there.
    """
    with sleepable(settings, backend, WEIGHTS):
        yield
    if settings.enable_sleep_mode and (memory := backend.sleep_memory()) is not None:
        started = time.monotonic()
        size = memory.pin(WEIGHTS)
        seconds = time.monotonic() - started
        logger.info("Sleep: %.2f GiB of the host are pinned for the weights, in %.1f s", size / 2**30, seconds)
