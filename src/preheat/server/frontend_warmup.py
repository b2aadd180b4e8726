"""The server's part of the frontend warm-up: dummy requests through the HTTP application to an echo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message

from preheat.core import ToEngine
from preheat.frontend.frontend import Frontend
from preheat.server.answers import encode
from preheat.server.service import Service
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.warmup.dummy_requests import DummyRequest, EchoLoop, spare_frontend, warm_up_frontend


def warm_up_server(
    settings: Settings, build_app: Callable[[Service], ASGIApp], loop: asyncio.AbstractEventLoop, frontend: Frontend
) -> None:
    """Warm up the code that will serve ``frontend`` in ``loop``; call it in a thread.

    The dummy requests run in ``loop``: after a warm-up in a separate event loop, the first request was 3 ms slower.
    """
    frontend.template.warm_up()
    if frontend.images is not None:
        frontend.images.processes.warm_up()
    transport = InlineTransport()
    echo = EchoLoop(transport, frontend.tokenizer)

    def step() -> None:
        echo.take(0)
        echo.step()
        for message in transport.receive():
            spare.handle(message)

    def send_to_engine(message: ToEngine) -> None:
        transport.send(message)
        loop.call_soon(step)
        loop.call_soon(step)

    def send(request: DummyRequest) -> None:
        asyncio.run_coroutine_threadsafe(_post(app, *_path_and_body(request), settings.api_key), loop).result()

    spare = spare_frontend(frontend, send_to_engine)
    service = Service(settings, transport.send)
    service.attach(spare)
    app = build_app(service)
    warm_up_frontend(send, frontend)


def _path_and_body(request: DummyRequest) -> tuple[str, bytes]:
    if request.embeds:
        return "/v1/embeddings", encode({"input": request.prompt})
    fields = msgspec.to_builtins(request.params, str_keys=True) | {"stream": request.stream}  # without defaults
    if not request.chat:
        return "/v1/completions", encode(fields | {"prompt": request.prompt})
    fields["logprobs"] = "logprobs" in fields
    return "/v1/chat/completions", encode(fields | {"messages": request.messages})


async def _post(app: ASGIApp, path: str, body: bytes, keys: tuple[str, ...]) -> None:
    """One POST, as the server would pass it on; the answer is dropped."""
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
        return await stays  # the client does not disconnect

    async def send(message: Message) -> None:
        pass

    await app(scope, receive, send)
