"""Ollama's endpoints about models: /api/tags, /api/ps, /api/show, /api/version."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.server.http.body import read_json
from preheat.server.http.service import Service
from preheat.server.ollama.schema import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaShown,
    OllamaShowRequest,
    OllamaVersion,
)
from preheat.server.openai.answers import encode

SPOKEN = "0.13.0"
"""The supported version of Ollama's API; clients refuse older ones."""

LATEST = ":latest"
"""Suffix that Ollama's clients add to a name without a tag."""


def served_name(service: Service, name: str | None) -> str | None:
    """Return the served name of ``name``. Raises ModelNotFound or NotReady."""
    known = {*service.names, *(adapter.name for adapter in service.adapters)}
    if name is not None and name not in known:
        name = name.removesuffix(LATEST)
    service.adapter_of(name)
    return name


async def tags(request: Request) -> Response:
    """List the served models, in Ollama's form."""
    return _models(request.app.state.service, loaded=False)


async def ps(request: Request) -> Response:
    """List the loaded models: all."""
    return _models(request.app.state.service, loaded=True)


async def version(_: Request) -> Response:
    """Return the supported version of Ollama's API."""
    return Response(encode(OllamaVersion(SPOKEN)), media_type="application/json")


async def show(request: Request) -> Response:
    """Return the capabilities of a model."""
    service: Service = request.app.state.service
    body = await read_json(request, OllamaShowRequest)
    if body.model is None and body.name is None:
        raise InvalidRequest("Missing required parameter: model", param="model")
    served_name(service, body.model or body.name)
    frontend = service.frontend
    shown = OllamaShown(
        template=frontend.template.source or "",
        details=OllamaDetails(),
        model_info={"general.architecture": "preheat", "preheat.context_length": service.max_model_len},
        capabilities=_capabilities(service, frontend),
        modified_at=_time(service),
    )
    return Response(encode(shown), media_type="application/json")


def _capabilities(service: Service, frontend: Frontend) -> list[str]:
    if frontend.pooling is not None:
        return ["embedding"]
    has = {
        "tools": bool(service.settings.tool_call_parser and service.settings.enable_auto_tool_choice),
        "vision": frontend.images is not None,
        "thinking": frontend.formats.reasoning is not None,
    }
    return ["completion", *(name for name, there in has.items() if there)]


def _models(service: Service, *, loaded: bool) -> Response:
    paths = dict.fromkeys(service.names, service.settings.model) | {each.name: each.path for each in service.adapters}
    context = service.max_model_len if loaded else None
    models = [
        OllamaModel(
            name=name, model=name, modified_at=_time(service), details=OllamaDetails(),
            digest=hashlib.sha256(f"{name}\0{path}".encode()).hexdigest(),
            context_length=UNSET if context is None else context,
        )
        for name, path in paths.items()
    ]  # fmt: skip
    return Response(encode(OllamaModels(models)), media_type="application/json")


def _time(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat()
