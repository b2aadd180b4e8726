"""Several models behind one port: the routing of requests, and answers for all models.

Each model has an application of its own, as if it were served alone. A request goes to the model named in its body
(``model``), its path or its query. Without a name it goes to the first model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from preheat.errors import ModelNotFound
from preheat.metrics import Metrics
from preheat.server import openapi
from preheat.server.http.body import keep_body, read_body
from preheat.server.http.errors import HANDLERS, OLLAMA
from preheat.server.http.route_check import checked
from preheat.server.http.service import Service
from preheat.server.http.turns import in_turn
from preheat.server.ollama import models as ollama_models
from preheat.server.ollama.models import LATEST
from preheat.server.openai.answers import encode
from preheat.server.operations import status

Endpoint = Callable[[Request], Awaitable[Response]]

_MODEL = "/v1/models/"
_FIRST = ("/v1/files", "/v1/batches")  # not about a model


class _Named(Struct):
    """The model that a body names, in OpenAI's (``model``) or Ollama's field (``name``)."""

    model: str | None = None
    name: str | None = None


class JointMetrics(Collector):
    """The metrics of all ``models`` on one page.

    Each family comes once, with the samples of each model.
    """

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return the page, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in model.collect():
                if family.name != "http_requests":  # a metric of the server as a whole
                    own = {"model_name": model.model_name}
                    family.samples = [each._replace(labels=own | each.labels) for each in family.samples]
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                families[family.name].samples += family.samples
        yield from families.values()


class JointModels:
    """The application of all models: one of ``apps`` for each of ``services``, in order."""

    def __init__(self, services: Sequence[Service], apps: Sequence[Starlette]) -> None:
        self._services, self._apps = services, apps
        self._metrics = JointMetrics([service.metrics for service in services])
        own: dict[Endpoint, str] = {
            self.health: "/health", self.ping: "/ping", self.ready: "/ready", self.load: "/load",
            self.warmup: "/warmup", self.metrics: "/metrics", self.models: "/v1/models", self.tags: "/api/tags",
            self.ps: "/api/ps", self.reset_prefix_cache: "/reset_prefix_cache",
        }  # fmt: skip
        self._rows = {row.path: row for row in openapi.served(adapters=False, ollama=True) if row.path in own.values()}
        queries = {"/warmup": ("model",)}
        self.joint: dict[Any, str] = {
            checked(self._rows[path], endpoint, *queries.get(path, ())): path for endpoint, path in own.items()
        }
        """The endpoints about all models, with their paths."""

    def app(self) -> Starlette:
        """Build the application."""
        ollama = self._services[0].settings.api == "ollama"
        routes = [
            Route(path, endpoint, methods=self._rows[path].methods)
            for endpoint, path in self.joint.items() if ollama or not path.startswith(OLLAMA)
        ]  # fmt: skip
        app = Starlette(routes=[*routes, Mount("", app=self._to_model)], exception_handlers=HANDLERS)  # type: ignore[arg-type]
        app.state.service = self._services[0]
        return app

    async def _to_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await self._apps[self._place(await self._name(request), request)](scope, receive, send)

    async def _name(self, request: Request) -> str | None:
        """Return the name of the requested model, or None."""
        path = request.url.path
        if path.startswith(_FIRST):
            return None
        if request.method != "POST":
            return path.removeprefix(_MODEL) if path.startswith(_MODEL) else request.query_params.get("model")
        data = await read_body(request)
        keep_body(request, data)
        named = await in_turn(request, len(data), partial(_named, data))
        return named.model if named.model is not None or not path.startswith(OLLAMA) else named.name

    def _place(self, name: str | None, request: Request) -> int:
        """Return the index of the model or adapter ``name``. Raises ModelNotFound."""
        names = [{*service.names, *(each.name for each in service.adapters)} for service in self._services]
        if name is None:
            return 0
        asked = (name, name.removesuffix(LATEST)) if request.url.path.startswith(OLLAMA) else (name,)
        for each in asked:
            for place, known in enumerate(names):
                if each in known:
                    return place
        served = ", ".join(each for service in self._services for each in service.names)
        raise ModelNotFound(f"The model {name!r} is not served here, but {served} are", param="model")

    async def _each(self, request: Request, endpoint: Endpoint) -> list[Response]:
        """Call the endpoint of each model, and return the answers. Raises the first error."""
        return [await endpoint(Request({**request.scope, "app": app}, request.receive)) for app in self._apps]

    async def _first_not_well(self, request: Request, endpoint: Endpoint) -> Response:
        found = await self._each(request, endpoint)
        return next((each for each in found if each.status_code != 200), found[0])

    async def health(self, request: Request) -> Response:
        """Return whether requests may be sent here, for all models."""
        return await self._first_not_well(request, status.health)

    async def ping(self, request: Request) -> Response:
        """Answer as /health does, for SageMaker."""
        return await self._first_not_well(request, status.health)

    async def ready(self, request: Request) -> Response:
        """Return whether requests are taken for all models."""
        found = await self._each(request, status.ready)
        bad = next((each for each in found if each.status_code != 200), None)
        return bad or self._by_name(found, status="ready")

    async def warmup(self, request: Request) -> Response:
        """Return the outcome of each warm-up, or of the model that the query names."""
        name = request.query_params.get("model")
        if name is not None or status.wants_page(request):
            app = self._apps[self._place(name, request)]
            return await status.warmup(Request({**request.scope, "app": app}, request.receive))
        return self._by_name(await self._each(request, status.warmup))

    async def load(self, _: Request) -> Response:
        """Return the number of requests for completions that are being answered."""
        return _json({"server_load": sum(service.load for service in self._services)})

    async def metrics(self, _: Request) -> Response:
        """Return counters and times of all models, for Prometheus."""
        await asyncio.gather(*(service.refresh(status.PATIENCE) for service in self._services))
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def models(self, request: Request) -> Response:
        """List all models, and their adapters."""
        return await self._together(request, status.models, "data")

    async def tags(self, request: Request) -> Response:
        """List the served models, in Ollama's form."""
        return await self._together(request, ollama_models.tags, "models")

    async def ps(self, request: Request) -> Response:
        """List the loaded models: all."""
        return await self._together(request, ollama_models.ps, "models")

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empty the prefix caches."""
        return (await self._each(request, status.reset_prefix_cache))[0]

    async def _together(self, request: Request, endpoint: Endpoint, key: str) -> Response:
        """Return the first model's answer, with the lists ``key`` of all models joined."""
        answers = [msgspec.json.decode(each.body) for each in await self._each(request, endpoint)]
        return _json(answers[0] | {key: [item for answer in answers for item in answer[key]]})

    def _by_name(self, answers: Sequence[Response], **more: Any) -> Response:
        names = (service.names[0] for service in self._services)
        return _json(
            more | {"models": {name: msgspec.Raw(each.body) for name, each in zip(names, answers, strict=True)}}
        )


def _named(data: bytes) -> _Named:
    """Return the model that a body names.

    An invalid body names none; the first model's application refuses it.
    """
    try:
        return msgspec.json.decode(data, type=_Named)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Named()


def _json(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")
