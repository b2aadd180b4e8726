"""/v1/responses: checks the body, writes the answer, and stores it on request."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from preheat.core import SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest, NotFound, PreheatError
from preheat.frontend.answer_format import AnswerFormat, ToolChoice
from preheat.frontend.answer_parser import Block
from preheat.frontend.frontend import Frontend
from preheat.frontend.messages import call_of, thoughts
from preheat.frontend.request_state import RequestState
from preheat.server.answers import encode
from preheat.server.blocks import BlocksWriter, named_event
from preheat.server.body import interpreted, read_request
from preheat.server.conversation import Conversation, allowed_tools, check_tool_kind, prepared_talk, tool_choice
from preheat.server.decoding import Names, converted
from preheat.server.ignored import ignore, names_for
from preheat.server.middleware import request_id
from preheat.server.params import chat_logprobs, sampling_fields
from preheat.server.responses_schema import (
    ITEMS,
    LOGPROBS,
    Deleted,
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    Incomplete,
    InputDetails,
    Item,
    MessageItem,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
    TextFormat,
    TextOptions,
    TextPart,
)
from preheat.server.responses_store import ResponseStore, Stored
from preheat.server.schema import USUAL_VERBOSITY, AllowedTool, AllowedTools, FunctionName, NamedToolChoice
from preheat.server.structured import converted as constraint
from preheat.server.structured import the_one


async def responses(request: Request) -> ASGIApp:
    """Answer a conversation."""
    frontend, body = await read_request(request, ResponsesRequest)
    frontend.check_generates("Responses API")
    store = _store(request)
    _check_kept(store, body)
    previous = _said_before(store, body.previous_response_id) if store and body.previous_response_id else []

    ignored = names_for(request)

    def asked() -> tuple[Conversation, ToolChoice, SamplingParams]:
        talk = _talk(body, [*previous, *_messages(body.input, ignored)])
        asked = _asked_choice(body)
        talk.tools = allowed_tools(talk.tools, asked)
        return talk, tool_choice(talk.tools, asked, body.parallel_tool_calls), _params(frontend, body, ignored)

    talk, choice, params = await interpreted(request, asked)
    ignore(request, ignored or ())
    messages = talk.messages[1:] if body.instructions else talk.messages
    state, form = await prepared_talk(
        request, frontend, talk, choice, params,
        cache_salt=body.cache_salt or "", priority=body.priority or 0, cap_length=body.max_output_tokens is None,
    )  # fmt: skip
    kept = store if body.store is not False else None
    kind = _BackgroundWriter if body.background else _ResponsesWriter
    return kind(request, body, state, form, messages=messages, store=kept)


def _check_kept(store: ResponseStore | None, body: ResponsesRequest) -> None:
    """Raise InvalidRequest if the body needs a store that is missing.

    ``background`` with ``store`` false, or with ``stream``, is invalid too.
    """
    asked = {"background": body.background, "store": body.store, "previous_response_id": body.previous_response_id}
    param = next((name for name, value in asked.items() if value), None)
    if store is None and param is not None:
        raise InvalidRequest(
            "this server keeps no responses: send the whole conversation as input, and wait for the answer, or start "
            "it with --enable-responses-store",
            param=param,
        )
    if body.background and body.store is False:
        raise InvalidRequest("background keeps the answer until it is fetched: leave store out", param="store")
    if body.background and body.stream:
        raise InvalidRequest(
            "an answer in the background is not streamed: leave stream out, and fetch it by its id", param="stream"
        )


def _said_before(store: ResponseStore, id: str) -> list[dict[str, Any]]:
    """Return the conversation up to the end of a stored response.

    Raises NotFound for an unknown id, and InvalidRequest if the response has not ended.
    """
    try:
        kept = store.get(id)
    except NotFound as error:
        raise NotFound(error.message, param="previous_response_id") from error
    if not kept.ended:
        raise InvalidRequest(f"the response {id!r} has not ended yet: try again later", param="previous_response_id")
    return kept.messages


def _talk(body: ResponsesRequest, messages: list[dict[str, Any]]) -> Conversation:
    told = [{"role": "system", "content": body.instructions}, *messages] if body.instructions else messages
    variables, hints = dict(body.chat_template_kwargs or {}), dict[str, tuple[str, ...]]()
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables["reasoning_effort"], hints["reasoning.effort"] = body.reasoning.effort, ("reasoning_effort",)
    if body.text is not None and body.text.verbosity is not None:
        variables["verbosity"] = body.text.verbosity
        hints |= {} if body.text.verbosity == USUAL_VERBOSITY else {"text.verbosity": ("verbosity",)}
    for place, tool in enumerate(body.tools or ()):
        check_tool_kind(tool.type, f"tools[{place}]")
        if not tool.name:
            raise InvalidRequest(f"tools[{place}].name is missing", param=f"tools[{place}].name")
    tools = [_nested(tool) for tool in msgspec.to_builtins(body.tools or [], builtin_types=(Decimal,))]
    return Conversation(told, tools, variables, hints=hints)


def _asked_choice(body: ResponsesRequest) -> str | NamedToolChoice | None:
    """Return the choice of tools in the form of chats. Raises InvalidRequest if a part is missing."""
    asked = body.tool_choice
    if not isinstance(asked, FunctionChoice):
        return asked
    if asked.type == "allowed_tools":
        tools = [AllowedTool(FunctionName(tool.name)) for tool in asked.tools or ()]
        return NamedToolChoice(type=asked.type, allowed_tools=AllowedTools(asked.mode or "auto", tools))
    if asked.name is None:
        raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
    return NamedToolChoice(FunctionName(asked.name))


async def response(request: Request) -> Response:
    """Return a stored response."""
    return Response(_known(request).json, media_type="application/json")


async def cancel_response(request: Request) -> Response:
    """Cancel a background response, if it has not ended."""
    if not _known(request).background:
        raise InvalidRequest("only a response in the background can be cancelled", param="response_id")
    await request.app.state.service.background.cancel(request.path_params["id"])
    return Response(_known(request).json, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Delete a response; one in progress is cancelled."""
    _known(request)
    id = request.path_params["id"]
    await request.app.state.service.background.cancel(id)
    store = _store(request)
    if store is not None:
        store.delete(id)
    return Response(encode(Deleted(id)), media_type="application/json")


def _store(request: Request) -> ResponseStore | None:
    store: ResponseStore | None = request.app.state.service.responses
    return store


def _known(request: Request) -> Stored:
    store = _store(request)
    if store is None:
        raise NotFound("This server keeps no responses: start it with --enable-responses-store")
    return store.get(request.path_params["id"])


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chats, for chat templates."""
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _params(frontend: Frontend, body: ResponsesRequest, ignored: Names | None) -> SamplingParams:
    given = sampling_fields(body)
    asked = _structured(body.text.format) if body.text and body.text.format else None
    given["structured_outputs"] = the_one({"text.format": asked, "structured_outputs": given["structured_outputs"]})
    if LOGPROBS in (body.include or ()):
        frontend.input.checker.check_logprobs(body.top_logprobs, "top_logprobs")
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs and ignored is None:
        raise InvalidRequest(f'top_logprobs needs "{LOGPROBS}" in include', param="top_logprobs")
    elif body.top_logprobs and ignored is not None:
        ignored["top_logprobs"] = None
    return frontend.input.params(**given, max_tokens=body.max_output_tokens)


def _structured(asked: TextFormat) -> StructuredOutputsParams | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if asked.schema is None:
        raise InvalidRequest("text.format.schema is missing", param="text.format.schema")
    return constraint({"json": asked.schema}, "text.format.schema")


def _messages(given: str | Sequence[dict[str, Any]], ignored: Names | None = None) -> list[dict[str, Any]]:
    """Return the input as messages for a chat template.

    Reasoning and calls join the assistant's message.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input must not be empty", param="input")
    messages: list[dict[str, Any]] = []
    for place, raw in enumerate(given):
        item = _item(raw, f"input[{place}]", ignored)
        if isinstance(item, FunctionOutputItem):
            content = _text(item.output, f"input[{place}].output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content, f"input[{place}].content")})
        else:
            _add_to_turn(messages, item, f"input[{place}]")
    return [message | thoughts(message, message.get("reasoning")) for message in messages]


def _item(raw: dict[str, Any], param: str, ignored: Names | None) -> Item:
    kind = raw.get("type") or "message"
    if kind not in ITEMS:
        raise InvalidRequest(f"{param}: the type {kind!r} is not supported", param=param)
    given = {name: value for name, value in raw.items() if value is not None}
    return converted(given, ITEMS[kind], ignored, "input[]", param)


def _text(content: str | Sequence[TextPart], param: str) -> str:
    """Return the text of a ``content``, which errors call ``param``."""
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(part, f"{param}[{place}]") for place, part in enumerate(content))


def _text_of(part: TextPart, param: str) -> str:
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidRequest(f"Missing required parameter: {param}.{name}", param=f"{param}.{name}")
    return text


def _add_to_turn(messages: list[dict[str, Any]], item: Item, param: str) -> None:
    """Add a message, reasoning or call of the model to its turn.

    A new turn begins if the last message is not the model's, or is complete.
    """
    if not messages or messages[-1]["role"] != "assistant" or (isinstance(item, MessageItem) and _said(messages[-1])):
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    match item:
        case MessageItem():
            turn["content"] = _text(item.content, f"{param}.content")
        case FunctionCallItem():
            call = call_of(item.call_id, item.name, item.arguments, param)
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        case ReasoningItem():
            thought = "\n".join(part.text for part in item.content or ())
            turn |= {"reasoning": thought} if thought else {}


def _said(message: dict[str, Any]) -> bool:
    """Return whether an assistant's message is complete before further text."""
    return bool(message["content"] or message.get("tool_calls"))


class _ResponsesWriter(BlocksWriter):
    always_text = True

    def __init__(
        self,
        request: Request,
        body: ResponsesRequest,
        state: RequestState,
        form: AnswerFormat,
        *,
        messages: list[dict[str, Any]],
        store: ResponseStore | None,
    ) -> None:
        super().__init__(request, state, form, bool(body.stream))
        self._id, self._messages, self._store = request_id(request), messages, store
        self._sequence = self._logprobs_sent = 0
        self._response = ResponseObject(
            id=f"resp_{self._id}",
            created_at=int(time.time()),
            model=body.model or self._service.names[0],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning,
            store=store is not None,
            temperature=state.params.temperature,
            text=body.text or TextOptions(TextFormat("text")),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=state.params.top_p,
            top_logprobs=body.top_logprobs or 0,
            user=body.user,  # type: ignore[attr-defined]
            prompt_cache_key=body.prompt_cache_key,  # type: ignore[attr-defined]
            safety_identifier=body.safety_identifier,  # type: ignore[attr-defined]
        )

    def whole(self) -> ResponseObject:
        self.read_all()
        return self._completed()

    def opening(self) -> bytes:
        shown = {"response": self._response}
        return self._event("response.created", shown) + self._event("response.in_progress", shown)

    def begin(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        if isinstance(item, OutputMessage | OutputReasoning):
            item.content = []
        events = self._event("response.output_item.added", {"output_index": self._place, "item": item})
        if block.kind == "call":
            return events
        return events + self._event("response.content_part.added", self._where(block) | {"part": _part(block, "")})

    def extend(self, block: Block, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": self._logprobs(fresh=True)} if block.kind == "content" else {}
        return self._event(f"{_EVENTS[block.kind]}.delta", self._where(block) | {"delta": text} | more)

    def end(self, block: Block) -> bytes:
        where = self._where(block)
        said: dict[str, Any] = {"text": block.text}
        if block.kind == "content":
            said["logprobs"] = self._logprobs()
        elif block.kind == "call":
            said = {"arguments": block.text, "name": block.name}
        events = self._event(f"{_EVENTS[block.kind]}.done", where | said)
        if block.kind != "call":
            events += self._event("response.content_part.done", where | {"part": self._part(block)})
        done = {"output_index": self._place, "item": self._item(block)}
        return events + self._event("response.output_item.done", done)

    def last(self, error: PreheatError | None) -> bytes:
        if error is not None:
            self._fail(error)
            return self._event("response.failed", {"response": self._response})
        response = self._completed()
        return self._event(f"response.{response.status}", {"response": response})

    def _fail(self, error: PreheatError) -> None:
        self._response.status = "failed"
        self._response.error = ResponseError(error.code or "server_error", error.message)

    def _completed(self) -> ResponseObject:
        """Return the response at the answer's end, and store it on request."""
        response, blocks = self._response, self.answer.blocks
        cut = self.choice.finish_reason == "length"
        response.status = "incomplete" if cut else "completed"
        if response.background and self.choice.finish_reason == "abort":
            response.status = "cancelled"
        response.incomplete_details = Incomplete("max_output_tokens") if cut else None
        response.output = [self._item(block, place=place) for place, block in enumerate(blocks)]
        if cut and response.output:
            response.output[-1].status = "incomplete"
        prompt, completion = len(self.state.prompt_ids), self.completion_tokens
        thought = self.parser.reasoning_tokens(self.choice.token_ids)
        response.usage = ResponsesUsage(
            prompt, InputDetails(self.state.cached_tokens), completion, OutputDetails(thought), prompt + completion
        )
        if self._store is not None:
            whole = [item for item in response.output if not isinstance(item, OutputCall) or _is_json(item.arguments)]
            self._keep(_messages(msgspec.json.decode(encode(whole))) if whole else [])
        return response

    def _keep(self, said: Sequence[dict[str, Any]] = (), *, ended: bool = True) -> None:
        """Store the response so far, on request.

        The conversation is stored up to the messages that the model ``said``.
        """
        if self._store is not None:
            json = encode(self._response)
            kept = Stored(json, [*self._messages, *said], ended, self._response.background)
            self._store.put(self._response.id, kept)

    def _item(self, block: Block, status: str = "completed", place: int | None = None) -> OutputItem:
        name = f"{self._id}_{self._place if place is None else place}"
        if block.kind == "content":
            return OutputMessage(f"msg_{name}", [self._text(block)], status)
        if block.kind == "reasoning":
            return OutputReasoning(f"rs_{name}", [ReasoningText(block.text)], status=status)
        return OutputCall(f"fc_{name}", block.id, block.name, block.text, status)

    def _part(self, block: Block) -> OutputText | ReasoningText:
        return self._text(block) if block.kind == "content" else ReasoningText(block.text)

    def _text(self, block: Block) -> OutputText:
        return OutputText(block.text, logprobs=self._logprobs())

    def _logprobs(self, *, fresh: bool = False) -> list[Any]:
        """Return logprobs of the tokens after the reasoning.

        With ``fresh`` return only the unsent ones.
        """
        if self.choice.logprobs is None:
            return []
        seen = self.choice.logprobs[: self.tokens_read]
        begin = self.parser.reasoning_tokens(self.choice.token_ids[: self.tokens_read])
        if fresh:
            begin, self._logprobs_sent = max(begin, self._logprobs_sent), self.tokens_read
        return chat_logprobs(self._frontend.tokenizer, seen[begin:]).content

    def _where(self, block: Block) -> dict[str, Any]:
        """Return the location of an event's part: the last part of the answer."""
        where = {"item_id": self._item(block).id, "output_index": self._place}
        return where if block.kind == "call" else where | {"content_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._sequence += 1
        return named_event(name, {"sequence_number": self._sequence - 1, **fields})


class _BackgroundWriter(_ResponsesWriter):
    """Writer that answers at once, and stores the response when it has ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._response
        response.background, response.status = True, "queued"
        queued = encode(response)
        response.status = "in_progress"
        await self._service.background.start(
            response.id, self._frontend, self.state, begun=partial(self._keep, ended=False), ended=self._ended
        )
        await Response(queued, media_type="application/json")(scope, receive, send)

    async def _ended(self, error: PreheatError | None) -> None:
        if error is None:
            await self._service.turns.answer(self.values(self.state), lambda: encode(self.whole()))
        else:
            self._fail(self.told(error))
            self._keep()


_EVENTS = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _part(block: Block, text: str) -> OutputText | ReasoningText:
    return OutputText(text) if block.kind == "content" else ReasoningText(text)
