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

from preheat.frontend.template_process import AT_ONCE as RENDERED_AT_ONCE
from preheat.server.fair_share import FairShare, client_of
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

DECODED_AT_ONCE = 2
"""Prompts that are embeddings, whose decoding takes memory."""

ANSWERED_AT_ONCE, INLINE_VALUES = 2, 2_000
"""Answers: one with fewer numbers and texts than this is written in the event loop."""


class Turns:
    """Who may work in a thread: a few of the medium size and a long one at once, in order of arrival; and a few that
    decode.
    """

    def __init__(self) -> None:
        self._medium, self._long = asyncio.Semaphore(MEDIUM_AT_ONCE), asyncio.Semaphore(LONG_AT_ONCE)
        self._rendering = FairShare(RENDERED_AT_ONCE)
        self._renderers = ThreadPoolExecutor(RENDERED_AT_ONCE, "templates")  # they start when they are first needed
        self._answering = asyncio.Semaphore(ANSWERED_AT_ONCE)
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)

    async def run(self, request: Request, chars: int, work: Callable[[], Result]) -> Result:
        """The result of ``work`` on ``chars`` characters. Raises ClientDisconnect if the client has gone meanwhile."""
        if chars < LONG_CHARS:
            async with self._medium:
                return await _in_thread(request, work)
        async with self._long:
            return await _in_thread(request, partial(_trimmed, work))

    async def render(self, request: Request, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which renders a chat template: a process of its own does, and this one waits."""
        async with self._rendering.of(client_of(request), 1):
            return await _in_thread(request, work, self._renderers)

    async def decode(self, request: Request, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which decodes embeddings."""
        async with self._decoding:
            return await _in_thread(request, work)

    async def answer(self, values: int, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which writes an answer with so many ``values``."""
        if values < INLINE_VALUES:
            return work()
        async with self._answering:
            return await asyncio.to_thread(work)


def _trimmed(work: Callable[[], Result]) -> Result:
    """The result of ``work``, whose memory is given back to the kernel: the C library would keep hundreds of MB."""
    try:
        return work()
    finally:
        trim()


async def _in_thread(request: Request, work: Callable[[], Result], threads: ThreadPoolExecutor | None = None) -> Result:
    if await request.is_disconnected():
        raise ClientDisconnect
    return await asyncio.get_running_loop().run_in_executor(threads, work)


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
