"""The images of requests, read and decoded so that one client's never hold up another's.

Small images are decoded apart from large ones, of which only so many pixels are worked on at once. Where clients wait,
each gets its turn after the other, however many images one has sent. When a client leaves, so does its work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request

from preheat.core import Image
from preheat.frontend.image_decoder import TooManyPixels
from preheat.frontend.image_processes import AT_ONCE, decode
from preheat.frontend.images import Images
from preheat.server.fair_share import FairShare, client_of
from preheat.utils.helper import Helper, Helpers

READ_AT_ONCE = 16
"""Images that are fetched, which mostly means to wait for another server."""

_LOCAL = "data:"
_THREADS = 2 * AT_ONCE + 2  # one for each process, and for what is within URLs


class ImageLanes:
    """Reads and decodes ``images`` for one server."""

    def __init__(self, images: Images) -> None:
        self._reader, self._processes = images.reader, images.processes
        self._reading, self._small = FairShare(READ_AT_ONCE), FairShare(AT_ONCE)
        self._large = FairShare(self._processes.max_pixels)
        self._readers = ThreadPoolExecutor(READ_AT_ONCE, "images")  # threads start when they are first needed
        self._decoders = ThreadPoolExecutor(_THREADS, "pixels")

    async def load(self, request: Request, urls: Sequence[str]) -> list[Image]:
        """The images behind ``urls``, one after the other. Raises InvalidRequest and ClientDisconnect."""
        return [await self._decoded(request, await self._read(request, url)) for url in urls]

    async def _read(self, request: Request, url: str) -> bytes:
        """The file behind ``url``. One within the URL itself waits for no other server."""
        read, loop = partial(self._reader.read, url), asyncio.get_running_loop()
        if url[: len(_LOCAL)].lower() == _LOCAL:
            return await loop.run_in_executor(self._decoders, read)
        async with self._reading.of(client_of(request), 1):
            return await loop.run_in_executor(self._readers, read)

    async def _decoded(self, request: Request, data: bytes) -> Image:
        client = client_of(request)
        try:
            async with self._small.of(client, 1):
                return await self._in(self._processes.small, request, data)
        except TooManyPixels as large:
            part = max(large.pixels, self._processes.max_pixels // AT_ONCE)  # there are no more processes
            async with self._large.of(client, part):
                return await self._in(self._processes.large, request, data)

    async def _in(self, helpers: Helpers, request: Request, data: bytes) -> Image:
        """The image in ``data``, by one of ``helpers``, which is given up if the client leaves."""
        gone = asyncio.ensure_future(_disconnected(request))
        with helpers.taken() as helper:  # never waits: there are as many as may be used at once
            work = asyncio.get_running_loop().run_in_executor(self._decoders, decode, helper, data)
            try:
                either: set[asyncio.Future[Any]] = {work, gone}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                await _end(helper, work)
        if gone.done() and not gone.cancelled():
            raise ClientDisconnect
        return work.result()


async def _end(helper: Helper, work: asyncio.Future[Image]) -> None:
    """Wait until ``work`` is done: given up, it is at once. A thread that still uses the helper must not be left."""
    while not work.done():
        helper.give_up()
        await asyncio.wait({work}, timeout=0.05)
    work.exception()  # nobody may ask for it


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
