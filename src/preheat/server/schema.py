"""The bodies that clients send: one struct each, which decodes, checks and describes itself in /openapi.json.

A field is accepted when we do what it asks, or when it cannot change the answer. ``Only`` fields exist in the API but
not here: they pass at the values that change nothing and are refused by name at any other.
"""

from __future__ import annotations

import functools
import re
import typing
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.errors import InvalidRequest

Body = TypeVar("Body", bound=Struct)

_PATH = re.compile(r"\$([^`]*)`")


def _only(*values: object) -> Meta:
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in (None, *values))
    return Meta(description=f"Not supported: only {allowed} is accepted.", extra_json_schema={"enum": [None, *values]})


Inert = Annotated[Any, Meta(description="Accepted; changes nothing.")]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Any, _only(False)] = None


def _with_sampling_fields(kind: type[Body]) -> type[Body]:
    """``kind`` with an optional field for each sampling parameter of the table that it does not declare itself."""
    hints = typing.get_type_hints(SamplingParams)
    rest = [name for name, field in SAMPLING_FIELDS.items() if field.http and name not in kind.__struct_fields__]
    fields = [(name, hints[name] | None, None) for name in rest]
    namespace = {"__doc__": kind.__doc__}
    whole = msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), module=kind.__module__, namespace=namespace, kw_only=True
    )
    return typing.cast(type[Body], whole)


@_with_sampling_fields
class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common; the fields that we read by name are written out."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None

    user: Inert = None
    metadata: Inert = None
    safety_identifier: Inert = None
    prompt_cache_key: Inert = None
    prompt_cache_retention: Inert = None
    store: Annotated[Any, _only(False)] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None

    allowed_token_ids: Annotated[Any, _only()] = None
    bad_words: Annotated[Any, _only([])] = None
    early_stopping: Annotated[Any, _only(False)] = None
    guided_choice: Annotated[Any, _only()] = None
    guided_grammar: Annotated[Any, _only()] = None
    guided_json: Annotated[Any, _only()] = None
    guided_regex: Annotated[Any, _only()] = None
    kv_transfer_params: Annotated[Any, _only()] = None
    length_penalty: Annotated[Any, _only(1.0)] = None
    logits_processors: Annotated[Any, _only([])] = None
    priority: Annotated[Any, _only(0)] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    spaces_between_special_tokens: Annotated[Any, _only(True)] = None
    structured_outputs: Annotated[Any, _only()] = None
    truncate_prompt_tokens: Annotated[Any, _only()] = None
    use_beam_search: Annotated[Any, _only(False)] = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[Any, _only("")] = None
    prompt_embeds: Annotated[Any, _only()] = None


class ContentPart(Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: Annotated[Any, _only()] = None
    input_audio: Annotated[Any, _only()] = None
    file: Annotated[Any, _only()] = None
    video_url: Annotated[Any, _only()] = None


class Message(Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[Any, _only([])] = None
    tool_call_id: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only()] = None
    audio: Annotated[Any, _only()] = None
    refusal: Annotated[Any, _only()] = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    chat_template: Annotated[Any, _only()] = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Annotated[Any, _only(False)] = None
    documents: Annotated[Any, _only([])] = None
    tools: Annotated[Any, _only([])] = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: Inert = None
    prediction: Inert = None
    audio: Annotated[Any, _only()] = None
    echo: Annotated[Any, _only(False)] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    functions: Annotated[Any, _only([])] = None
    include_reasoning: Annotated[Any, _only(True)] = None
    mm_processor_kwargs: Annotated[Any, _only()] = None
    modalities: Annotated[Any, _only(["text"])] = None
    reasoning_effort: Annotated[Any, _only()] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    verbosity: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a ``prompt``, or the ``messages`` of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class ErrorBody(Struct):
    """What went wrong; ``param`` names the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    error: ErrorBody


def decode(data: bytes, kind: type[Body]) -> Body:
    """The body of a request. Raises InvalidRequest, naming the field, for anything that we cannot do as asked."""
    try:
        body: Body = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply") from error
    _check_only(body, "")
    return body


@functools.cache
def _decoder(kind: type[Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _refused(message: str) -> InvalidRequest:
    """OpenAI's words and ``param`` for one of msgspec's messages."""
    problem = message.partition(" - at `")[0]
    path = next(iter(_PATH.findall(message)), "").lstrip(".")
    unknown = problem.partition("unknown field `")[2].rstrip("`")
    if unknown:
        field = f"{path}.{unknown}" if path else unknown
        return InvalidRequest(f"Unrecognized request argument supplied: {field}", param=field)
    missing = problem.partition("required field `")[2].rstrip("`")
    if missing:
        field = f"{path}.{missing}" if path else missing
        return InvalidRequest(f"Missing required parameter: {field}", param=field)
    return InvalidRequest(f"Invalid value for {path or 'the body'}: {problem}", param=path or None)


@functools.cache
def _only_fields(kind: type[Struct]) -> list[tuple[str, list[object]]]:
    """The fields of ``kind`` that pass at certain values only, read from its annotations."""
    found = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for meta in typing.get_args(hint)[1:]:
            if isinstance(meta, Meta) and meta.extra_json_schema:
                found.append((name, meta.extra_json_schema["enum"]))
    return found


def _check_only(body: Struct, path: str) -> None:
    """Refuse what is not supported, here and in the structs that the body holds."""
    for name, values in _only_fields(type(body)):
        value = getattr(body, name)
        if value is not None and not any(value == known and type(value) is type(known) for known in values):
            raise InvalidRequest(f"{path}{name} is not supported" + _hint(name), param=f"{path}{name}")
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            _check_only(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            for position, item in enumerate(value):
                _check_only(item, f"{path}{name}[{position}].")


def _hint(name: str) -> str:
    return " in a request; start the server with --chat-template" if name == "chat_template" else ""
