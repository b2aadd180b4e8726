"""POST /v1/chat/completions: what the body means, and the answer's shape."""

from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET, to_builtins
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import Choice, RequestState
from preheat.server.answers import ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, encode
from preheat.server.body import read_body
from preheat.server.middleware import request_id
from preheat.server.params import chat_logprobs, encoded, prompt_logprobs_of, sampling, wants_usage
from preheat.server.schema import ChatRequest, Message, decode
from preheat.server.service import Service
from preheat.server.stream import EventStream, FullResponse, usage_of


async def chat(request: Request) -> ASGIApp:
    """The endpoint."""
    service: Service = request.app.state.service
    body = decode(await read_body(request), ChatRequest)
    service.check_model(body.model)
    frontend, id = service.frontend, request_id(request)
    params = _params(frontend, body)
    text = render(service, body.messages, body.add_generation_prompt is not False, body.chat_template_kwargs)
    ids = await encoded(frontend, text, body.add_special_tokens is True)
    state = frontend.prepare(ids, params, request_id=id, text=text, cache_salt=body.cache_salt or "")
    writer = _ChatWriter(body, state, f"chatcmpl-{id}", body.model or service.names[0])
    if body.stream:
        return EventStream(frontend, [state], writer.event, writer.last_event)
    return FullResponse(frontend, [state], writer.whole)


def render(
    service: Service, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> str:
    """The prompt for a conversation."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    plain = [{name: value for name, value in to_builtins(m).items() if value is not None} for m in messages]
    return service.template.render(plain, add_generation_prompt=add_generation_prompt, variables=variables)


def _params(frontend: Frontend, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    frontend.input.check_logprobs(body.top_logprobs, "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in {None, body.max_tokens}:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling(frontend, body, max_tokens, logprobs, body.prompt_logprobs)


class _ChatWriter:
    """Writes the answer to one body, as a whole or event by event."""

    def __init__(self, body: ChatRequest, state: RequestState, id: str, model: str) -> None:
        self._body, self._state, self._id, self._model = body, state, id, model
        self._created = int(time.time())
        self._usage = wants_usage(body)
        self._fields = {"id": id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = b'data: %b,"choices":[' % encode(self._fields)[:-1]  # the same in each event
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def whole(self) -> ChatCompletion:
        choices = [self._choice(choice) for choice in self._state.choices]
        usage = usage_of([self._state])
        answer = ChatCompletion(self._id, self._created, self._model, choices, usage)
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs_of(self._state)
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._state.prompt_ids
        return answer

    def event(self, _: int, choice: Choice) -> bytes:
        """The events for what is new of ``choice``; before the first one goes an event with the role."""
        delta = choice.take_delta()
        content = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        answer = ChatChunkChoice(choice.index, content, None, choice.finish_reason, choice.stop_reason)
        if delta.logprobs is not None:
            answer.logprobs = chat_logprobs(self._state.tokenizer, delta.logprobs)
        if self._body.return_token_ids:
            answer.token_ids = delta.token_ids
        event = b"%b%b%b" % (self._head, encode(answer), self._tail)
        return self._opening(choice) + event if delta.first else event

    def last_event(self) -> bytes:
        """The usage, where it is asked for."""
        if not self._usage:
            return b""
        return b"data: %b\n\n" % encode({**self._fields, "choices": [], "usage": usage_of([self._state])})

    def _opening(self, choice: Choice) -> bytes:
        fields: dict[str, Any] = dict(self._fields)
        fields["choices"] = [ChatChunkChoice(choice.index, ChatDelta("assistant", ""))]
        if self._usage:
            fields["usage"] = None
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._state.prompt_ids
        return b"data: %b\n\n" % encode(fields)

    def _choice(self, choice: Choice) -> ChatChoice:
        delta = choice.take_delta()
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(delta.text),
            logprobs=None if delta.logprobs is None else chat_logprobs(self._state.tokenizer, delta.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else UNSET,
        )
