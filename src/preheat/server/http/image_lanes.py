"""Reading and decoding of images, without one client delaying another.

Small images are decoded apart from large ones. The pixels of all large images in work are bounded. Waiting clients take
turns, however many images each has sent. When a client leaves, its work is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request

from preheat.core import Image
from preheat.frontend.image_decoder import TooManyPixels, TooManyPositions
from preheat.frontend.image_processes import AT_ONCE, decode
from preheat.frontend.images import Images
from preheat.frontend.room import Room
from preheat.frontend.video import Frames
from preheat.server.http.fair_share import FairShare, client_of
from preheat.utils.helper import Helper, Helpers

READ_AT_ONCE = 16
"""Most images fetched at once; a fetch mostly waits for another server."""

LOCAL_AT_ONCE = 2
"""Most data URLs decoded at once: they take turns with Python's lock, so more would only delay the event loop."""

_LOCAL = "data:"
_THREADS = 2 * AT_ONCE + 2  # one for each process, and some to decode data URLs


class ImageLanes:
    """Lanes for reading and decoding ``images`` of one server."""

    def __init__(self, images: Images) -> None:
        self._reader, self._processes, self._tokens = images.reader, images.processes, images.tokens
        self._reading, self._small = FairShare(READ_AT_ONCE), FairShare(AT_ONCE)
        self._local = FairShare(LOCAL_AT_ONCE)
        self._large = FairShare(self._processes.max_pixels)
        self._readers = ThreadPoolExecutor(READ_AT_ONCE, "images")  # threads start on first use
        self._decoders = ThreadPoolExecutor(_THREADS, "pixels")

    async def load(self, request: Request, urls: Sequence[str | Frames], room: Room) -> list[Image]:
        """Return the images behind ``urls``, one after the other.

        Raises InvalidRequest and ClientDisconnect. Raises ContextTooLong before an image for which ``room`` has none.
        """
        found = []
        for url in urls:
            try:
                found.append(await self._decoded(request, await self._read_all(request, url), room.left_for(url)))
            except TooManyPositions as error:
                raise room.lacking(url, error.positions) from error
            room.take(found[-1].cells or self._tokens)
        return found

    async def _read_all(self, request: Request, url: str | Frames) -> bytes | Frames:
        """Return the file behind ``url``, or the files of two frames."""
        if isinstance(url, str):
            return await self._read(request, url)
        first = await self._read(request, url.first)
        same = url.second == url.first
        return url._replace(first=first, second=first if same else await self._read(request, url.second))

    async def _read(self, request: Request, url: str) -> bytes:
        """Return the file behind ``url``. A data URL does not wait for the slots of fetches."""
        read, loop = partial(self._reader.read, url), asyncio.get_running_loop()
        if url[: len(_LOCAL)].lower() == _LOCAL:
            async with self._local.of(client_of(request), 1):
                return await loop.run_in_executor(self._decoders, read)
        async with self._reading.of(client_of(request), 1):
            return await loop.run_in_executor(self._readers, read)

    async def _decoded(self, request: Request, data: bytes | Frames, room: int) -> Image:
        client = client_of(request)
        try:
            async with self._small.of(client, 1):
                return await self._in(self._processes.small, request, data, room)
        except TooManyPixels as large:
            part = max(large.pixels, self._processes.max_pixels // AT_ONCE)  # no more processes exist
            async with self._large.of(client, part):
                return await self._in(self._processes.large, request, data, room)

    async def _in(self, helpers: Helpers, request: Request, data: bytes | Frames, room: int) -> Image:
        """Decode the image in ``data``, unless the client leaves.

        One of ``helpers`` does it.
        """
        gone = asyncio.ensure_future(_disconnected(request))
        with helpers.lend() as helper:  # never waits: there are as many helpers as shares
            work = asyncio.get_running_loop().run_in_executor(self._decoders, decode, helper, data, room)
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
    """Wait until ``work`` is done; giving up ends it at once. No thread may go on using the helper."""
    while not work.done():
        helper.give_up()
        await asyncio.wait({work}, timeout=0.05)
    work.exception()  # mark the exception as retrieved


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
