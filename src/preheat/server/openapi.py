"""The table of routes, and /openapi.json.

The document is made from the table and from the structs of the bodies.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

import preheat
from preheat.core import SAMPLING_FIELDS
from preheat.server import invocations
from preheat.server.anthropic import messages
from preheat.server.anthropic.messages_schema import CountRequest, MessageAnswer, MessagesRequest, TokenCount
from preheat.server.batches import endpoints as batches
from preheat.server.batches import file_store, files
from preheat.server.batches import schema as batch_schema
from preheat.server.http import decoding
from preheat.server.http.middleware import OPEN_PATHS
from preheat.server.invocations import InvocationRequest
from preheat.server.ollama import endpoints as ollama
from preheat.server.ollama import models as ollama_models
from preheat.server.ollama import schema as ollama_schema
from preheat.server.openai import answers, chat, completions, generate, responses, schema
from preheat.server.openai.responses_schema import ITEMS, Deleted, ResponseObject, ResponsesRequest
from preheat.server.openai.schema import ErrorResponse
from preheat.server.operations import control, status
from preheat.server.operations.adapters import load_lora_adapter, unload_lora_adapter
from preheat.server.pooling import classification, embeddings, scoring, tei, tei_tokens
from preheat.server.pooling.embeddings_schema import (
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
    Reranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from preheat.server.pooling.tei_schema import (
    DecodeRequest,
    EmbedRequest,
    EmbedTokensRequest,
    Info,
    Prediction,
    PredictRequest,
    Rank,
    RerankTextsRequest,
    SimilarityRequest,
    TokenizeTextsRequest,
    TokenPiece,
)
from preheat.server.replicas.relay_wire import GENERATE, MEMBER
from preheat.utils.structs import describe_structs
from preheat.warmup.record import Record

Kind = Any
"""A struct, or a list of structs or numbers."""
Kinds = Kind | types.UnionType
Endpoint = Callable[[Request], Awaitable[ASGIApp]]

_REF = "#/components/schemas/{name}"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_ERRORS = {
    400: "The request cannot be served; the message describes the remedy.",
    401: "A valid API key is required.",
    404: "There is nothing of that name.",
    409: "The name is taken, or the engine has another contract.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests; try again later.",
    500: "The engine failed, or could not run this request.",
    503: "The engine is starting or the server is about to stop; try again later.",
    504: "The engine did not answer in time.",
}


@dataclass(frozen=True)
class Operation:
    """A route: its endpoint and its bodies. The endpoint's docstring is the summary.

    - ``answer``: the answer's kinds; None is plain text.
    - ``errors``: statuses besides the ones common to all routes.
    - ``instead``: bodies that replace the error's, by status.
    - ``formats``: the values of the query's ``format``, with their media types.
    - ``queries``: other fields of the query, all texts.
    - ``lists``: the fields of the query that may come several times.
    - ``streams``: the media type of an answer in parts.
    - ``form``: the body is a form, not JSON.
    - ``bytes``: the answer is bytes.
    - ``of_adapters``: the route exists only where clients may load adapters.
    - ``operated``: an operator commands the engine; :mod:`preheat.server.http.route_check` refuses unknown fields.
    """

    path: str
    endpoint: Endpoint
    answer: Kinds | None = None
    body: Kind | None = None
    errors: tuple[int, ...] = ()
    streams: str = ""
    instead: Mapping[int, Kinds] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ("get",)
    of_adapters: bool = False
    operated: bool = False
    queries: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    form: bool = False
    bytes: bool = False

    @property
    def needs_key(self) -> bool:
        return self.path not in OPEN_PATHS or "post" in self.methods


_posted = functools.partial(Operation, methods=("post",))
_asked = functools.partial(Operation, errors=(400, 404, 500, 503), operated=True)
_operated = functools.partial(_asked, methods=("post",))

OPERATIONS = (
    _posted("/v1/completions", completions.completions, answers.Completion, schema.CompletionRequest, (504,), EVENTS),
    _posted("/v1/chat/completions", chat.chat, answers.ChatCompletion, schema.ChatRequest, (504,), EVENTS),
    _posted("/v1/chat/completions/batch", chat.batch, answers.ChatCompletion, schema.BatchChatRequest, (504,)),
    _posted("/v1/responses", responses.responses, ResponseObject, ResponsesRequest, (504,), EVENTS),
    Operation("/v1/responses/{id}", responses.response, ResponseObject, None, (404,)),
    Operation("/v1/responses/{id}", responses.delete_response, Deleted, None, (404,), methods=("delete",)),
    _posted("/v1/responses/{id}/cancel", responses.cancel_response, ResponseObject, None, (404,)),
    _posted("/v1/messages", messages.messages, MessageAnswer, MessagesRequest, (504,), EVENTS, queries=("beta",)),
    _posted("/v1/messages/count_tokens", messages.count_tokens, TokenCount, CountRequest, queries=("beta",)),
    _posted("/v1/chat/completions/render", chat.render, answers.Rendered, schema.ChatRequest, (504,)),
    _posted(
        "/invocations", invocations.invocations, answers.Completion | answers.ChatCompletion, InvocationRequest, (504,),
        EVENTS,
    ),
    _posted(GENERATE, generate.generate, generate.Generated, generate.GenerateRequest, (409, 504), EVENTS),
    Operation(MEMBER, generate.member, None, None, (400, 500, 503), bytes=True),
    Operation("/v1/models", status.models, answers.ModelList),
    Operation("/v1/models/{model:path}", status.model, answers.ModelCard, None, (404,)),
    _posted("/v1/embeddings", embeddings.embeddings, EmbeddingList, EmbeddingRequest, (504,)),
    _posted("/pooling", embeddings.pooling, PoolingList, PoolingRequest, (504,)),
    _posted("/classify", classification.classify, ClassificationList, ClassifyRequest, (504,)),
    _posted("/score", scoring.score, ScoreList, ScoreRequest, (504,)),
    _posted("/v1/score", scoring.score, ScoreList, ScoreRequest, (504,)),
    _posted(
        "/rerank", tei.rerank, Reranking | list[Rank], RerankRequest | RerankTextsRequest, (504,),
    ),
    _posted("/embed", tei.embed, list[list[float]], EmbedRequest, (504,)),
    _posted("/embed_all", tei.embed_all, list[list[list[float]]], EmbedTokensRequest, (504,)),
    _posted("/embed_sparse", tei.embed_sparse, None, EmbedTokensRequest, (504,)),
    _posted("/similarity", tei.similarity, list[float], SimilarityRequest, (504,)),
    _posted("/decode", tei_tokens.decode, list[str], DecodeRequest),
    _posted("/", tei.by_kind, list[list[float]] | list[Rank] | list[Prediction], EmbedRequest | RerankTextsRequest,
            (504,)),
    _posted("/predict", tei.predict, list[Prediction] | list[list[Prediction]], PredictRequest, (504,)),
    Operation("/info", tei.info, Info, None, (400,)),
    _posted("/v2/rerank", scoring.rerank, Reranking, RerankRequest, (504,)),
    _posted("/v1/rerank", scoring.rerank, Reranking, RerankRequest, (504,)),
    _posted(
        "/v1/files", files.upload_file, file_store.StoredFile, batch_schema.FileUpload, form=True,
    ),
    Operation(
        "/v1/files", files.list_files, batch_schema.FileList, None, (400, 404),
        queries=("after", "limit", "order", "purpose"),
    ),
    Operation("/v1/files/{id}", files.get_file, file_store.StoredFile, None, (404,)),
    Operation("/v1/files/{id}", files.delete_file, batch_schema.FileDeleted, None, (400, 404), methods=("delete",)),
    Operation("/v1/files/{id}/content", files.file_content, None, None, (404,), bytes=True),
    _posted("/v1/batches", batches.create_batch, batch_schema.BatchObject, batch_schema.BatchRequest),
    Operation(
        "/v1/batches", batches.list_batches, batch_schema.BatchList, None, (400, 404), queries=("after", "limit")
    ),
    Operation("/v1/batches/{id}", batches.get_batch, batch_schema.BatchObject, None, (404,)),
    _posted("/v1/batches/{id}/cancel", batches.cancel_batch, batch_schema.BatchObject, None, (400, 404)),
    _posted(
        "/tokenize", tei_tokens.tokenize, answers.Tokens | list[list[TokenPiece]],
        schema.TokenizeRequest | TokenizeTextsRequest,
    ),
    _posted("/detokenize", status.detokenize, answers.Text, schema.DetokenizeRequest),
    Operation("/tokenizer_info", status.tokenizer_info, answers.TokenizerInfo, None, (400, 500, 503)),
    _posted(
        "/reset_prefix_cache", status.reset_prefix_cache, errors=(400, 500, 503),
        queries=("reset_running_requests", "reset_external"),
    ),
    _posted(
        "/v1/load_lora_adapter", load_lora_adapter, None, schema.LoadLoraAdapterRequest, (409,),
        of_adapters=True,
    ),
    _posted(
        "/v1/unload_lora_adapter", unload_lora_adapter, None, schema.UnloadLoraAdapterRequest, (409,),
        of_adapters=True,
    ),
    _operated("/drain", control.drain, answers.Status, queries=("wait",)),
    _operated(
        "/pause", control.pause, answers.Status, queries=("mode", "wait_for_inflight_requests", "clear_cache")
    ),
    _operated("/resume", control.resume, answers.Status),
    _operated("/update_weights", control.update_weights, answers.WeightInfo, control.UpdateWeightsRequest),
    _operated(
        "/init_weight_transfer_engine", control.init_weight_transfer_engine, answers.Status,
        control.InitWeightTransferRequest,
    ),
    _operated(
        "/start_weight_update", control.start_weight_update, answers.Status, control.StartWeightUpdateRequest
    ),
    _operated(
        "/finish_weight_update", control.finish_weight_update, answers.WeightInfo,
        control.FinishWeightUpdateRequest,
    ),
    _asked("/get_world_size", control.get_world_size, answers.WorldSize, queries=("include_dp",)),
    _operated("/sleep", control.sleep, answers.Status, queries=("level", "mode")),
    _operated("/wake_up", control.wake_up, answers.Status, queries=("tags",), lists=("tags",)),
    _asked("/is_sleeping", control.is_sleeping, answers.Sleeping),
    _asked("/is_paused", control.is_paused, answers.Paused),
    _asked("/weight_info", control.weight_info, answers.WeightInfo),
    Operation("/version", status.version, answers.Version),
    Operation(
        "/health", status.health, answers.Status, None, (400, 503, 504), instead={503: answers.Starting},
        queries=("deep",),
    ),
    Operation(
        "/ping", status.ping, answers.Status, None, (503, 504), methods=("get", "post"), instead={503: answers.Starting}
    ),
    Operation("/live", status.live, answers.Status),
    Operation("/load", status.load, answers.ServerLoad),
    Operation(
        "/ready", status.ready, answers.ReadyStatus, None, (500, 503), instead={503: answers.Starting | answers.Asleep}
    ),
    Operation(
        "/warmup", status.warmup, Record | answers.Records | answers.WarmingUp, None, (400, 500, 503),
        queries=("engine",),
        formats={"json": "application/json", "html": "text/html"},
    ),
    Operation("/metrics", status.metrics),
)  # fmt: skip
"""Every route except the document's own."""


OLLAMA = (
    _posted("/api/chat", ollama.chat, ollama_schema.OllamaChatAnswer, ollama_schema.OllamaChatRequest, (504,), LINES),
    _posted(
        "/api/generate", ollama.generate, ollama_schema.OllamaGenerateAnswer, ollama_schema.OllamaGenerateRequest,
        (504,), LINES,
    ),
    _posted("/api/embed", ollama.embed, ollama_schema.OllamaEmbedAnswer, ollama_schema.OllamaEmbedRequest, (504,)),
    _posted("/api/show", ollama_models.show, ollama_schema.OllamaShown, ollama_schema.OllamaShowRequest),
    Operation("/api/tags", ollama_models.tags, ollama_schema.OllamaModels),
    Operation("/api/ps", ollama_models.ps, ollama_schema.OllamaModels),
    Operation("/api/version", ollama_models.version, ollama_schema.OllamaVersion),
)  # fmt: skip
"""The routes of ``--api ollama``."""


def served(*, adapters: bool, ollama: bool = False) -> list[Operation]:
    """Return the routes of a server.

    ``adapters`` adds the routes for loading adapters, ``ollama`` the routes of Ollama's API.
    """
    own = [operation for operation in OPERATIONS if adapters or not operation.of_adapters]
    return [*own, *(OLLAMA if ollama else ())]


def prepare() -> None:
    """Build the decoders of all request bodies, before threads use them."""
    describe_structs()
    bodies = [kind for each in (*OPERATIONS, *OLLAMA) if not each.form for kind in _each(each.body)]
    for kind in (*bodies, *ITEMS.values()):
        decoding.prepare(kind)


@functools.cache
def document(root_path: str = "", *, adapters: bool = True, ollama: bool = False, strict: bool = False) -> bytes:
    """Return the OpenAPI document of a server as JSON; see :func:`served`.

    Clients find the server under ``root_path``. With ``strict`` the server refuses unknown fields.
    """
    kinds: set[Kind] = {ErrorResponse}
    for operation in served(adapters=adapters, ollama=ollama):
        for kind in (operation.answer, operation.body, *operation.instead.values()):
            kinds |= set(_each(kind))
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for component in components.values():
        _add_ranges(component.get("properties", {}))
        if component.get("additionalProperties") is False:
            component["additionalProperties"] = {"type": "null"} if strict else True  # see decoding.py
    paths: dict[str, dict[str, Any]] = {}
    for operation in served(adapters=adapters, ollama=ollama):
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {}).update(dict.fromkeys(operation.methods, _described(operation)))
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            **servers,
            "info": {"title": "preheat", "version": preheat.__version__},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _add_ranges(properties: dict[str, Any]) -> None:
    """Add the ranges of sampling parameters to the fields of that name."""
    for name, row in SAMPLING_FIELDS.items():
        for option in properties.get(name, {}).get("anyOf", ()):
            if option.get("type") in {"integer", "number"}:
                ends = {"minimum": row.low, "maximum": row.high}
                option |= {end: value for end, value in ends.items() if value is not None}


def _described(operation: Operation) -> dict[str, Any]:
    plain = "application/octet-stream" if operation.bytes else "text/plain"
    answer: dict[str, Any] = _content(operation.answer) if operation.answer else {plain: {"schema": {"type": "string"}}}
    if operation.streams:
        answer[operation.streams] = {"schema": _EVENT if operation.streams == EVENTS else {"type": "string"}}
    for media in operation.formats.values():
        answer.setdefault(media, {"schema": {"type": "string"}})
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answer}}
    shared = (401, 429) * operation.needs_key + (400, 404, 408, 413, 415, 500, 503) * bool(operation.body)
    for code in sorted({*shared, *operation.errors}):
        kinds = ErrorResponse | operation.instead.get(code, ErrorResponse)
        responses[str(code)] = {"description": _ERRORS[code], "content": _content(kinds)}
    described: dict[str, Any] = {"summary": (operation.endpoint.__doc__ or "").rstrip("."), "responses": responses}
    if operation.body:
        media = "multipart/form-data" if operation.form else "application/json"
        described["requestBody"] = {"required": True, "content": _content(operation.body, media)}
    if operation.needs_key:
        described["security"] = [{"key": []}, {}]
    if named := re.search(r"{(\w+)", operation.path):
        described["parameters"] = [{"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.formats:
        formats = {"type": "string", "enum": list(operation.formats)}
        described["parameters"] = [{"name": "format", "in": "query", "schema": formats}]
    if operation.queries:
        text = {"type": "string"}
        queries = [{"name": name, "in": "query", "schema": text} for name in operation.queries]
        described.setdefault("parameters", []).extend(queries)
    return described


def _each(kinds: Kinds | None) -> tuple[Kind, ...]:
    if kinds is None:
        return ()
    return typing.get_args(kinds) if isinstance(kinds, types.UnionType) else (kinds,)


def _reference(kind: Any) -> dict[str, Any]:
    """Return the schema of a kind of body; a list is written out."""
    if typing.get_origin(kind) is list:
        return {"type": "array", "items": _reference(*typing.get_args(kind))}
    return {"type": "number"} if kind is float else {"$ref": _REF.format(name=kind.__name__)}


def _content(kinds: Kinds, media: str = "application/json") -> dict[str, Any]:
    references = [*map(_reference, _each(kinds))]
    return {media: {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}
