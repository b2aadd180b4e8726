"""Count the answers of the server for ``/metrics``, and log them (``--access-log``)."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preheat.utils.log import line_handler

logger = logging.getLogger(__name__)

NO_HANDLER = "none"
"""The handler label of a request that no route took, as in vLLM's server."""


class AccessLog:
    """Middleware that counts answers in ``counts`` by handler, method and status, and logs them.

    The handler is the path of a route, found in ``paths`` by endpoint. An answer is logged after its last byte: as text
    (``form`` "text"), as one JSON object a line ("json"), or not at all ("off").
    """

    def __init__(
        self,
        app: ASGIApp,
        counts: Counter[tuple[str, str, str]],
        paths: Mapping[Any, str],
        form: str,
    ) -> None:
        self._app, self._counts, self._paths, self._form = app, counts, paths, form
        if form == "json" and not logger.handlers:
            logger.addHandler(line_handler("%(message)s"))
            logger.propagate = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:  # status 0: the client left, or the server stopped, before any answer
            handler = self._paths.get(scope.get("endpoint", self), NO_HANDLER)
            self._counts[handler, scope["method"], str(status)] += 1
            if self._form != "off":
                self._log(scope, status, time.monotonic() - began)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = ":".join(map(str, scope.get("client") or ("-",)))
        request = {"client": client, "method": scope["method"], "path": scope["path"], "status": status}
        request |= {"seconds": round(seconds, 4), "request_id": scope.get("request_id")}
        if self._form == "json":
            logger.info("%s", msgspec.json.encode({"time": round(time.time(), 3), **request}).decode())
        else:
            logger.info('%(client)s - "%(method)s %(path)s" %(status)d in %(seconds).3f s, %(request_id)s', request)
