"""The bodies that clients send: one struct each, which decodes, checks and describes itself in /openapi.json.

A field is accepted if we do what it asks for, or if it cannot change the answer. Fields with :func:`_only` are not
implemented: they are accepted at the values that change nothing and rejected by name at any other.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.errors import InvalidRequest

Body = TypeVar("Body", bound=Struct)

_PATH = re.compile(r"\$([^`]*)`")
_FIELD_PROBLEMS = {
    "unknown field `": "Unrecognized request argument supplied",
    "required field `": "Missing required parameter",
}


def _only(*values: object) -> Meta:
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in (None, *values))
    return Meta(description=f"Not supported: only {allowed} is accepted.", extra_json_schema={"enum": [None, *values]})


_INERT = Annotated[Any, Meta(description="Accepted; changes nothing.")]


class ForModel(Struct, kw_only=True, forbid_unknown_fields=True):
    """A body that may name a model."""

    model: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Any, _only(False)] = None


def _with_fields(hints: Mapping[str, object]) -> Callable[[type[Body]], type[Body]]:
    """Add an optional field for each of ``hints`` that the struct does not declare itself."""

    def add(kind: type[Body]) -> type[Body]:
        fields = [(name, hint, None) for name, hint in hints.items() if name not in kind.__struct_fields__]
        how: dict[str, Any] = {"module": kind.__module__, "namespace": {"__doc__": kind.__doc__}, "kw_only": True}
        return typing.cast(type[Body], msgspec.defstruct(kind.__name__, fields, bases=(kind,), **how))

    return add


def _accepted(names: str) -> Callable[[type[Body]], type[Body]]:
    """Add fields that are accepted and change nothing."""
    return _with_fields(dict.fromkeys(names.split(), _INERT))


def _rejected(names: str) -> Callable[[type[Body]], type[Body]]:
    """Add fields that exist in the API and are rejected by name here."""
    return _with_fields(dict.fromkeys(names.split(), Annotated[Any, _only()]))


_SAMPLING_HINTS = typing.get_type_hints(SamplingParams)


@_with_fields({name: _SAMPLING_HINTS[name] | None for name, field in SAMPLING_FIELDS.items() if field.http})
@_accepted("user metadata safety_identifier prompt_cache_key prompt_cache_retention")
@_rejected(
    "allowed_token_ids guided_choice guided_grammar guided_json guided_regex kv_transfer_params structured_outputs "
    "truncate_prompt_tokens"
)
class Sampling(ForModel, kw_only=True):
    """What completions and chat completions have in common; the fields that we read by name are written out."""

    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    store: Annotated[Any, _only(False)] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    bad_words: Annotated[Any, _only([])] = None
    early_stopping: Annotated[Any, _only(False)] = None
    length_penalty: Annotated[Any, _only(1.0)] = None
    logits_processors: Annotated[Any, _only([])] = None
    priority: Annotated[Any, _only(0)] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    spaces_between_special_tokens: Annotated[Any, _only(True)] = None
    use_beam_search: Annotated[Any, _only(False)] = None


@_rejected("prompt_embeds")
class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[Any, _only("")] = None


@_rejected("image_url input_audio file video_url")
class ContentPart(Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None


@_rejected("tool_call_id function_call audio refusal")
class Message(Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[Any, _only([])] = None


@_accepted("parallel_tool_calls prediction")
@_rejected("chat_template audio mm_processor_kwargs reasoning_effort verbosity web_search_options")
class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    continue_final_message: Annotated[Any, _only(False)] = None
    documents: Annotated[Any, _only([])] = None
    echo: Annotated[Any, _only(False)] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    functions: Annotated[Any, _only([])] = None
    include_reasoning: Annotated[Any, _only(True)] = None
    modalities: Annotated[Any, _only(["text"])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    tools: Annotated[Any, _only([])] = None


class TokenizeRequest(ForModel, kw_only=True):
    """POST /tokenize: a ``prompt``, or the ``messages`` of a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ForModel, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


class ErrorBody(Struct):
    """OpenAI's error object; ``param`` names the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    error: ErrorBody


def decode(data: bytes, kind: type[Body]) -> Body:
    """The body of a request. Raises InvalidRequest, naming the field, for anything that is not supported."""
    try:
        body: Body = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply") from error
    _check_only(body, "")
    return body


@functools.cache
def _decoder(kind: type[Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _invalid(message: str) -> InvalidRequest:
    """msgspec's message in OpenAI's words, with its ``param``."""
    problem = message.partition(" - at `")[0]
    path = next(iter(_PATH.findall(message)), "").lstrip(".")
    for start, said in _FIELD_PROBLEMS.items():
        if name := problem.partition(start)[2].rstrip("`"):
            field = f"{path}.{name}" if path else name
            return InvalidRequest(f"{said}: {field}", param=field)
    return InvalidRequest(f"Invalid value for {path or 'the body'}: {problem}", param=path or None)


@functools.cache
def _only_fields(kind: type[Struct]) -> list[tuple[str, list[object]]]:
    """The fields of ``kind`` that are accepted at certain values only, with these values."""
    found = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for meta in typing.get_args(hint)[1:]:
            if isinstance(meta, Meta) and meta.extra_json_schema:
                found.append((name, meta.extra_json_schema["enum"]))
    return found


def _check_only(body: Struct, path: str) -> None:
    """Reject what is not supported, in ``body`` and in the structs in it."""
    for name, values in _only_fields(type(body)):
        value = getattr(body, name)
        if value is not None and not any(value == known and type(value) is type(known) for known in values):
            hint = " in a request; start the server with --chat-template" if name == "chat_template" else ""
            raise InvalidRequest(f"{path}{name} is not supported{hint}", param=f"{path}{name}")
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            _check_only(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            for position, item in enumerate(value):
                _check_only(item, f"{path}{name}[{position}].")
