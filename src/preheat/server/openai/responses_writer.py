"""Answers of /v1/responses: an object, or a stream of events. They are stored on request."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from preheat.errors import PreheatError
from preheat.frontend.answer_format import AnswerFormat
from preheat.frontend.answer_parser import Block
from preheat.frontend.request_state import RequestState
from preheat.server.http.middleware import request_id
from preheat.server.openai.answers import encode
from preheat.server.openai.blocks import BlocksWriter, named_event
from preheat.server.openai.params import chat_logprobs
from preheat.server.openai.responses_items import messages_of
from preheat.server.openai.responses_schema import (
    Incomplete,
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
    TextFormat,
    TextOptions,
)
from preheat.server.openai.responses_store import ResponseStore, Stored


class ResponsesWriter(BlocksWriter):
    """Writer of the answer to a conversation, which may be stored."""

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
            self._keep(messages_of(msgspec.json.decode(encode(whole))) if whole else [])
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


class BackgroundWriter(ResponsesWriter):
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
