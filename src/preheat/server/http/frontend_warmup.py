"""The server's part of the frontend warm-up.

It sends dummy requests through the HTTP application to an echo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message

from preheat.core import ToEngine
from preheat.frontend.frontend import Frontend
from preheat.server.http.local_call import post
from preheat.server.http.service import Service
from preheat.server.openai.answers import encode
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.warmup.dummy_requests import DummyRequest, EchoLoop, spare_frontend, warm_up_frontend


def warm_up_server(
    settings: Settings, build_app: Callable[[Service], ASGIApp], loop: asyncio.AbstractEventLoop, frontend: Frontend
) -> None:
    """Warm up the code that will serve ``frontend``; call it in a thread.

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
        path, body = _path_and_body(request)
        if request.embeds and frontend.pooling is not None and frontend.pooling.classes:
            path = "/classify"
        asyncio.run_coroutine_threadsafe(post(app, path, body, key), loop).result()

    key = [(b"authorization", f"Bearer {each}".encode()) for each in settings.api_key[:1]]
    spare = spare_frontend(frontend, send_to_engine)
    service = Service(settings, transport.send)
    service.attach(spare)
    app = build_app(service)
    asyncio.run_coroutine_threadsafe(_import_lazy_modules(), loop).result()
    warm_up_frontend(send, frontend)


async def _import_lazy_modules() -> None:
    """Let Starlette import the modules that it imports at first use.

    It looks whether a client has left, and sends a stream. The first long request or file would wait for the imports.
    """

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await Request(scope, receive).is_disconnected()
    await StreamingResponse(iter(()))(scope, receive, send)


def _path_and_body(request: DummyRequest) -> tuple[str, bytes]:
    if request.embeds:
        return "/v1/embeddings", encode({"input": request.prompt})
    fields = msgspec.to_builtins(request.params, str_keys=True) | {"stream": request.stream}  # without defaults
    if not request.chat:
        return "/v1/completions", encode(fields | {"prompt": request.prompt})
    fields["logprobs"] = "logprobs" in fields
    return "/v1/chat/completions", encode(fields | {"messages": request.messages})
