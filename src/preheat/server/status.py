"""Endpoints about the server and its model, and the tokenizer's two."""

from __future__ import annotations

import asyncio

from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

import preheat
from preheat.core import Progress
from preheat.errors import InvalidRequest, ModelNotFound
from preheat.server.answers import (
    ModelCard,
    ModelList,
    ReadyStatus,
    Starting,
    Status,
    Text,
    Tokens,
    Version,
    WarmingUp,
    encode,
)
from preheat.server.body import read_body
from preheat.server.chat import render
from preheat.server.errors import RETRY
from preheat.server.params import encoded
from preheat.server.schema import DetokenizeRequest, TokenizeRequest, decode
from preheat.server.service import Service
from preheat.warmup.page import render as record_page
from preheat.warmup.page import render_progress

PATIENCE = 1.0
"""Seconds that a client waits for an engine in the middle of a step to say what is new."""


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(body: Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


def _starting(progress: Progress) -> Starting:
    return Starting(progress.done, progress.total, progress.current, progress.eta_s)


async def health(request: Request) -> Response:
    """GET /health: the server is alive, and so is the engine, even while it starts."""
    _service(request).check_health()
    return _json(Status("ok"))


async def ready(request: Request) -> Response:
    """GET /ready: requests are taken. Never waits, so what it says of cold events may be as old as the last call."""
    service = _service(request)
    if progress := service.progress:
        return _json(_starting(progress), 503, RETRY)
    _ = service.frontend
    await service.refresh(0)
    return _json(ReadyStatus(**service.live.record.summary()))


async def warmup(request: Request) -> Response:
    """GET /warmup: the record as JSON, or as a page; until there is one, how far the warm-up is."""
    service = _service(request)
    as_page = _wants_page(request)
    headers = {"vary": "accept", "cache-control": "no-cache"}
    if progress := service.progress:
        if as_page:
            return Response(render_progress(progress, service.names[0]), 200, headers, "text/html")
        return _json(WarmingUp(_starting(progress)), 200, headers)
    if service.max_model_len is None:
        _ = service.frontend  # it says why there is no record and never will be
    await service.refresh(PATIENCE)
    headers["age"] = str(int(service.live.age))
    if as_page:
        page = await asyncio.to_thread(record_page, service.live.record)
        return Response(page, 200, headers, "text/html")
    return Response(service.live.json, 200, headers, "application/json")


def _wants_page(request: Request) -> bool:
    asked = request.query_params.getlist("format")
    if not asked:
        return "text/html" in request.headers.get("accept", "")
    if asked not in (["json"], ["html"]):
        raise InvalidRequest(f"format must be json or html, not {', '.join(asked)}", param="format")
    return asked == ["html"]


async def version(_: Request) -> Response:
    """GET /version."""
    return _json(Version(preheat.__version__))


async def metrics(request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    service = _service(request)
    await service.refresh(PATIENCE)
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _models(service: Service) -> list[ModelCard]:
    return [ModelCard(name, service.created, service.max_model_len, service.settings.model) for name in service.names]


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return _json(ModelList(_models(_service(request))))


async def model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    name = request.path_params["model"]
    found = next((model for model in _models(_service(request)) if model.id == name), None)
    if found is None:
        raise ModelNotFound(f"The model {name!r} is not served here", param="model")
    return _json(found)


async def tokenize(request: Request) -> Response:
    """POST /tokenize."""
    service = _service(request)
    body = decode(await read_body(request), TokenizeRequest)
    service.check_model(body.model)
    frontend = service.frontend
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages", param="prompt")
    if body.messages is None:
        only_chat = "add_generation_prompt" if body.add_generation_prompt is not None else "chat_template_kwargs"
        if getattr(body, only_chat) is not None:
            raise InvalidRequest(f"{only_chat} needs messages", param=only_chat)
        text, special = body.prompt or "", body.add_special_tokens is not False
    else:
        text = render(service, body.messages, body.add_generation_prompt is not False, body.chat_template_kwargs)
        special = body.add_special_tokens is True
    ids = await encoded(frontend, text, special)
    strings = [frontend.tokenizer.token_text(id) for id in ids] if body.return_token_strs else None
    return _json(Tokens(len(ids), service.max_model_len or 0, ids, strings))


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    service = _service(request)
    body = decode(await read_body(request), DetokenizeRequest)
    service.check_model(body.model)
    frontend = service.frontend
    frontend.input.check_vocabulary(body.tokens, "tokens")
    return _json(Text(frontend.tokenizer.decode(body.tokens, skip_special_tokens=False)))
