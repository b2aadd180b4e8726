"""Long texts are worked on in threads, few at once, so that they delay neither the event loop nor short requests.

The tokenizer releases the GIL, and other work gives it up within :data:`SWITCH_SECONDS`. A short text is handled at
once, which takes less time than to start a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from preheat.utils.memory import trim

Result = TypeVar("Result")

SLICE_SECONDS = 0.005
"""How long the event loop works for one request before others have their turn."""

SWITCH_SECONDS = 0.001
"""After how long a thread that holds Python's lock gives it to another: the event loop waits so long for each thread
that works, several times in a request."""

INLINE_CHARS = 4_000
"""Fewer characters than this are handled in the event loop: they take a few milliseconds at most."""

LONG_CHARS = 200_000
"""Texts of at least so many characters wait for each other only."""

MEDIUM_AT_ONCE, LONG_AT_ONCE = 2, 1

DECODED_AT_ONCE, READ_AT_ONCE = 2, 16
"""Images: decoding takes time and memory, reading mostly waits for another server."""

ANSWERED_AT_ONCE, INLINE_VALUES = 2, 2_000
"""Answers: one with fewer numbers and texts than this is written in the event loop."""


class Turns:
    """Who may work in a thread: a few of the medium size and a long one at once, in order of arrival; of images those
    that are decoded and those that are read.
    """

    def __init__(self) -> None:
        self._medium, self._long = asyncio.Semaphore(MEDIUM_AT_ONCE), asyncio.Semaphore(LONG_AT_ONCE)
        self._answering = asyncio.Semaphore(ANSWERED_AT_ONCE)
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._readers = ThreadPoolExecutor(READ_AT_ONCE, "images")  # threads start when they are first needed

    async def run(self, request: Request, chars: int, work: Callable[[], Result]) -> Result:
        """The result of ``work`` on ``chars`` characters. Raises ClientDisconnect if the client has gone meanwhile."""
        if chars < LONG_CHARS:
            async with self._medium:
                return await _in_thread(request, work)
        async with self._long:
            return await _in_thread(request, partial(_trimmed, work))

    async def decode(self, request: Request, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which decodes an image."""
        async with self._decoding:
            return await _in_thread(request, work)

    async def answer(self, values: int, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which writes an answer with so many ``values``."""
        if values < INLINE_VALUES:
            return work()
        async with self._answering:
            return await asyncio.to_thread(work)

    async def read(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which reads one and may wait for the network: in a thread of its own kind, which no
        other work waits for.
        """
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)


def _trimmed(work: Callable[[], Result]) -> Result:
    """The result of ``work``, whose memory is given back to the kernel: the C library would keep hundreds of MB."""
    try:
        return work()
    finally:
        trim()


async def _in_thread(request: Request, work: Callable[[], Result]) -> Result:
    if await request.is_disconnected():
        raise ClientDisconnect
    return await asyncio.to_thread(work)


async def in_turn(request: Request, chars: int, work: Callable[[], Result], *, total: int | None = None) -> Result:
    """The result of ``work`` on ``chars`` characters: at once if ``total`` (by default the same) is small, else in a
    thread when its turn comes. ``total`` has the characters of all that the request asks for.
    """
    if (chars if total is None else total) < INLINE_CHARS:
        return work()
    turns: Turns = request.app.state.service.turns
    return await turns.run(request, chars, work)


async def in_slices(steps: Iterable[Result]) -> list[Result]:
    """What ``steps`` give, made in the event loop, a slice of time after the other."""
    end, found = time.monotonic() + SLICE_SECONDS, list[Result]()
    for step in steps:
        found.append(step)
        if time.monotonic() > end:
            await asyncio.sleep(0)
            end = time.monotonic() + SLICE_SECONDS
    return found
