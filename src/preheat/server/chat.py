"""POST /v1/chat/completions: what the body means, and the answer's shape."""

from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET, to_builtins
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.frontdoor import FrontDoor
from preheat.frontend.request_state import Choice, Ticket
from preheat.server.answers import ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage
from preheat.server.auth import read_body, request_id
from preheat.server.params import chat_logprobs, encoded, prompt_logprobs_of, sampling, wants_usage
from preheat.server.schema import ChatRequest, Message, decode
from preheat.server.service import Service
from preheat.server.stream import Answer, Events, encode, usage_of


async def chat(request: Request) -> ASGIApp:
    """The route."""
    service: Service = request.app.state.service
    body = decode(await read_body(request), ChatRequest)
    service.check_model(body.model)
    door, id = service.door, request_id(request)
    params = _params(door, body)
    text = render(service, body.messages, body.add_generation_prompt is not False, body.chat_template_kwargs)
    ids = await encoded(door, text, body.add_special_tokens is True)
    ticket = door.prepare(ids, params, request_id=id, text=text, cache_salt=body.cache_salt or "")
    writer = _Writer(body, ticket, f"chatcmpl-{id}", body.model or service.names[0])
    if body.stream:
        return Events(service.door, [ticket], writer.event, writer.last_event)
    return Answer(service.door, [ticket], writer.whole)


def render(
    service: Service, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> str:
    """The prompt for a conversation."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    plain = [{name: value for name, value in to_builtins(m).items() if value is not None} for m in messages]
    return service.template.render(plain, add_generation_prompt=add_generation_prompt, variables=variables)


def _params(door: FrontDoor, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    door.check_logprobs(body.top_logprobs, "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in {None, body.max_tokens}:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling(door, body, max_tokens, logprobs, body.prompt_logprobs)


class _Writer:
    """Writes the answer to one body, as a whole or event by event."""

    def __init__(self, body: ChatRequest, ticket: Ticket, id: str, model: str) -> None:
        self._body, self._ticket, self._id, self._model = body, ticket, id, model
        self._created = int(time.time())
        self._usage = wants_usage(body)
        self._fields = {"id": id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = b'data: %b,"choices":[' % encode(self._fields)[:-1]  # the same in each event
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def whole(self) -> ChatCompletion:
        choices = [self._choice(choice) for choice in self._ticket.choices]
        usage = usage_of([self._ticket])
        answer = ChatCompletion(self._id, self._created, self._model, choices, usage)
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs_of(self._ticket)
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._ticket.prompt_ids
        return answer

    def event(self, _: int, choice: Choice) -> bytes:
        """The events for the news of ``choice``: the first one says who speaks."""
        news = choice.news()
        delta = ChatDelta(content=news.text) if news.text else ChatDelta()
        answer = ChatChunkChoice(choice.index, delta, None, choice.finish_reason, choice.stop_reason)
        if news.logprobs is not None:
            answer.logprobs = chat_logprobs(self._ticket.tokenizer, news.logprobs)
        if self._body.return_token_ids:
            answer.token_ids = news.token_ids
        event = b"%b%b%b" % (self._head, encode(answer), self._tail)
        return self._opening(choice) + event if news.begins else event

    def last_event(self) -> bytes:
        """The usage, where it is asked for."""
        if not self._usage:
            return b""
        return b"data: %b\n\n" % encode({**self._fields, "choices": [], "usage": usage_of([self._ticket])})

    def _opening(self, choice: Choice) -> bytes:
        fields: dict[str, Any] = dict(self._fields)
        fields["choices"] = [ChatChunkChoice(choice.index, ChatDelta("assistant", ""))]
        if self._usage:
            fields["usage"] = None
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._ticket.prompt_ids
        return b"data: %b\n\n" % encode(fields)

    def _choice(self, choice: Choice) -> ChatChoice:
        news = choice.news()
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(news.text),
            logprobs=None if news.logprobs is None else chat_logprobs(self._ticket.tokenizer, news.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=news.token_ids if self._body.return_token_ids else UNSET,
        )
