"""The bodies of /v1/responses: OpenAI's shapes, as far as supported.

See :mod:`preheat.server.openai.schema`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from preheat.server.openai.schema import (
    SAMPLING_HINTS,
    ForModel,
    Name,
    Spelled,
    accepted,
    hinted,
    only,
    rejected,
    with_fields,
)


class TextFormat(Struct, forbid_unknown_fields=True):
    """The format of an answer's text; a schema has a name."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """Options of reasoning. ``effort`` is a variable for chat templates that use it."""

    effort: str | None = None
    summary: Annotated[Any, only("auto")] = None
    generate_summary: Annotated[Any, only()] = None


class FunctionTool(Struct, forbid_unknown_fields=True):
    """A function that the model may call; tools of another ``type`` are refused."""

    type: str
    name: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


@accepted("description parameters strict")
class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"] = "function"


@accepted("description parameters strict")
class FunctionChoice(Struct, forbid_unknown_fields=True):
    """A choice of tools: the function to call, or the allowed ``tools``."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedFunction] | None = None


_NOT_HERE = {"n", "max_tokens", "prompt_logprobs", "logprob_token_ids"}

LOGPROBS = "message.output_text.logprobs"


Include = Literal[
    "reasoning.encrypted_content", "message.output_text.logprobs", "message.input_image.image_url",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
"""Parts that a client may ask for. The parts about the server's own tools stay empty, as it runs none."""


@with_fields({name: kind | None for name, kind in SAMPLING_HINTS.items() if name not in _NOT_HERE})
@accepted("user safety_identifier prompt_cache_key prompt_cache_retention stream_options session_id")
@hinted("vllm_xargs max_tool_calls")
@rejected("conversation prompt context_management previous_input_messages previous_response mm_processor_kwargs")
class ResponsesRequest(ForModel, kw_only=True):
    """POST /v1/responses. ``input`` is a text, or a list of messages, function calls and their outputs."""

    spelled: ClassVar[Spelled] = {
        "max_tokens": ("max_output_tokens",),
        "logprobs": ("top_logprobs",),
        "prompt": ("input",),
        "messages": ("input",),
        "structured_outputs": ("structured_outputs", "text.format", "tools"),
        "tools[].function.name": ("tools[].name",),
        "tools[].function.parameters": ("tools[].parameters",),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Name | None = None
    priority: int | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    include: list[Include] | None = None
    include_reasoning: bool | None = None
    top_logprobs: int | None = None
    truncation: Annotated[Any, only("disabled")] = None
    background: bool | None = None
    service_tier: Annotated[Any, only("auto", "default")] = None


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content; only parts with text are supported. A refusal has its text in ``refusal``."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(Struct, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Struct, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]
    id: str | None = None
    status: str | None = None


class ReasoningText(Struct):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(Struct, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem

ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}
"""The structs of input items, by type. An item without a type is a message."""


class OutputText(Struct):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []
    type: Literal["output_text"] = "output_text"


class OutputMessage(Struct, tag="message"):
    id: str
    content: list[OutputText]
    status: str = "completed"
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


class OutputReasoning(Struct, tag="reasoning"):
    id: str
    content: list[ReasoningText]
    summary: list[Any] = []
    status: str = "completed"


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponsesUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Struct):
    reason: str


class ResponseError(Struct):
    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """The response; it repeats the fields of the request."""

    id: str
    created_at: int
    model: str
    status: str = "in_progress"
    output: list[OutputItem] = []
    usage: ResponsesUsage | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningOptions | None = None
    store: bool = False
    temperature: float = 1.0
    text: TextOptions | UnsetType = UNSET
    tool_choice: str | FunctionChoice = "auto"
    tools: list[FunctionTool] = []
    top_p: float = 1.0
    truncation: str = "disabled"
    background: bool = False
    top_logprobs: int | None = None
    user: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: str = "auto"
    max_tool_calls: None = None
    prompt: None = None
    conversation: None = None
    completed_at: int | None = None
    kv_transfer_params: None = None
    input_messages: None = None
    output_messages: None = None
    object: Literal["response"] = "response"


class Deleted(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
