"""What every request passes before its route: an id, a key, and a limit on how many are served at once."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preheat.errors import TooManyRequests, Unauthorized
from preheat.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/warmup", "/metrics", "/version", "/openapi.json"})
"""Paths that need no key and count for no limit."""

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def request_id(request: Request) -> str:
    """The id under which a request is known: its X-Request-Id, or one that we drew."""
    id: str = request.scope["request_id"]
    return id


def _header(scope: Scope, name: bytes) -> bytes:
    return bytes(dict(scope["headers"]).get(name, b""))


class RequestIdMiddleware:
    """Gives each request an id, and sends it back as X-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _header(scope, b"x-request-id").decode("latin-1")
        id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope["request_id"] = id

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        await self._app(scope, receive, tagged)


class AuthMiddleware:
    """Refuses requests without one of ``keys``, except to :data:`OPEN_PATHS`; without keys it refuses none."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS or not self._keys or self._knows(_header(scope, b"authorization")):
            await self._app(scope, receive, send)
        else:
            error = Unauthorized("A valid API key is required: send it as 'Authorization: Bearer KEY'")
            await error_response(error)(scope, receive, send)

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        known = [hmac.compare_digest(key.strip(), own) for own in self._keys]  # all of them: time reveals nothing
        return scheme.lower() == b"bearer" and any(known)


class ConcurrencyLimit:
    """Refuses requests while ``most`` are being served; :data:`OPEN_PATHS` do not count."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most, self._served = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._served >= self._most:
            error = TooManyRequests(f"{self._served} requests are being served already; try again later")
            await error_response(error)(scope, receive, send)
        else:
            self._served += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._served -= 1
