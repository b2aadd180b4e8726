"""Long texts are worked on in threads, few at once, so that they delay neither the event loop nor short requests.

The tokenizer releases the GIL. A short text is handled at once, which takes less time than to start a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from preheat.frontend.template_process import AT_ONCE as RENDERED_AT_ONCE
from preheat.server.fair_share import FairShare, client_of

Result = TypeVar("Result")

INLINE_CHARS = 4_000
"""Fewer characters than this are handled in the event loop: they take a few milliseconds at most."""

LONG_CHARS = 200_000
"""Texts of at least so many characters wait for each other only."""

MEDIUM_AT_ONCE, LONG_AT_ONCE = 2, 1

DECODED_AT_ONCE = 2
"""Prompts that are embeddings, whose decoding takes memory."""


class Turns:
    """Who may work in a thread: a few of the medium size and a long one at once, in order of arrival; and a few that
    decode.
    """

    def __init__(self) -> None:
        self._medium, self._long = asyncio.Semaphore(MEDIUM_AT_ONCE), asyncio.Semaphore(LONG_AT_ONCE)
        self._rendering = FairShare(RENDERED_AT_ONCE)
        self._renderers = ThreadPoolExecutor(RENDERED_AT_ONCE, "templates")  # they start when they are first needed
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)

    async def run(self, request: Request, chars: int, work: Callable[[], Result]) -> Result:
        """The result of ``work`` on ``chars`` characters. Raises ClientDisconnect if the client has gone meanwhile."""
        async with self._long if chars >= LONG_CHARS else self._medium:
            return await _in_thread(request, work)

    async def render(self, request: Request, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which renders a chat template: a process of its own does, and this one waits."""
        async with self._rendering.of(client_of(request), 1):
            return await _in_thread(request, work, self._renderers)

    async def decode(self, request: Request, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which decodes embeddings."""
        async with self._decoding:
            return await _in_thread(request, work)


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
