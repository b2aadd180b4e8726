"""Request bodies as structs.

Each struct decodes and checks a body, and describes it in /openapi.json.

A field is accepted if the server does as it asks, or if the field cannot change the answer. A field declared with
:func:`only` is not implemented. It is accepted at the values that change nothing, and rejected by name at any other.
:mod:`preheat.server.http.decoding` handles fields that no struct declares.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.utils.json_size import MOST_IDS, MOST_VALUES

Kind = TypeVar("Kind", bound=Struct)

REQUEST_ID = r"[A-Za-z0-9_.:/+=@-]{1,128}"
"""Pattern of a request id chosen by the client."""

Name = Annotated[str, Meta(max_length=1024)]
"""A name given by the client: of a model, a version or a host."""

MAX_PROMPTS = 2048
"""Most prompts or conversations of one request."""

USUAL_VERBOSITY = "medium"
"""The verbosity that asks for nothing."""

FilePath = Annotated[str, Meta(min_length=1, max_length=4096)]


def only(*values: object) -> Meta:
    """Describe a field that is accepted at null and ``values`` only.

    Any other value is rejected, naming the field.
    """
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in (None, *values))
    return Meta(description=f"Not supported: only {allowed} is accepted.", extra_json_schema={"enum": [None, *values]})


def hint(*values: object) -> Meta:
    """Describe a field that asks for nothing at null and ``values``.

    At any other value the field is ignored and reported as an unknown field is.
    """
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in (None, *values))
    return Meta(description=f"Ignored, and named in X-Ignored-Fields, unless it is {allowed}.", extra={IDLE: values})


Spelled = Mapping[str, tuple[str, ...]]
"""A body's own names of the engine's fields, as paths; see :mod:`preheat.server.http.field_names`."""

IDLE = "idle values"
_INERT = Annotated[Any, Meta(description="Accepted; changes nothing.")]


class ForModel(Struct, kw_only=True, forbid_unknown_fields=True):
    """A body that may name a model and give the request an id.

    :func:`preheat.server.http.middleware.name_request` reads the id.
    """

    most_values: ClassVar[int] = MOST_VALUES
    spelled: ClassVar[Spelled] = {}

    model: Name | None = None
    request_id: Annotated[str, Meta(pattern=f"^{REQUEST_ID}$")] | None = None


class LoadLoraAdapterRequest(ForModel, kw_only=True):
    """POST /v1/load_lora_adapter.

    ``lora_path`` is a folder below ``--lora-root``; a relative path starts there. With ``load_inplace`` it replaces a
    loaded adapter of the same name.
    """

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: FilePath
    load_inplace: bool | None = None
    is_3d_lora_weight: Annotated[Any, only(False)] = None


class UnloadLoraAdapterRequest(ForModel, kw_only=True):
    lora_name: Name
    lora_int_id: _INERT = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options for the usage in a stream.

    The last event has the usage unless ``include_usage`` is false; with ``continuous_usage_stats`` every event has it.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def with_fields(hints: Mapping[str, object]) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that adds optional fields.

    There is one for each of ``hints``, except for fields that the struct declares.
    """

    def add(kind: type[Kind]) -> type[Kind]:
        fields = [(name, hint, None) for name, hint in hints.items() if name not in kind.__struct_fields__]
        how: dict[str, Any] = {"module": kind.__module__, "namespace": {"__doc__": kind.__doc__}, "kw_only": True}
        return typing.cast(type[Kind], msgspec.defstruct(kind.__name__, fields, bases=(kind,), **how))

    return add


def accepted(names: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that adds fields that are accepted and change nothing."""
    return with_fields(dict.fromkeys(names.split(), _INERT))


def rejected(names: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that adds fields rejected by name.

    They are fields of the API that this server does not support.
    """
    return with_fields(dict.fromkeys(names.split(), Annotated[Any, only()]))


def hinted(names: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that adds ignorable fields; see :func:`hint`."""
    return with_fields(dict.fromkeys(names.split(), Annotated[Any, hint()]))


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """The schema of an answer in JSON.

    ``strict`` changes nothing: a schema is always enforced. ``name`` and ``description`` are for the client's own use.
    """

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class StructuralTag(Struct, forbid_unknown_fields=True):
    """A part of the text: ``begin``, then JSON of ``schema``, then ``end``."""

    begin: str
    schema: dict[str, Any]
    end: str


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The format of an answer's text.

    A structural tag has ``structures`` and ``triggers``, or a ``format``.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[StructuralTag] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


@accepted("remote_block_ids remote_request_id tp_size pp_size remote_blocks_expiry_time")
class KvTransferParams(Struct, forbid_unknown_fields=True):
    """vLLM's parameters for prompts that one server reads and another one continues.

    With ``do_remote_decode`` the answer has the parameters for the other server. With ``do_remote_prefill`` the blocks
    of the first ``remote_num_tokens`` tokens are pulled from ``remote_host``. Blocks are found by hash, so ids of
    blocks and requests change nothing.
    """

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: Name | None = None
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    remote_num_tokens: Annotated[int, Meta(ge=0)] | None = None
    transfer_mode: Name | None = None


_HINTS = typing.get_type_hints(SamplingParams)
SAMPLING_HINTS = {name: _HINTS[name] for name, field in SAMPLING_FIELDS.items() if field.http}
"""The types of the sampling fields in request bodies, by field name."""


@with_fields({name: hint | None for name, hint in SAMPLING_HINTS.items()})
@accepted("user metadata safety_identifier prompt_cache_key prompt_cache_retention session_id")
@hinted("vllm_xargs guided_decoding_backend")
@rejected("ec_transfer_params prompt_logprob_token_ids")
class Sampling(ForModel, kw_only=True):
    """Fields common to completions and chat completions.

    The class declares the fields that the server reads by name; decorators add the others.
    ``spaces_between_special_tokens`` changes nothing: a text has the spaces of its tokens.
    """

    spelled: ClassVar[Spelled] = {
        "structured_outputs": (
            "structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        ),
    }  # fmt: skip

    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Name | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    store: Annotated[Any, hint(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    early_stopping: Annotated[Any, only(False)] = None
    watermarking: Annotated[Any, only(False)] = None
    routed_experts_prompt_start: Annotated[Any, only(0)] = None
    length_penalty: float | None = None
    logits_processors: Annotated[Any, only([])] = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    use_beam_search: bool | None = None
    kv_transfer_params: KvTransferParams | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions.

    ``prompt_embeds`` holds prompts of embeddings, each the base64 of a file of ``torch.save``. They come before the
    prompts of ``prompt``.
    """

    most_values: ClassVar[int] = MOST_IDS
    spelled: ClassVar[Spelled] = {
        **Sampling.spelled, "n": ("best_of", "n"), "prompt_logprobs": ("prompt_logprobs", "logprobs")
    }  # fmt: skip

    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[Any, only("")] = None


class ImageUrl(Struct, forbid_unknown_fields=True):
    """An image. ``url`` is a data URL, or a URL that the server is configured to read."""

    url: str
    detail: Annotated[Any, only("auto")] = None


class VideoUrl(Struct, forbid_unknown_fields=True):
    """Frames of a video. ``url`` is data:video/jpeg;base64,FRAME,FRAME,…, and a second has ``fps`` frames."""

    url: str
    fps: float | None = None


@rejected("input_audio file")
class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message.

    A text has the type ``text``, ``input_text`` or ``output_text``; a ``refusal`` is a text of the model. ``video`` are
    the URLs of a video's frames, and a second has ``fps`` of them.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    video_url: VideoUrl | None = None
    video: list[str] | None = None
    fps: float | None = None


class FunctionCall(Struct, forbid_unknown_fields=True):
    """``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call that the model made. Streams add ``index``."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


@rejected("function_call audio")
class Message(Struct, forbid_unknown_fields=True):
    """A message of a conversation. ``reasoning`` and ``reasoning_content`` are two names of one field.

    A ``refusal`` is one more text of the content.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[Any, only([])] = None


@accepted("description parameters strict")
class FunctionName(Struct, forbid_unknown_fields=True):
    """The name of a function; some clients send the whole tool."""

    name: str


class AllowedTool(Struct, forbid_unknown_fields=True):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct, forbid_unknown_fields=True):
    """The tools that may be called; with mode "required", one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    """A choice of tools: the one ``function`` to call, or the ``allowed_tools``."""

    function: FunctionName | None = None
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None


_TOOLS = Meta(description="Shown to the model by its chat template.")


Template = Annotated[str, Meta(max_length=65536)]


@accepted("prediction")
@rejected("audio mm_processor_kwargs media_io_kwargs return_prompt_text web_search_options")
class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions.

    ``documents``, ``reasoning_effort`` and ``verbosity`` reach chat templates that use them. ``chat_template`` replaces
    the template of the model (``--trust-request-chat-template``).
    """

    spelled: ClassVar[Spelled] = {
        "max_tokens": ("max_completion_tokens", "max_tokens"),
        "logprobs": ("top_logprobs",),
        "prompt": ("messages",),
        "structured_outputs": (*Sampling.spelled["structured_outputs"], "tools"),
    }

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]] | None, _TOOLS] = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    verbosity: str | None = None
    function_call: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    modalities: Annotated[Any, only(["text"])] = None


class BatchChatRequest(ChatRequest, kw_only=True):
    """POST /v1/chat/completions/batch: several conversations with the same fields, and one answer to each."""

    messages: list[list[Message]]  # type: ignore[assignment]
    n: Annotated[Any, only(1)] = None
    stream: Annotated[Any, only(False)] = None
    tools: Annotated[Any, only()] = None
    tool_choice: Annotated[Any, only("none")] = None
    use_beam_search: Annotated[Any, only(False)] = None
    prompt_logprobs: Annotated[Any, only()] = None


class TokenizeRequest(ForModel, kw_only=True):
    """POST /tokenize: a ``prompt``, or the ``messages`` of a conversation."""

    spelled: ClassVar[Spelled] = {"prompt": ("prompt", "messages")}

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]] | None, _TOOLS] = None
    return_token_strs: bool | None = None
    chat_template: Template | None = None


class DetokenizeRequest(ForModel, kw_only=True):
    """POST /detokenize."""

    most_values: ClassVar[int] = MOST_IDS

    tokens: list[int]


class ErrorBody(Struct):
    """OpenAI's error object; ``param`` names the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    error: ErrorBody
