"""/v1/messages, Anthropic's endpoint for conversations: checks the body, writes the answer."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest, PreheatError
from preheat.frontend.answer_format import AnswerFormat, ToolChoice
from preheat.frontend.answer_parser import Block
from preheat.frontend.messages import call_of, thoughts
from preheat.frontend.request_state import RequestState
from preheat.server.anthropic.messages_schema import (
    CountRequest,
    InputMessage,
    MessageAnswer,
    MessagesRequest,
    MessagesTool,
    MessagesUsage,
    OutputBlock,
    OutputText,
    OutputThinking,
    OutputToolUse,
    TextBlock,
    TextOnly,
    ThinkingBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
)
from preheat.server.http.body import interpreted, read_request
from preheat.server.http.errors import anthropic_error
from preheat.server.http.middleware import request_id
from preheat.server.http.turns import in_turn
from preheat.server.openai.answers import encode
from preheat.server.openai.blocks import BlocksWriter, call_arguments, named_event
from preheat.server.openai.conversation import Conversation, check_tool_kind, prepared_talk, rendered, tool_choice
from preheat.server.openai.schema import FunctionName, NamedToolChoice
from preheat.server.openai.structured import converted as constraint

THINKING = ("enable_thinking", "thinking")
"""Names of the variable that switches thinking in chat templates."""


async def messages(request: Request) -> ASGIApp:
    """Answer a conversation, in Anthropic's form."""
    frontend, body = await read_request(request, MessagesRequest)
    frontend.tasks.check_generates("Messages API")

    def asked() -> tuple[Conversation, ToolChoice, SamplingParams]:
        params = frontend.input.params(
            max_tokens=body.max_tokens, stop=body.stop_sequences, temperature=body.temperature, top_p=body.top_p,
            top_k=body.top_k, structured_outputs=_structured(body),
        )  # fmt: skip
        return _talk(body), _choice(body), params

    talk, choice, params = await interpreted(request, asked)
    # Anthropic's API requires max_tokens, so clients send a number that ignores this model's limit.
    state, form = await prepared_talk(request, frontend, talk, choice, params, cap_length=True)
    return _MessagesWriter(request, body, state, form)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation."""
    frontend, body = await read_request(request, CountRequest)
    prompt, _ = await rendered(request, frontend, await interpreted(request, partial(_talk, body)))
    ids = await in_turn(request, len(prompt), partial(frontend.input.encode_to_count, prompt, add_special_tokens=False))
    return Response(encode(TokenCount(len(ids))), media_type="application/json")


def _talk(body: CountRequest) -> Conversation:
    told = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for place, message in enumerate(body.messages):
        told += _plain(message, f"messages[{place}]")
    variables, hints = dict(body.chat_template_kwargs or {}), dict[str, tuple[str, ...]]()
    if body.thinking is not None:
        for name in THINKING:
            variables.setdefault(name, body.thinking.type != "disabled")
        if body.thinking.type == "enabled":
            hints["thinking"] = THINKING
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
        hints["output_config.effort"] = ("reasoning_effort",)
    return Conversation(told, _tools(body), variables, hints=hints)


def _structured(body: CountRequest) -> StructuredOutputsParams | None:
    """Return the constraint on the text; the newer of two fields has precedence.

    Raises InvalidRequest for an unsupported schema.
    """
    if body.output_config is not None and body.output_config.format is not None:
        return constraint({"json": body.output_config.format.schema}, "output_config.format.schema")
    return (
        None if body.output_format is None else constraint({"json": body.output_format.schema}, "output_format.schema")
    )


def _tools(body: CountRequest) -> list[dict[str, Any]]:
    """Return the tools in the form of chats, for chat templates. Raises InvalidRequest for a tool of a server."""
    return [_nested(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ())]


def _nested(tool: MessagesTool, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        check_tool_kind(tool.type, param)
    if tool.input_schema is None:
        raise InvalidRequest(f"Missing required parameter: {param}.input_schema", param=f"{param}.input_schema")
    given = {"description": tool.description, "strict": tool.strict}
    said = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **said, "parameters": tool.input_schema}}


def _choice(body: CountRequest) -> ToolChoice:
    asked = body.tool_choice
    if asked is None:
        return tool_choice(_tools(body), None, None)
    mode: str | NamedToolChoice = {"any": "required"}.get(asked.type, asked.type)
    if asked.type == "tool":
        if asked.name is None:
            raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
        mode = NamedToolChoice(FunctionName(asked.name))
    return tool_choice(_tools(body), mode, not asked.disable_parallel_tool_use)


def _plain(message: InputMessage, at: str) -> list[dict[str, Any]]:
    """Return a message, ``at`` a place of the body, in the form of chat templates.

    Tool results come first, as messages of their own.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    told, texts, thinking = [], [], list[str]()
    plain: dict[str, Any] = {"role": message.role}
    for place, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thinking.append(block.thinking)
            case ToolUseBlock():
                call = call_of(block.id, block.name, block.input, f"{at}.content[{place}]")
                plain["tool_calls"] = [*plain.get("tool_calls", ()), call]
            case ToolResultBlock():
                told.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")})
    plain["content"], thought = "\n".join(texts), "\n".join(thinking)
    if texts or thought or "tool_calls" in plain or not told:
        told.append(plain | thoughts(plain, thought))
    return told


def _text(content: str | list[TextOnly]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class _MessagesWriter(BlocksWriter):
    def __init__(self, request: Request, body: MessagesRequest, state: RequestState, form: AnswerFormat) -> None:
        super().__init__(request, state, form, bool(body.stream))
        self._id, self._model = f"msg_{request_id(request)}", body.model or self._service.names[0]
        self._max_tokens = body.max_tokens

    def whole(self) -> MessageAnswer:
        self.read_all()
        answer = self._answer(self.completion_tokens)
        answer.content = [_block(block) for block in self.answer.blocks]
        answer.stop_reason, answer.stop_sequence = self._stop()
        return answer

    def opening(self) -> bytes:
        return named_event("message_start", {"message": self._answer(0)})

    def begin(self, block: Block) -> bytes:
        return named_event("content_block_start", {"index": self._place, "content_block": _block(Block(
            block.kind, "", block.id, block.name
        ))})  # fmt: skip

    def extend(self, block: Block, text: str) -> bytes:
        name, field = _DELTAS[block.kind]
        return named_event("content_block_delta", {"index": self._place, "delta": {"type": name, field: text}})

    def end(self, block: Block) -> bytes:
        return named_event("content_block_stop", {"index": self._place})

    def last(self, error: PreheatError | None) -> bytes:
        if error is not None:
            return named_event("error", {"error": anthropic_error(error)})
        reason, sequence = self._stop()
        ended = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": self._usage_now()}
        return named_event("message_delta", ended) + named_event("message_stop", {})

    def _answer(self, tokens: int) -> MessageAnswer:
        return MessageAnswer(id=self._id, model=self._model, content=[], usage=self._usage_now(tokens))

    def _usage_now(self, tokens: int | None = None) -> MessagesUsage:
        cached = self.state.cached_tokens
        output = self.completion_tokens if tokens is None else tokens
        return MessagesUsage(len(self.state.prompt_ids) - cached, output, cached)

    def _stop(self) -> tuple[str, str | None]:
        """Return the reason why the answer ended, and the stop sequence that ended it."""
        if self.choice.finish_reason == "length":
            full = self.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens", None
        if isinstance(self.choice.stop_reason, str):
            return "stop_sequence", self.choice.stop_reason
        return "tool_use" if self.answer.calls else "end_turn", None


_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _block(block: Block) -> OutputBlock:
    if block.kind == "content":
        return OutputText(block.text)
    if block.kind == "reasoning":
        return OutputThinking(block.text)
    return OutputToolUse(block.id, block.name, call_arguments(block.text))
