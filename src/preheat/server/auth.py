"""What stands before every route: request ids, keys, how many at once, how large and how slow a body may be."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preheat.errors import InvalidRequest, PreheatError, TooLarge, TooManyRequests, Unauthorized
from preheat.server.service import Service
from preheat.server.stream import encode, error_body

OPEN_PATHS = frozenset({"/health", "/ready", "/warmup", "/metrics", "/version", "/openapi.json"})
"""Paths that need no key and count for no limit."""

RETRY = {"retry-after": "1"}
"""How long a client should wait, in seconds, before it asks again."""

BODY_SECONDS = 30.0
"""How long a client may take to send its body."""

HEAR_SECONDS = 0.5

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class SlowBody(InvalidRequest):
    """The body did not arrive in time."""

    status = 408


def error_response(error: PreheatError) -> Response:
    """``error`` in OpenAI's shape, with its status."""
    headers = {}
    if error.status in {429, 503}:
        headers.update(RETRY)
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    elif error.status == 408:
        headers["connection"] = "close"
    return Response(encode(error_body(error)), error.status, headers, "application/json")


def request_id(request: Request) -> str:
    """The id under which a request is known: its X-Request-Id, or one that we drew."""
    id: str = request.scope["request_id"]
    return id


async def read_body(request: Request) -> bytes:
    """The body of ``request``. Raises TooLarge as soon as it is known to be, SlowBody when it takes too long."""
    service: Service = request.app.state.service
    limit = service.settings.max_body_bytes
    error = TooLarge(f"The body is larger than the {limit} bytes that --max-body-bytes allows")
    length = request.headers.get("content-length", "0")
    chunks, body = request.stream(), bytearray()
    if not length.isdecimal() or int(length) > limit:
        await _hear_out(chunks, 2 * limit)
        raise error
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in chunks:
                body += chunk
                if len(body) > limit:
                    await _hear_out(chunks, limit)
                    raise error
    except TimeoutError as slow:
        raise SlowBody(f"The body did not arrive within {BODY_SECONDS:g} s") from slow
    return bytes(body)


async def _hear_out(chunks: AsyncIterator[bytes], most: int) -> None:
    """Drop up to ``most`` bytes, for a moment: who is still sending hears a broken connection, not a refusal."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAR_SECONDS):
            async for chunk in chunks:
                most -= len(chunk)
                if most < 0:
                    return


class Guard:
    """ASGI middleware: gives each request an id, asks for a key and limits how many are served at once."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [key.encode() for key in service.settings.api_key]
        self._served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope["request_id"] = id

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, tagged)
            return
        error = self._refusal(headers.get(b"authorization", b""))
        if error is not None:
            await error_response(error)(scope, receive, tagged)
            return
        self._served += 1
        try:
            await self._app(scope, receive, tagged)
        finally:
            self._served -= 1

    def _refusal(self, authorization: bytes) -> PreheatError | None:
        scheme, _, key = authorization.partition(b" ")
        known = [hmac.compare_digest(key.strip(), own) for own in self._keys]  # all of them: time tells nothing
        if self._keys and not (scheme.lower() == b"bearer" and any(known)):
            return Unauthorized("A valid API key is required: send it as 'Authorization: Bearer KEY'")
        if self._served >= self._service.settings.max_concurrent_requests:
            return TooManyRequests(f"{self._served} requests are being served already; try again later")
        return None
