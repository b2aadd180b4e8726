"""Middleware as an operator writes it: a class of ASGI, and a function."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

not_one = 5


class Stamp:
    """Adds a header to each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("X-Stamp", "class")
            await send(message)

        await self._app(scope, receive, stamped)


async def teapot(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Answer one path itself."""
    if request.url.path == "/coffee":
        return JSONResponse({"brews": False}, 418)
    return await call_next(request)
