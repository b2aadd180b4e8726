"""Turns for work on long texts in threads, few at once.

So neither the event loop nor short requests are delayed. The tokenizer releases the GIL, and other work gives it up
within :data:`SWITCH_SECONDS`. A short text is handled in the event loop, as starting a thread would take longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from preheat.frontend.template_process import AT_ONCE as RENDERED_AT_ONCE
from preheat.server.fair_share import FairShare, client_of
from preheat.utils.memory import trim

Result = TypeVar("Result")

SLICE_SECONDS = 0.005
"""Seconds that the event loop works for one request before others have their turn."""

SWITCH_SECONDS = 0.001
"""Seconds until a thread passes on Python's lock.

The event loop waits so long for each working thread, several times in a request.
"""

INLINE_CHARS = 4_000
"""Texts below this length are handled in the event loop.

They take a few milliseconds at most.
"""

LONG_CHARS = 200_000
"""Texts of at least this length wait for each other only."""

MEDIUM_AT_ONCE, LONG_AT_ONCE = 2, 1

DECODED_AT_ONCE = 2
"""Most prompts of embeddings decoded at once, since decoding takes memory."""

ANSWERED_AT_ONCE, INLINE_VALUES = 2, 2_000
"""Most answers written in threads at once, and the fewest values of such an answer."""


class Turns:
    """Turns for work in threads.

    A few medium texts and one long text are worked on at once, in order of arrival. Rendering, decoding and answering
    have turns of their own.
    """

    def __init__(self) -> None:
        self._medium, self._long = asyncio.Semaphore(MEDIUM_AT_ONCE), asyncio.Semaphore(LONG_AT_ONCE)
        self._rendering = FairShare(RENDERED_AT_ONCE)
        self._renderers = ThreadPoolExecutor(RENDERED_AT_ONCE, "templates")  # threads start on first use
        self._answering = asyncio.Semaphore(ANSWERED_AT_ONCE)
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)

    async def run(self, request: Request, chars: int, work: Callable[[], Result]) -> Result:
        """Return the result of ``work`` on ``chars`` characters. Raises ClientDisconnect if the client has left."""
        if chars < LONG_CHARS:
            async with self._medium:
                return await _in_thread(request, work)
        async with self._long:
            return await _in_thread(request, partial(_trimmed, work))

    async def render(self, request: Request, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``: waiting for a process that renders a chat template."""
        async with self._rendering.of(client_of(request), 1):
            return await _in_thread(request, work, self._renderers)

    async def decode(self, request: Request, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``: decoding embeddings."""
        async with self._decoding:
            return await _in_thread(request, work)

    async def answer(self, values: int, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``: writing an answer of ``values`` values."""
        if values < INLINE_VALUES:
            return work()
        async with self._answering:
            return await asyncio.to_thread(work)


def _trimmed(work: Callable[[], Result]) -> Result:
    """Return the result of ``work``, and give freed memory back.

    The C library would keep hundreds of MB.
    """
    try:
        return work()
    finally:
        trim()


async def _in_thread(request: Request, work: Callable[[], Result], threads: ThreadPoolExecutor | None = None) -> Result:
    if await request.is_disconnected():
        raise ClientDisconnect
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def in_turn(request: Request, chars: int, work: Callable[[], Result], *, total: int | None = None) -> Result:
    """Return the result of ``work`` on ``chars`` characters, in turn.

    Work runs at once if ``total`` is small: the characters of the whole request, by default ``chars``.
    """
    if (chars if total is None else total) < INLINE_CHARS:
        return work()
    turns: Turns = request.app.state.service.turns
    return await turns.run(request, chars, work)


async def in_slices(steps: Iterable[Result]) -> list[Result]:
    """Return the results of ``steps``, run in the event loop in slices of time."""
    return [found async for found in slices(steps)]


async def slices(steps: Iterable[Result]) -> AsyncIterator[Result]:
    """Yield the results of ``steps``, run in the event loop in slices of time."""
    end = time.monotonic() + SLICE_SECONDS
    for found in steps:
        yield found
        if time.monotonic() > end:
            await asyncio.sleep(0)
            end = time.monotonic() + SLICE_SECONDS
