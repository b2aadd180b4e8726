"""Reading a request's body, within limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from preheat.errors import SlowBody, TooLarge
from preheat.server.service import Service

BODY_SECONDS = 30.0
"""How long a client may take to send its body."""

DISCARD_SECONDS = 0.5
"""How long we read on after a body was found to be too large."""


async def read_body(request: Request) -> bytes:
    """The body of ``request``. Raises TooLarge as soon as it is known to be, SlowBody when it takes too long."""
    service: Service = request.app.state.service
    limit = service.settings.max_body_bytes
    error = TooLarge(f"The body is larger than the {limit} bytes that --max-body-bytes allows")
    length = request.headers.get("content-length", "0")
    chunks, body = request.stream(), bytearray()
    if not length.isdecimal() or int(length) > limit:
        await _discard(chunks, 2 * limit)
        raise error
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in chunks:
                body += chunk
                if len(body) > limit:
                    await _discard(chunks, limit)
                    raise error
    except TimeoutError as slow:
        raise SlowBody(f"The body did not arrive within {BODY_SECONDS:g} s") from slow
    return bytes(body)


async def _discard(chunks: AsyncIterator[bytes], most: int) -> None:
    """Read and drop up to ``most`` bytes: a client that is still sending would never see our answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for chunk in chunks:
                most -= len(chunk)
                if most < 0:
                    return
