"""What the server says of itself and its model, and the tokenizer's two routes."""

from __future__ import annotations

from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

import preheat
from preheat.errors import InvalidRequest, ModelNotFound
from preheat.server.answers import Model, ModelList, Status, Text, Tokens, Version
from preheat.server.chat import render
from preheat.server.guard import read_body
from preheat.server.params import encoded
from preheat.server.schema import DetokenizeRequest, TokenizeRequest, decode
from preheat.server.service import Service
from preheat.server.stream import encode


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(body: Struct) -> Response:
    return Response(encode(body), media_type="application/json")


async def health(request: Request) -> Response:
    """GET /health: the server is alive, and so is the engine, even while it starts."""
    _service(request).check_health()
    return _json(Status("ok"))


async def ready(request: Request) -> Response:
    """GET /ready: requests are taken."""
    _ = _service(request).door
    return _json(Status("ready"))


async def version(_: Request) -> Response:
    """GET /version."""
    return _json(Version(preheat.__version__))


async def metrics(request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _models(service: Service) -> list[Model]:
    return [Model(name, service.created, service.max_model_len, service.settings.model) for name in service.names]


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
    door = service.door
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
    ids = await encoded(door, text, special)
    strings = [door.tokenizer.token_text(id) for id in ids] if body.return_token_strs else None
    return _json(Tokens(len(ids), service.max_model_len or 0, ids, strings))


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    service = _service(request)
    body = decode(await read_body(request), DetokenizeRequest)
    service.check_model(body.model)
    door = service.door
    door.check_vocabulary(body.tokens, "tokens")
    return _json(Text(door.tokenizer.decode(body.tokens, skip_special_tokens=False)))
