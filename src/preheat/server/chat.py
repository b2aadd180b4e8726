"""POST /v1/chat/completions: checks the body, writes the answer."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, to_builtins
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import Choice, OutputDelta
from preheat.server.answers import ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage
from preheat.server.body import read_request
from preheat.server.middleware import request_id
from preheat.server.params import chat_logprobs, encoded, prompt_logprobs_of, sampling
from preheat.server.schema import ChatRequest, Message
from preheat.server.stream import Writer, event_of


async def chat(request: Request) -> ASGIApp:
    """Answer a conversation."""
    frontend, body = await read_request(request, ChatRequest)
    params = _params(frontend, body)
    text = render(frontend, body.messages, body.add_generation_prompt is not False, body.chat_template_kwargs)
    ids = await encoded(frontend, text, body.add_special_tokens is True)
    state = frontend.prepare(ids, params, request_id=request_id(request), text=text, cache_salt=body.cache_salt or "")
    return _ChatWriter(request, body, [state])


def render(
    frontend: Frontend, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> str:
    """The prompt for a conversation."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    plain = [{name: value for name, value in to_builtins(m).items() if value is not None} for m in messages]
    return frontend.template.render(plain, add_generation_prompt=add_generation_prompt, variables=variables)


def _params(frontend: Frontend, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    frontend.input.check_logprobs(body.top_logprobs, "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in {None, body.max_tokens}:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling(frontend, body, max_tokens, logprobs, body.prompt_logprobs)


class _ChatWriter(Writer):
    prefix, event_object = "chatcmpl", "chat.completion.chunk"

    def whole(self) -> ChatCompletion:
        (state,) = self._states
        answer = ChatCompletion(**self._fields, choices=[self._choice(c) for c in state.choices], usage=self.usage())
        if state.params.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs_of(state)
        if self._return_token_ids:
            answer.prompt_token_ids = state.prompt_ids
        return answer

    def event(self, _: int, choice: Choice) -> bytes:
        """An event with the role goes before the first one with content."""
        delta = choice.take_delta()
        content = ChatDelta(content=delta.text or UNSET)
        answer = ChatChunkChoice(choice.index, content, *self._details(choice, delta))
        event = self.event_with(answer)
        return self._opening(choice) + event if delta.first else event

    def _opening(self, choice: Choice) -> bytes:
        role = ChatChunkChoice(choice.index, ChatDelta("assistant", ""))
        fields: dict[str, Any] = {**self._event_fields, "choices": [role]}
        if self._usage:
            fields["usage"] = None
        if self._return_token_ids:
            fields["prompt_token_ids"] = choice.state.prompt_ids
        return event_of(fields)

    def _choice(self, choice: Choice) -> ChatChoice:
        delta = choice.take_delta()
        return ChatChoice(choice.index, ChatMessage(delta.text), *self._details(choice, delta))

    def _details(self, choice: Choice, delta: OutputDelta) -> tuple[Any, ...]:
        """Logprobs, finish reason, stop reason, token ids."""
        logprobs = None if delta.logprobs is None else chat_logprobs(self._frontend.tokenizer, delta.logprobs)
        ids = delta.token_ids if self._return_token_ids else UNSET
        return logprobs, choice.finish_reason, choice.stop_reason, ids
