"""/openapi.json, made from the structs that decode and encode the bodies."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

import preheat
from preheat.core import SAMPLING_FIELDS
from preheat.server import answers, schema
from preheat.server.schema import ErrorResponse
from preheat.warmup.record import Record

Kind = type[msgspec.Struct]
Kinds = Kind | types.UnionType

_REF = "#/components/schemas/{name}"
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_REFUSALS = {
    400: "The request cannot be served as it stands; the message says what to change.",
    401: "A valid API key is required.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests; try again later.",
    500: "The engine failed, or could not run this request.",
    503: "The engine is starting or the server is about to stop; try again later.",
    504: "The engine did not answer in time.",
}


@dataclass(frozen=True)
class Operation:
    """One method of one path: its bodies, what it may answer, and whether it can also stream or needs a key.

    ``answer`` may be several kinds; ``instead`` are bodies that a status may have in place of an error; ``formats`` are
    what the query may ask for.
    """

    method: str
    path: str
    summary: str
    answer: Kinds | None = None
    body: type[msgspec.Struct] | None = None
    refusals: tuple[int, ...] = ()
    streams: bool = False
    key: bool = True
    instead: Mapping[int, Kind] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)


_POST = (400, 401, 404, 408, 413, 429, 500, 503)
OPERATIONS = (
    Operation(
        "post", "/v1/completions", "Complete prompts", answers.Completion, schema.CompletionRequest, (*_POST, 504), True
    ),
    Operation(
        "post", "/v1/chat/completions", "Answer a conversation", answers.ChatCompletion, schema.ChatRequest,
        (*_POST, 504), True,
    ),
    Operation("get", "/v1/models", "The names of the model", answers.ModelList, None, (401, 429)),
    Operation("get", "/v1/models/{model}", "One of them", answers.ModelCard, None, (401, 404, 429)),
    Operation("post", "/tokenize", "Text to token ids", answers.Tokens, schema.TokenizeRequest, _POST),
    Operation("post", "/detokenize", "Token ids to text", answers.Text, schema.DetokenizeRequest, _POST),
    Operation("get", "/version", "The version of preheat", answers.Version, key=False),
    Operation("get", "/health", "Alive?", answers.Status, None, (500, 504), key=False),
    Operation(
        "get", "/ready", "Taking requests?", answers.ReadyStatus, None, (500, 503), key=False,
        instead={503: answers.Starting},
    ),
    Operation(
        "get", "/warmup", "What became of the plan", Record | answers.WarmingUp, None, (400, 500, 503), key=False,
        formats={"json": "application/json", "html": "text/html"},
    ),
    Operation("get", "/metrics", "Counters and times, for Prometheus", key=False),
)  # fmt: skip


@functools.cache
def document() -> bytes:
    """The OpenAPI document, as JSON."""
    kinds: set[Kind] = {ErrorResponse}
    for operation in OPERATIONS:
        for kind in (operation.answer, operation.body, *operation.instead.values()):
            kinds |= set(_each(kind))
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for component in components.values():
        _add_ranges(component.get("properties", {}))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "preheat", "version": preheat.__version__},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _add_ranges(properties: dict[str, Any]) -> None:
    """The ranges that sampling parameters check are part of the description of the fields of the same name."""
    for name, row in SAMPLING_FIELDS.items():
        for option in properties.get(name, {}).get("anyOf", ()):
            if option.get("type") in {"integer", "number"}:
                option |= {"minimum": row.low, "maximum": row.high}


def _described(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = (
        _content(operation.answer) if operation.answer else {"text/plain": {"schema": {"type": "string"}}}
    )
    if operation.streams:
        answer["text/event-stream"] = {"schema": _EVENT}
    for media in operation.formats.values():
        answer.setdefault(media, {"schema": {"type": "string"}})
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answer}}
    for status in operation.refusals:
        kinds = ErrorResponse | operation.instead.get(status, ErrorResponse)
        responses[str(status)] = {"description": _REFUSALS[status], "content": _content(kinds)}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    if operation.key:
        described["security"] = [{"key": []}, {}]
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.formats:
        formats = {"type": "string", "enum": list(operation.formats)}
        described["parameters"] = [{"name": "format", "in": "query", "schema": formats}]
    return described


def _each(kinds: Kinds | None) -> tuple[Kind, ...]:
    return () if kinds is None else typing.get_args(kinds) or (kinds,)


def _content(kinds: Kinds) -> dict[str, Any]:
    references = [{"$ref": _REF.format(name=kind.__name__)} for kind in _each(kinds)]
    return {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}
