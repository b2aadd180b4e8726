"""The server: routes, middleware, and the process that runs them.

The port opens at once, for /live, /health, /ready, /warmup and /metrics. Other routes answer 503 until the engine is
ready. SIGTERM and SIGINT stop the server as described in :mod:`preheat.server.http.shutdown`. If an engine dies, its
requests go on elsewhere (:mod:`preheat.server.replicas.fleet`). If the last one stays away, running requests end with
an error and the server exits with status 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

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
from preheat.server import openapi
from preheat.server.batches.runner import BatchRunner
from preheat.server.batches.store import open_store
from preheat.server.http.access_log import AccessLog
from preheat.server.http.errors import HANDLERS
from preheat.server.http.frontend_warmup import warm_up_server
from preheat.server.http.ignored import HEADER
from preheat.server.http.listener import BACKLOG, check_certificates, listen, unlisten
from preheat.server.http.middleware import AuthMiddleware, ConcurrencyLimit, EndQuietly, RequestIdMiddleware, UnderPath
from preheat.server.http.own_middleware import load_middleware, wrapped
from preheat.server.http.protocol import limited_protocol
from preheat.server.http.route_check import checked
from preheat.server.http.service import Service
from preheat.server.http.shutdown import Server, Shutdown
from preheat.server.http.turns import SWITCH_SECONDS
from preheat.server.operations import control
from preheat.server.operations.try_it import try_it
from preheat.server.replicas.joint import JointModels
from preheat.server.replicas.models import Models, each_model
from preheat.server.replicas.process import ENGINE
from preheat.settings import Settings
from preheat.settings.paths import check_paths
from preheat.utils.gc import collect_seldom
from preheat.utils.log import exit_after, leave, set_up_logging
from preheat.utils.memory import give_back_large_blocks

logger = logging.getLogger(__name__)

_GOODBYE_SECONDS = 0.5  # for streams to send a dead engine's error, and for /health to report it
_THREADS_SECONDS = 2.0  # for threads that still work for clients who left
_STOP_SECONDS = 7.0  # the same, and for the engine to stop
_LAST_SECONDS = 4.5  # after the engine's death; then the process exits even if something hangs
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells report it."""


def run_server(
    settings: Settings,
    entry: str = ENGINE,
    on_ready: Callable[[Settings], None] | None = None,
    *,
    on_blocked: Callable[[str], None] | None = None,
    stopped: int = 0,
) -> int:
    """Serve until stopped, and return the exit status.

    ``entry`` is the entry of the engine's process. ``stopped`` is the exit status if a signal stops the process
    before it is ready, or while something hangs.

    ``on_ready`` is called once requests are accepted, with the settings, including the opened port. ``on_blocked`` is
    called with the reason if requests never will be accepted. Raises the error that kept the server from becoming
    ready.
    """
    check_paths(settings)
    control.check_settings(settings)
    each_model(settings)  # report their errors before the port opens
    check_certificates(settings)
    set_up_logging(settings)
    openapi.prepare()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # prompts are encoded in the calling thread; see turns.py
    _bound_pauses()
    listener = listen(settings)
    if settings.uds is None:
        settings = dataclasses.replace(settings, port=listener.getsockname()[1])
    bar = ProgressBar(settings.use_tqdm_on_load)

    def on_message(message: FromEngine) -> None:
        bar.show(message)
        if isinstance(message, Ready):
            collect_seldom()
            if not message.blocked_reason and on_ready is not None:
                on_ready(settings)
            if message.blocked_reason and on_blocked is not None:
                on_blocked(message.blocked_reason)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, entry, listener, on_message, stopped))
    finally:
        unlisten(settings)


def _bound_pauses() -> None:
    """Bound the event loop's waits for Python's lock, and the memory that stays unused."""
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)  # the time is quadratic in the digits
    give_back_large_blocks()


def build_app(service: Service, *others: Service, batches: BatchRunner | None = None) -> ASGIApp:
    """Build the application: the routes, wrapped in middleware.

    The middleware adds CORS headers, request ids, the access log, API keys and a limit on concurrency. ``others`` serve
    further models. ``batches`` will run through the routes.
    """
    names = ("model",) if others else ()
    app, paths = _routed(service, batches, *names)
    if others:
        joint = JointModels((service, *others), (app, *(_routed(other, None, *names)[0] for other in others)))
        app, paths = joint.app(), paths | joint.joint
    if batches is not None:
        batches.app = RequestIdMiddleware(app)
    settings = service.settings
    limited = AuthMiddleware(ConcurrencyLimit(app, settings.max_concurrent_requests), settings.api_key)
    logged = AccessLog(limited, service.metrics.http, paths, settings.access_log)
    named = UnderPath(RequestIdMiddleware(logged), settings.root_path)
    return EndQuietly(
        CORSMiddleware(
            named,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=["X-Request-Id", HEADER],
        )
    )


def _routed(service: Service, batches: BatchRunner | None, *queries: str) -> tuple[Starlette, dict[Any, str]]:
    """Build the routes of one model, and return their paths by endpoint too.

    Routes without a body read the fields ``queries`` of the query.
    """
    operations = openapi.served(adapters=service.loads_adapters, ollama=service.settings.api == "ollama")
    endpoints = [checked(op, op.endpoint, *(() if "post" in op.methods else queries)) for op in operations]
    routes = [Route(op.path, endpoint, methods=op.methods) for op, endpoint in zip(operations, endpoints, strict=True)]
    if not service.settings.disable_fastapi_docs:
        routes.append(Route("/openapi.json", _openapi))
    paths: dict[Any, str] = {endpoint: op.path for op, endpoint in zip(operations, endpoints, strict=True)}
    if service.settings.ui:
        routes.append(Route("/", try_it))
        paths[try_it] = "/"
    app = Starlette(routes=routes, exception_handlers=HANDLERS)  # type: ignore[arg-type]
    app.state.service, app.state.batches = service, batches
    return app, paths


async def _openapi(request: Request) -> Response:
    service: Service = request.app.state.service
    settings = service.settings
    document = openapi.document(
        settings.root_path.rstrip("/"),
        adapters=service.loads_adapters,
        ollama=settings.api == "ollama",
        strict=settings.request_fields == "strict",
    )
    return Response(document, media_type="application/json")


def tls(settings: Settings) -> dict[str, Any]:
    """Return uvicorn's TLS arguments that differ from its defaults."""
    asked = settings.ssl_cert_reqs
    wanted: dict[str, Any] = {"ssl_cert_reqs": (2 if settings.ssl_ca_certs else 0) if asked is None else asked}
    return wanted if settings.ssl_ciphers is None else {**wanted, "ssl_ciphers": settings.ssl_ciphers}


async def _serve(
    settings: Settings, entry: str, listener: socket.socket, on_message: Callable[[FromEngine], None], stopped: int
) -> int:
    middleware = load_middleware(settings.middleware)
    store = open_store(settings)
    models = Models(settings, entry)
    batches = None if store is None else BatchRunner(store, settings, lambda: models.take_requests)
    server = Server(
        uvicorn.Config(
            EndQuietly(wrapped(build_app(*models.services, batches=batches), middleware)),
            http=limited_protocol(settings.max_header_bytes, settings.timeout_headers),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            server_header=False,
            timeout_keep_alive=settings.timeout_keep_alive,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            **tls(settings),
        )
    )
    loop = asyncio.get_running_loop()
    shutdown = Shutdown(models.services, server, settings.shutdown_timeout, stopped)

    def on_dead() -> None:
        models.end_all()
        loop.call_later(_GOODBYE_SECONDS, setattr, server, "should_exit", True)
        exit_after(_LAST_SECONDS, 1)

    warm_up = None if settings.skip_warmup else partial(warm_up_server, build_app=build_app, loop=loop)
    booting = loop.create_task(models.boot(warm_up, on_message, on_dead))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, shutdown.signalled, number)
    if batches is not None:
        batches.start()
    logger.info("Listening on %s", settings.uds or "{}:{}".format(*listener.getsockname()[:2]))
    await server.serve(sockets=[listener])
    if batches is not None:
        await batches.stop()
    booting.cancel()
    status = 1 if models.dead else 0
    exit_after(_STOP_SECONDS, status)
    await models.stop(now=shutdown.hasty)
    if shutdown.unready is not None:
        unlisten(settings)
        leave(INTERRUPTED if shutdown.unready == signal.SIGINT else stopped)  # a thread may still load the tokenizer
    exit_after(_THREADS_SECONDS, status)
    if models.boot_error is not None:
        raise models.boot_error
    return status
