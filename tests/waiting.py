"""Waits for events of other threads and processes: bounded, and over as soon as the event is there."""

import asyncio
import time
from collections.abc import Callable

SECONDS = 60.0
"""The bound. A machine under load may take that long; a test that passes never does."""


def until(holds: Callable[[], object], seconds: float = SECONDS) -> bool:
    """Return whether a condition holds within ``seconds``. Write ``assert until(…)``."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(held)


async def until_in_loop(holds: Callable[[], object], seconds: float = SECONDS) -> bool:
    """Return whether a condition holds within ``seconds``; tasks of the loop run meanwhile."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return bool(held)
