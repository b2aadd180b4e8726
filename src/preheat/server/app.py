"""The server: routes, middleware, and the process that runs them.

The port opens at once, for /health, /ready, /warmup and /metrics; requests are refused with 503 until the engine is
ready. The first SIGTERM or SIGINT drains: new requests are refused, running ones finish, then the server stops. A
second one stops now. When the engine dies, running requests end with an error and the server exits with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from preheat.core import FromEngine, Ready
from preheat.engine.progress import ProgressBar
from preheat.errors import SettingsError
from preheat.metrics import set_up_logging
from preheat.server import chat, completions, openapi, status
from preheat.server.errors import HANDLERS
from preheat.server.frontend_warmup import warm_up_server
from preheat.server.middleware import AuthMiddleware, ConcurrencyLimit, RequestIdMiddleware
from preheat.server.process import ENGINE, EngineProcess
from preheat.server.service import Service
from preheat.server.supervisor import Supervisor
from preheat.settings import Settings
from preheat.utils.gc import settle

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_GOODBYE_SECONDS = 0.5  # for streams to carry the error of a dead engine, and for /health to report it
_CLOSE_SECONDS = 2  # for clients to read their last bytes once nothing runs any more
_LAST_SECONDS = 4.5  # after the engine's death, the process is gone by then whatever hangs


def run_server(settings: Settings, entry: str = ENGINE, on_ready: Callable[[Settings], None] | None = None) -> int:
    """Serve until told to stop; the process's exit status. ``entry`` is what the engine's process runs.

    ``on_ready`` is called once requests are taken, with the settings and the port that was really opened.
    """
    set_up_logging(settings.log_level)
    listener = _listener(settings)
    settings = dataclasses.replace(settings, port=listener.getsockname()[1])
    bar = ProgressBar()

    def on_message(message: FromEngine) -> None:
        bar.show(message)
        if isinstance(message, Ready):
            settle()
            if not message.blocked_reason and on_ready is not None:
                on_ready(settings)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, entry, listener, on_message))


def build_app(service: Service) -> ASGIApp:
    """The routes, and around them: request ids, API keys, a limit on concurrency, and the headers for browsers."""
    routes = [
        Route("/v1/completions", completions.completions, methods=["POST"]),
        Route("/v1/chat/completions", chat.chat, methods=["POST"]),
        Route("/v1/models", status.models),
        Route("/v1/models/{model:path}", status.model),
        Route("/tokenize", status.tokenize, methods=["POST"]),
        Route("/detokenize", status.detokenize, methods=["POST"]),
        Route("/health", status.health),
        Route("/ready", status.ready),
        Route("/warmup", status.warmup),
        Route("/version", status.version),
        Route("/metrics", status.metrics),
        Route("/openapi.json", _openapi),
    ]
    settings = service.settings
    app = Starlette(routes=routes, exception_handlers=HANDLERS)  # type: ignore[arg-type]
    app.state.service = service
    limited = ConcurrencyLimit(app, settings.max_concurrent_requests)
    return CORSMiddleware(
        RequestIdMiddleware(AuthMiddleware(limited, settings.api_key)),
        allow_origins=settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )


async def _openapi(_: Request) -> Response:
    return Response(openapi.document(), media_type="application/json")


class _Server(uvicorn.Server):
    """Signals are ours to handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listener(settings: Settings) -> socket.socket:
    """The open port. Raises SettingsError when it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}", param="port"
        ) from error


async def _serve(
    settings: Settings, entry: str, listener: socket.socket, on_message: Callable[[FromEngine], None]
) -> int:
    engine = EngineProcess(settings, entry)
    service = Service(settings, engine.transport.send)
    server = _Server(
        uvicorn.Config(
            build_app(service),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=settings.log_level == "debug",
            backlog=_BACKLOG,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=2 if settings.ssl_ca_certs else 0,
        )
    )
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if service.draining:
            server.should_exit = server.force_exit = True
        else:
            logger.info("Draining: running requests finish, new ones are refused; a second signal stops now")
            tasks.add(loop.create_task(_drain(service, server)))

    def on_dead() -> None:
        loop.call_later(_GOODBYE_SECONDS, setattr, server, "should_exit", True)
        last = threading.Timer(_LAST_SECONDS, os._exit, [1])
        last.daemon = True
        last.start()

    supervisor = Supervisor(service, engine, on_message=on_message, on_dead=on_dead)
    warm_up = None if settings.skip_warmup else partial(warm_up_server, settings, build_app, loop)
    tasks = {loop.create_task(supervisor.run(warm_up))}
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    logger.info("Listening on %s:%d", *listener.getsockname()[:2])
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()
    await supervisor.stop(now=server.force_exit)
    return 0 if service.dead is None else 1


async def _drain(service: Service, server: uvicorn.Server) -> None:
    service.draining = True
    while service.busy:
        await asyncio.sleep(0.05)
    server.should_exit = True
