"""The bodies of /v1/messages: Anthropic's shapes, as far as supported.

See :mod:`preheat.server.openai.schema`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

from preheat.server.openai.schema import ForModel, Spelled, accepted, hint, hinted, only, rejected


@accepted("cache_control citations")
class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


@accepted("cache_control citations")
class TextOnly(Struct, forbid_unknown_fields=True):
    """A text, in places that allow only texts."""

    type: Literal["text"]
    text: str


@accepted("cache_control caller")
class ToolUseBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


@accepted("cache_control")
class ToolResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextOnly] | None = None
    is_error: bool | None = None


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


InputBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


@accepted("cache_control eager_input_streaming")
class MessagesTool(Struct, forbid_unknown_fields=True):
    """A function that the model may call: a tool of type ``custom``, or without a type."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


class MessagesToolChoice(Struct, forbid_unknown_fields=True):
    """A choice of tools.

    Type "any" forces a call of some tool, "tool" a call of the named one.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """The switch for thinking, for templates that have one.

    "enabled" and "adaptive" turn it on, "disabled" off.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Any, hint()] = None
    display: Annotated[Any, hint("summarized")] = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    """A format of the answer's text: JSON of this schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]
    name: str | None = None


class OutputConfig(Struct, forbid_unknown_fields=True):
    """Options of the answer. ``effort`` is the ``reasoning_effort`` of chat templates."""

    effort: str | None = None
    format: OutputFormat | None = None


@accepted("metadata cache_control")
@rejected("container context_management mcp_servers inference_geo")
@hinted("thread")
class CountRequest(ForModel, kw_only=True):
    """POST /v1/messages/count_tokens."""

    spelled: ClassVar[Spelled] = {
        "prompt": ("messages",),
        "structured_outputs": ("output_config.format", "output_format", "tools"),
        "tools[].function.name": ("tools[].name",),
        "tools[].function.parameters": ("tools[].input_schema",),
    }

    messages: list[InputMessage]
    system: str | list[TextOnly] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages. Templates decide whether the model thinks: see ``chat_template_kwargs``."""

    spelled: ClassVar[Spelled] = {**CountRequest.spelled, "stop": ("stop_sequences",)}

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None


class OutputText(Struct, tag_field="type", tag="text"):
    """A text without ``citations``, since nothing is cited and clients refuse null."""

    text: str


class OutputToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class OutputThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


OutputBlock = OutputText | OutputToolUse | OutputThinking


class MessagesUsage(Struct):
    """Counts of tokens. ``input_tokens`` were computed; cached prompt tokens are counted separately."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageAnswer(Struct, kw_only=True):
    id: str
    model: str
    content: list[OutputBlock]
    usage: MessagesUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct):
    input_tokens: int
