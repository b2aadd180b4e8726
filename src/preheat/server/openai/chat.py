"""POST /v1/chat/completions and /v1/chat/completions/batch: check the body, write the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.answer_format import AnswerFormat, ToolChoice
from preheat.frontend.answer_parser import AnswerParser, ParsedAnswer, parser_of
from preheat.frontend.frontend import Frontend
from preheat.frontend.messages_answer import MessagesAnswer
from preheat.frontend.request_state import Choice, OutputDelta, RequestState
from preheat.frontend.stream_parser import CallArguments, CallStart, Content, Part, Reasoning
from preheat.server.http.body import interpreted, read_request
from preheat.server.http.middleware import request_id
from preheat.server.http.stream import CompletionsWriter, Long, WholeWriter, event_of
from preheat.server.http.turns import INLINE_VALUES
from preheat.server.openai import kv_transfer
from preheat.server.openai.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    Rendered,
    ToolCall,
    ToolCallDelta,
    encode,
    usage_of_all,
)
from preheat.server.openai.beam_search import as_searches
from preheat.server.openai.conversation import Conversation, allowed_tools, plain_messages, prepared_talk, tool_choice
from preheat.server.openai.params import chat_logprobs, prompt_logprobs_of, sampling
from preheat.server.openai.schema import MAX_PROMPTS, USUAL_VERBOSITY, BatchChatRequest, ChatRequest


async def chat(request: Request) -> ASGIApp:
    """Answer a conversation."""
    body, state, form = await _asked(request)
    return _ChatWriter(request, body, [state], form)


async def render(request: Request) -> Response:
    """Return the token ids of a conversation's prompt."""
    body, state, _ = await _asked(request)
    name = body.model or request.app.state.service.names[0]
    told = await interpreted(request, partial(encode, Rendered(request_id(request), state.prompt_ids, name)))
    return Response(told, media_type="application/json")


async def batch(request: Request) -> ASGIApp:
    """Answer several conversations."""
    frontend, body = await read_request(request, BatchChatRequest)
    frontend.tasks.check_generates("Chat Completions API")
    if not 1 <= len(body.messages) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"messages must hold 1 to {MAX_PROMPTS} conversations, got {len(body.messages)}", param="messages"
        )
    fields = msgspec.structs.asdict(body)
    writers = []
    for place, messages in enumerate(body.messages):
        single = ChatRequest(**fields | {"messages": messages})
        with _naming_conversation(place):
            state, form = await _prepared(request, frontend, single)
        writers.append(_ChatWriter(request, single, [state], form))
    return _BatchWriter(request, writers)


@contextmanager
def _naming_conversation(place: int) -> Iterator[None]:
    """Prefix errors about ``messages`` with the conversation's index."""
    try:
        yield
    except InvalidRequest as error:
        param = "messages" if error.param == "prompt" else error.param
        if param is None or not param.startswith("messages"):
            raise
        param = f"messages[{place}]{param.removeprefix('messages')}"
        raise type(error)(f"messages[{place}]: {error.message}", param=param) from error


async def _asked(request: Request) -> tuple[ChatRequest, RequestState, AnswerFormat]:
    """Return the body, and its checked request."""
    frontend, body = await read_request(request, ChatRequest)
    frontend.tasks.check_generates("Chat Completions API")
    return body, *await _prepared(request, frontend, body)


async def _prepared(request: Request, frontend: Frontend, body: ChatRequest) -> tuple[RequestState, AnswerFormat]:
    """Return the checked request for one conversation, and the format of its answers."""
    if body.chat_template is not None and not request.app.state.service.settings.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template needs a server that was started with --trust-request-chat-template: leave it out, or give "
            "the server the template with --chat-template",
            param="chat_template",
        )

    def asked() -> tuple[Conversation, ToolChoice, SamplingParams]:
        params = _params(frontend, body)
        body.tools = allowed_tools(body.tools, body.tool_choice)
        return _talk(body), tool_choice(body.tools, body.tool_choice, body.parallel_tool_calls), params

    talk, choice, params = await interpreted(request, asked)
    state, form = await prepared_talk(
        request, frontend, talk, choice, params, cache_salt=body.cache_salt or "", priority=body.priority or 0,
        cap_length=body.max_tokens is None and body.max_completion_tokens is None,
    )  # fmt: skip
    kv_transfer.attach(request, body, [state])
    as_searches(frontend, body, [state])
    return state, form


def _talk(body: ChatRequest) -> Conversation:
    variables, hints = dict(body.chat_template_kwargs or {}), dict[str, tuple[str, ...]]()
    if body.reasoning_effort is not None:
        variables["reasoning_effort"], hints["reasoning_effort"] = body.reasoning_effort, ("reasoning_effort",)
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
        hints |= {} if body.verbosity == USUAL_VERBOSITY else {"verbosity": ("verbosity",)}
    return Conversation(
        plain_messages(body.messages),
        body.tools,
        variables,
        body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message is True,
        add_special_tokens=body.add_special_tokens is True,
        hints=hints,
        template=body.chat_template,
    )


def _speaker(body: ChatRequest, response_role: str) -> tuple[str, str]:
    """Return the role of the answer, and the text to put before it (``echo``).

    The role is ``response_role`` unless the answer continues the last message. The text is the last message's if that
    message has the role.
    """
    last = body.messages[-1]
    role = last.role if body.add_generation_prompt is False else response_role
    if not body.echo or last.role != role:
        return role, ""
    if isinstance(last.content, list):
        return role, "\n".join(part.text or part.refusal or "" for part in last.content)
    return role, last.content or last.refusal or ""


def _params(frontend: Frontend, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    frontend.input.checker.check_logprobs(body.top_logprobs, "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in {None, body.max_tokens}:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling(frontend, body, max_tokens, logprobs, body.prompt_logprobs)


class _ChatWriter(CompletionsWriter):
    prefix, event_object = "chatcmpl", "chat.completion.chunk"

    def __init__(self, request: Request, body: ChatRequest, states: Sequence[RequestState], form: AnswerFormat) -> None:
        super().__init__(request, body, states, form)
        self._plain, self._answer_format = form.plain, form
        self._parsers: dict[int, AnswerParser | MessagesAnswer] = {}
        self._calling: set[int] = set()  # choices that have called a tool
        self._with_reasoning = body.include_reasoning is not False
        self._role, self._echo = _speaker(body, self._service.settings.response_role)

    def whole(self) -> ChatCompletion:
        (state,) = self._states
        answer = ChatCompletion(
            **self._fields, choices=[self._choice(c) for c in state.choices], usage=self.usage(),
            kv_transfer_params=self.transfer(),
        )  # fmt: skip
        if state.params.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs_of(state)
        if self._return_token_ids:
            answer.prompt_token_ids = state.prompt_ids
        return answer

    def event(self, _: int, choice: Choice) -> bytes | Long:
        """Return the event of a choice.

        An event with the role precedes the first content.

        An empty event is not sent.
        """
        delta = self.take(choice)
        content = ChatDelta(content=delta.text or UNSET) if self._plain else self._delta(choice, delta)
        answer = _with_receipt(ChatChunkChoice(choice.index, content, *self._details(choice, delta)), choice)
        says = self._plain or content != _NOTHING or answer.finish_reason or delta.logprobs or self._return_token_ids
        event = self.event_with(choice, answer) if says else b""
        if not delta.first:
            return event
        fields, values = self._opening(choice), len(choice.state.prompt_ids) if self._return_token_ids else 0
        return event_of(fields) + event if values < INLINE_VALUES else Long(values, lambda: event_of(fields) + event)

    def _opening(self, choice: Choice) -> dict[str, Any]:
        role = ChatChunkChoice(choice.index, ChatDelta(self._role, self._echo))
        fields: dict[str, Any] = {**self._event_fields, "choices": [role]}
        if self._continuous:
            fields["usage"] = self.usage_of(choice, 0)
        elif self._usage:
            fields["usage"] = None
        fields["prompt_token_ids"] = choice.state.prompt_ids if self._return_token_ids else None
        return fields

    def _choice(self, choice: Choice) -> ChatChoice:
        delta = self.take(choice)
        message = ChatMessage(delta.text) if self._plain else self._message(choice, delta)
        message.role = self._role
        if self._echo:
            message.content = self._echo + (message.content or "")
        return _with_receipt(ChatChoice(choice.index, message, *self._details(choice, delta)), choice)

    def _parts(self, choice: Choice, delta: OutputDelta) -> list[Part]:
        """Return the parsed parts of the new text of ``choice``."""
        parser = self._parser_of(choice)
        parts = parser.push(delta.text) + (parser.finish() if choice.sent_end else [])
        if any(isinstance(part, CallStart) for part in parts):
            self._calling.add(choice.id)
        return parts

    def _parser_of(self, choice: Choice) -> AnswerParser | MessagesAnswer:
        if choice.id not in self._parsers:
            self._parsers[choice.id] = parser_of(self._answer_format)
        return self._parsers[choice.id]

    def reasoning_tokens(self, choice: Choice) -> int:
        return self._parser_of(choice).reasoning_tokens(choice.token_ids)

    def _message(self, choice: Choice, delta: OutputDelta) -> ChatMessage:
        answer = ParsedAnswer()
        for part in self._parts(choice, delta):
            answer.add(part)
        message = ChatMessage(answer.text("content") or (None if answer.blocks else ""))
        if calls := answer.calls:
            message.tool_calls = [ToolCall(call.id, FunctionCall(call.name, call.text)) for call in calls]
        if (thought := answer.text("reasoning")) and self._with_reasoning:
            message.reasoning = message.reasoning_content = thought
        return message

    def _delta(self, choice: Choice, delta: OutputDelta) -> ChatDelta:
        """Return one delta for all new parts.

        A step's additions to one call become one item of the list.
        """
        content = reasoning = ""
        calls: dict[int, ToolCallDelta] = {}
        for part in self._parts(choice, delta):
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStart(index, id, name):
                    calls[index] = ToolCallDelta(index, FunctionDelta(name), id, "function")
                case CallArguments(index, text):
                    calls.setdefault(index, ToolCallDelta(index, FunctionDelta())).function.arguments += text
        thought = reasoning if reasoning and self._with_reasoning else UNSET
        calls_or_none = list(calls.values()) if calls else UNSET
        return ChatDelta(UNSET, content or UNSET, calls_or_none, thought, thought)

    def _details(self, choice: Choice, delta: OutputDelta) -> tuple[Any, ...]:
        """Return logprobs, finish reason, stop reason and token ids."""
        logprobs = None if delta.logprobs is None else chat_logprobs(self.names, delta.logprobs)
        ids = delta.token_ids if self._return_token_ids else None
        return logprobs, self._finish_reason(choice), choice.shown_end[1], ids

    def _finish_reason(self, choice: Choice) -> str | None:
        """Return OpenAI's finish reason.

        It is "tool_calls" if the model chose to call, and "stop" if the client named the function.
        """
        reason, _ = choice.shown_end
        called = reason == "stop" and choice.id in self._calling
        return "tool_calls" if called and self._answer_format.choice.mode != "named" else reason


_Answer = TypeVar("_Answer", ChatChoice, ChatChunkChoice)


def _with_receipt(answer: _Answer, choice: Choice) -> _Answer:
    """Add the receipt of ``choice`` to its last part."""
    if choice.sent_end and choice.receipt is not None:
        answer.receipt = choice.receipt
    return answer


class _BatchWriter(WholeWriter):
    """One answer with the first choices of ``writers``, in order."""

    def __init__(self, request: Request, writers: Sequence[_ChatWriter]) -> None:
        super().__init__(request, [state for writer in writers for state in writer.states])
        self._writers = writers

    def whole(self) -> ChatCompletion:
        answers = [writer.whole() for writer in self._writers]
        for place, answer in enumerate(answers):
            answer.choices[0].index = place
        first = answers[0]
        first.choices, first.prompt_token_ids = [answer.choices[0] for answer in answers], None
        first.usage = usage_of_all([answer.usage for answer in answers if answer.usage is not None])
        return first


_NOTHING = ChatDelta()
