"""The rehearsal: while the engine warms up, the server answers requests of its own, through all that will serve others.

A process's first request is slower than later ones even where nothing is compiled: the interpreter specializes code as
it runs, and pools fill. The app, the front door and the tokenizer here are those that serve; the engine is an echo, and
what it counts is thrown away.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message

from preheat.core import Delta, Finish, Ready, Request, ToEngine, TokenLogprobs
from preheat.frontend.frontdoor import FrontDoor
from preheat.metrics import Metrics
from preheat.server.service import Service

logger = logging.getLogger(__name__)

ROUNDS = 12
"""More than the interpreter takes to specialize what it runs."""

_LENGTH = 64
_TEXT = {"prompt": "def add(a, b):", "max_tokens": 2, "temperature": 0.5, "seed": 1, "stop": ["zzz"]}
_IDS = {"prompt": [0, 1], "max_tokens": 2}
_CHAT = {"messages": [{"role": "user", "content": "Add."}], "max_tokens": 2}

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", _TEXT),
    ("/v1/completions", _IDS | {"logprobs": 1, "n": 2}),
    ("/v1/completions", _TEXT | {"stream": True}),
    ("/v1/completions", _IDS | {"stream": True}),
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", _CHAT | {"stream": True, "logprobs": True}),
)


async def rehearse(service: Service, build_app: Callable[[Service], ASGIApp]) -> None:
    """Answer every body of ``BODIES`` several times, on a copy of ``service``. Never raises: nobody depends on it."""
    stage = copy.copy(service)
    stage.metrics = Metrics(service.names[0])
    stage.take_door(_door(service, stage.metrics))
    app = build_app(stage)
    speaks = service.tokenizer.speaks
    bodies = [(path, body) for path, body in BODIES if speaks or isinstance(body.get("prompt"), list)]
    try:
        for _ in range(ROUNDS):
            for path, body in bodies:
                await _ask(app, path, json.dumps(body).encode(), service.settings.api_key)
    except Exception:
        logger.exception("The rehearsal failed; the first requests may be slower")


def _door(service: Service, metrics: Metrics) -> FrontDoor:
    """A front door whose engine answers each request with the same tokens."""
    loop = asyncio.get_running_loop()
    tokenizer = service.tokenizer
    token = tokenizer.encode("a", add_special_tokens=False)[-1] if tokenizer.speaks else 0

    def echo(message: ToEngine) -> None:
        if isinstance(message, Request):
            for last in (False, True):
                loop.call_soon(door.handle, _delta(message, token, last))

    door = FrontDoor(tokenizer, echo, metrics=metrics)
    door.handle(Ready(_LENGTH, 2, _LENGTH, 0.0))
    return door


def _delta(request: Request, token: int, last: bool) -> Delta:
    delta = Delta([request.id], [token], {request.id: Finish("length")} if last else {})
    if request.params.logprobs is not None:
        delta.logprobs = {0: TokenLogprobs(token, -1.0, 1, [(token, -1.0)] * request.params.logprobs)}
    return delta


async def _ask(app: ASGIApp, path: str, body: bytes, keys: tuple[str, ...]) -> None:
    """One POST, as the server hands it over; the answer is dropped."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if keys:
        headers.append((b"authorization", f"Bearer {keys[0]}".encode()))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
    }  # fmt: skip
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        stays: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await stays  # the client does not leave; the app stops asking

    async def send(message: Message) -> None:
        pass

    await app(scope, receive, send)
