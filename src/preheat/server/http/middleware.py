"""Middleware in front of the routes: request ids, API keys, concurrency limit."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preheat.errors import InvalidRequest, TooManyServed, Unauthorized
from preheat.server.http.errors import error_response
from preheat.server.http.ignored import ignored_header
from preheat.server.openai.schema import REQUEST_ID

OPEN_PATHS = frozenset(
    {"/", "/health", "/ping", "/live", "/ready", "/load", "/warmup", "/metrics", "/version", "/openapi.json"}
)
"""Paths that need no key and do not count towards the limit, unless a body is posted to the first one."""


def is_open(scope: Scope) -> bool:
    """Return whether a request needs no key and does not count."""
    return scope["path"] in OPEN_PATHS and not (scope["path"] == "/" and scope.get("method") == "POST")


def request_id(request: Request) -> str:
    """Return the request's id.

    It is X-Request-Id, the id in the body, or a random one.
    """
    return str(request.scope["request_id"])


def name_request(request: Request, id: str) -> None:
    """Set the request's id from the body. Raises InvalidRequest for a bad id.

    An X-Request-Id has precedence, as in vLLM.
    """
    if not re.fullmatch(REQUEST_ID, id):  # the body's own check accepts a newline at the end
        raise InvalidRequest("request_id must not end with a newline", param="request_id")
    if _given_id(request.scope) is None:
        request.scope["request_id"] = id


def _header(scope: Scope, name: bytes) -> bytes:
    return bytes(dict(scope["headers"]).get(name, b""))


def _given_id(scope: Scope) -> str | None:
    """Return the X-Request-Id if it is valid."""
    given = _header(scope, b"x-request-id").decode("latin-1")
    return given if re.fullmatch(REQUEST_ID, given) else None


class UnderPath:
    """Middleware that strips ``root`` (``--root-path``) from paths.

    It is for a proxy that leaves the root on.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root and scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        await self._app(scope, receive, send)


class EndQuietly:
    """Middleware that ends cancelled requests without an error, by closing the connection.

    A stopping server cancels requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Middleware that gives each request an id, and adds headers to its answer.

    The headers are X-Request-Id and the names of ignored fields.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["request_id"] = _given_id(scope) or secrets.token_hex(16)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = [(b"x-request-id", scope["request_id"].encode()), *ignored_header(scope)]
                message["headers"] = [*message.get("headers", ()), *told]
            await send(message)

        await self._app(scope, receive, tagged)


class AuthMiddleware:
    """Middleware that rejects requests without one of ``keys``.

    Requests to :data:`OPEN_PATHS` need no key. Without keys it rejects no request.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_open(scope) or not self._keys or self._knows(scope):
            await self._app(scope, receive, send)
        else:
            error = Unauthorized("A valid API key is required: send it as 'Authorization: Bearer KEY'")
            await error_response(error, scope["path"])(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Return whether the request has a key, in OpenAI's or Anthropic's header."""
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else _header(scope, b"x-api-key").strip()
        # Compare with every key, so that the time reveals nothing.
        known = [hmac.compare_digest(given, own) for own in self._keys]
        return any(known)


class ConcurrencyLimit:
    """Middleware that rejects requests while ``most`` are being served.

    Requests to :data:`OPEN_PATHS` do not count.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most, self._served = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_open(scope):
            await self._app(scope, receive, send)
        elif self._served >= self._most:
            error = TooManyServed(f"{self._served} requests are being served already; try again later")
            await error_response(error)(scope, receive, send)
        else:
            self._served += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._served -= 1
