"""Turns for long work: in threads, few at once, or in the event loop, one slice in each of its turns.

So neither the event loop nor short requests are delayed. The tokenizer releases the GIL, and other work gives it up
within :data:`SWITCH_SECONDS`. A short text is handled in the event loop, as starting a thread would take longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from starlette.requests import ClientDisconnect, Request

from preheat.frontend.template_process import AT_ONCE as RENDERED_AT_ONCE
from preheat.server.http.fair_share import FairShare, client_of
from preheat.utils.memory import trim

Result = TypeVar("Result")

SLICE_SECONDS = 0.005
"""Seconds that the event loop works for one request before others have their turn."""

SHORT_SECONDS = 0.001
"""Work of fewer seconds is no slice: much of it may be done in one turn of the event loop."""

SWITCH_SECONDS = 0.0002
"""Seconds until a thread passes on Python's lock.

The event loop waits so long for each working thread, at every event of a connection: a dozen times in a request.
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

INLINE_VALUES, LONG_VALUES = 2_000, 50_000
"""Fewest values of an answer that is written in a thread, and of one that waits for other such answers only.

One answer of each kind is written at once: all hold Python's lock, so more at once would only delay the event loop.
"""

JOINED_AT_ONCE, INLINE_BYTES = 2, 1 << 16
"""Most bodies joined in threads at once, and the fewest bytes of such a body."""

_THREADS = MEDIUM_AT_ONCE + LONG_AT_ONCE + DECODED_AT_ONCE + 2 + JOINED_AT_ONCE


class Turns:
    """Turns for work in threads.

    A few medium texts and one long text are worked on at once, in order of arrival. Rendering, decoding, answering and
    joining have turns of their own. No turn waits for a thread, and long work takes no thread from files.
    """

    def __init__(self) -> None:
        self._medium, self._long = asyncio.Semaphore(MEDIUM_AT_ONCE), asyncio.Semaphore(LONG_AT_ONCE)
        self._threads = ThreadPoolExecutor(_THREADS, "turns")  # threads start on first use
        self._rendering = FairShare(RENDERED_AT_ONCE)
        self._renderers = ThreadPoolExecutor(RENDERED_AT_ONCE, "templates")
        self._answering, self._answering_long = asyncio.Semaphore(1), asyncio.Semaphore(1)
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._joining = asyncio.Semaphore(JOINED_AT_ONCE)

    async def run(self, request: Request, chars: int, work: Callable[[], Result]) -> Result:
        """Return the result of ``work`` on ``chars`` characters. Raises ClientDisconnect if the client has left."""
        if chars < LONG_CHARS:
            async with self._medium:
                return await _in_thread(request, work, self._threads)
        async with self._long:
            return await _in_thread(request, partial(_trimmed, work), self._threads)

    async def render(self, request: Request, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``: waiting for a process that renders a chat template."""
        async with self._rendering.of(client_of(request), 1):
            return await _in_thread(request, work, self._renderers)

    async def decode(self, request: Request, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``: decoding embeddings."""
        async with self._decoding:
            return await _in_thread(request, work, self._threads)

    async def answer(self, values: int, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``: writing an answer of ``values`` values."""
        if values < INLINE_VALUES:
            return work()
        async with self._answering if values < LONG_VALUES else self._answering_long:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def join(self, parts: Sequence[bytes], size: int) -> bytes:
        """Return ``parts`` of a body as one, ``size`` bytes together. Joining many releases Python's lock."""
        if size < INLINE_BYTES:
            return b"".join(parts)
        async with self._joining:
            return await asyncio.get_running_loop().run_in_executor(self._threads, b"".join, parts)


def _trimmed(work: Callable[[], Result]) -> Result:
    """Return the result of ``work``, and give freed memory back.

    The C library would keep hundreds of MB.
    """
    try:
        return work()
    finally:
        trim()


async def _in_thread(request: Request, work: Callable[[], Result], threads: ThreadPoolExecutor) -> Result:
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
    return [found async for part in slices(steps) for found in part]


async def slices(steps: Iterable[Result]) -> AsyncIterator[list[Result]]:
    """Yield the results of ``steps``, a list for each slice of time that the event loop works.

    Each turn of the loop has room for one slice, whatever the number of requests: they take turns, in order of arrival.
    """
    left, loop = iter(steps), asyncio.get_running_loop()
    turn = _SLICING.setdefault(loop, asyncio.Lock())
    over = False
    while not over:
        async with turn:
            started = time.monotonic()
            found, over = _slice(left, started + SLICE_SECONDS)
            if time.monotonic() - started > SHORT_SECONDS:
                await asyncio.sleep(0)  # holds the turn of the others until the loop's next one
        if found:
            yield found


_SLICING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""For each event loop the turn to work in slices."""


def _slice(steps: Iterator[Result], end: float) -> tuple[list[Result], bool]:
    """Return the results of ``steps`` until ``end``, and whether no step is left."""
    found = list[Result]()
    for each in steps:
        found.append(each)
        if time.monotonic() > end:
            return found, False
    return found, True
