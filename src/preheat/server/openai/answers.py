"""The bodies of answers: OpenAI's shapes, and vLLM's for vLLM's own endpoints.

Keys that are null in their answers are null here too, because clients read them without checking for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from preheat.frontend.receipt import Receipt
from preheat.utils.contract import Contract
from preheat.warmup.record import Record

encode = msgspec.json.Encoder().encode


def encoded(value: object) -> Any:
    """Encode ``value`` to raw JSON for a field of an answer.

    The encoder holds Python's lock for a whole answer, so large parts are encoded one by one beforehand.
    """
    return msgspec.Raw(encode(value))


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    reasoning_tokens: int = 0


class Usage(Struct):
    """The usage of an answer.

    ``prompt_tokens`` counts each prompt once, whatever the number of choices. ``cached_answer`` is present, and true,
    if nothing was computed.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    cached_answer: bool | UnsetType = UNSET


def usage_of_all(usages: Sequence[Usage]) -> Usage:
    """Return the sum of several answers' usages."""
    prompt, completion = (
        sum(getattr(each, name) for each in usages) for name in ("prompt_tokens", "completion_tokens")
    )
    cached = sum(each.prompt_tokens_details.cached_tokens for each in usages)
    total = Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
    thought = [each.completion_tokens_details for each in usages if each.completion_tokens_details is not UNSET]
    if thought:
        total.completion_tokens_details = CompletionTokensDetails(sum(each.reasoning_tokens for each in thought))
    return total


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    """One entry per token; ``top_logprobs`` by the token's text; ``text_offset`` in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptPart(NamedTuple):
    """The logprobs of a prompt, encoded once for all of its choices.

    ``fields`` are lists of JSON without the closing bracket. The prompt has ``characters`` characters.
    """

    fields: tuple[bytes, ...]
    characters: int

    @classmethod
    def of(cls, logprobs: CompletionLogprobs) -> PromptPart:
        """Return the part of a prompt of one token or more."""
        lists = (getattr(logprobs, name) for name in logprobs.__struct_fields__)
        return cls(tuple(encode(each)[:-1] for each in lists), sum(map(len, logprobs.tokens)))

    def followed_by(self, more: CompletionLogprobs) -> Any:
        """Return the logprobs of the prompt and of its continuation, as raw JSON for a field of an answer."""
        pieces = list[bytes]()
        for name, before in zip(more.__struct_fields__, self.fields, strict=True):
            after = _continued(encode(getattr(more, name)))
            pieces += b',"' if pieces else b'{"', name.encode(), b'":', before, after
        return msgspec.Raw(b"".join((*pieces, b"}")))  # one copy of megabytes


def _continued(encoded_list: bytes) -> bytes:
    """Return a list of JSON as the end of another one."""
    return b"]" if encoded_list == b"[]" else b",%b" % encoded_list[1:]


class CompletionChunkChoice(Struct):
    """A choice in an event of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    receipt: Receipt | UnsetType = UNSET


class CompletionChoice(CompletionChunkChoice):
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: None = None


class Whole(Struct, kw_only=True):
    """Fields common to whole answers."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: None = None
    metrics: None = None


class Completion(Whole, kw_only=True):
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """A message of an answer.

    ``reasoning`` and ``reasoning_content`` are equal; clients look for either.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: None = None
    receipt: Receipt | UnsetType = UNSET


class ChatCompletion(Whole, kw_only=True):
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct):
    """New text of a call. The first delta of a call has its id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    receipt: Receipt | UnsetType = UNSET


class Rendered(Struct):
    """The prompt of a conversation that was rendered but not run."""

    request_id: str
    token_ids: list[int]
    model: str


class ModelCard(Struct):
    """A model or adapter.

    ``max_model_len`` is null until the engine is ready. ``root`` is its source, a folder or a Hub id. ``parent`` is
    the model of an adapter.
    """

    id: str
    created: int
    max_model_len: int | None
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "preheat"
    parent: str | None = None
    permission: list[Any] = []


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Struct):
    prompt: str


class Status(Struct):
    status: str
    message: str | None = None


class Starting(Struct):
    """Progress of the warm-up: ``done`` of ``total`` items.

    ``eta_s`` is null while it cannot be estimated.
    """

    done: int
    total: int
    current: str
    eta_s: float | None


class WarmingUp(Struct):
    """The answer of /warmup until the engine is ready; then the record replaces it."""

    progress: Starting
    state: Literal["starting"] = "starting"


class Records(Struct):
    """The records of all engines, if there are several and the query names none."""

    engines: list[Record]


class ReadyStatus(Struct):
    """The warm-up record in short.

    It has the warm-up items by outcome, the digest of the check's logits, cold events and plan misses. ``simulated`` is
    present, and true, on a fake device. ``contract`` has all parts that decide tokens, ``contract_id`` their digest.
    ``engines`` is the number of engines that take requests.
    """

    items: dict[str, int]
    seconds: float
    invariant: bool
    digest: str
    cold_events: int
    misses: int
    fingerprint: str
    notes: list[str]
    contract: Contract
    contract_id: str
    engines: int
    simulated: bool | UnsetType = UNSET
    status: Literal["ready"] = "ready"


class Paused(Struct):
    is_paused: bool


class Sleeping(Struct):
    is_sleeping: bool


class Asleep(Struct):
    """The engine sleeps at ``level`` and has released memory."""

    level: int
    state: Literal["asleep"] = "asleep"


class WorldSize(Struct):
    world_size: int


class WeightInfo(Struct):
    """The version of the weights. ``digest`` covers the logits of the boot check with these weights."""

    weight_version: str
    digest: str


class ServerLoad(Struct):
    """The load. ``server_load`` counts the requests for completions that are being answered."""

    server_load: int


class TokenizerInfo(Struct):
    """The contents of tokenizer_config.json; ``chat_template`` is the template in use."""

    tokenizer_class: str
    chat_template: str | UnsetType = UNSET


class Version(Struct):
    version: str
