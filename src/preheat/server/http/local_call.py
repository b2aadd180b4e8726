"""One request through the HTTP application, from within its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from starlette.types import ASGIApp, Message

BACKGROUND = "preheat.background"
"""Key of a scope, true if its request yields to the requests of clients."""


class LocalAnswer(NamedTuple):
    """Status, X-Request-Id and body of an answer."""

    status: int
    id: str
    body: bytes


async def post(
    app: ASGIApp, path: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), *, background: bool = False
) -> LocalAnswer:
    """Return the answer of ``app`` to a POST. With ``background`` the request yields to others."""
    length = str(len(body)).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", length), *headers],
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0), BACKGROUND: background,
    }  # fmt: skip
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    status, id, answer = 0, "", bytearray()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        stays: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await stays  # the client does not disconnect

    async def send(message: Message) -> None:
        nonlocal status, id
        if message["type"] == "http.response.start":
            status, told = message["status"], dict(message["headers"])
            id = told.get(b"x-request-id", b"").decode("latin-1")
        else:
            answer.extend(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        if not status:  # else the failure is already answered, and raised for the log
            raise
    return LocalAnswer(status, id, bytes(answer))
