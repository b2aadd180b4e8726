"""POST /v1/completions: what the body means, and the answer's shape."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import Choice, OutputDelta, RequestState
from preheat.server.answers import Completion, CompletionChoice, CompletionLogprobs, encode
from preheat.server.body import read_body
from preheat.server.middleware import request_id
from preheat.server.params import completion_logprobs, encoded, prompt_logprobs_of, sampling, wants_usage
from preheat.server.schema import CompletionRequest, decode
from preheat.server.service import Service
from preheat.server.stream import EventStream, FullResponse, usage_of

MAX_PROMPTS = 2048
DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> ASGIApp:
    """The endpoint."""
    service: Service = request.app.state.service
    body = decode(await read_body(request), CompletionRequest)
    service.check_model(body.model)
    frontend, id = service.frontend, request_id(request)
    params = _params(frontend, body)
    states = [
        frontend.prepare(ids, params, request_id=id, text=text, cache_salt=body.cache_salt or "")
        for text, ids in await _prompts(frontend, body)
    ]
    writer = _CompletionWriter(body, states, f"cmpl-{id}", body.model or service.names[0])
    if body.stream:
        return EventStream(frontend, states, writer.event, writer.last_event)
    return FullResponse(frontend, states, writer.whole)


def _params(frontend: Frontend, body: CompletionRequest) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.prompt_logprobs
    if body.echo:
        frontend.input.check_text("echo", "leave it out, and ask for return_token_ids")
        if prompt_logprobs is None:
            prompt_logprobs = body.logprobs
        if body.logprobs not in {None, prompt_logprobs}:
            raise InvalidRequest("prompt_logprobs must equal logprobs when echo is set", param="prompt_logprobs")
        max_tokens = max_tokens or 1  # to score a prompt: one token is drawn and not shown
    return sampling(frontend, body, max_tokens, body.logprobs, prompt_logprobs)


async def _prompts(frontend: Frontend, body: CompletionRequest) -> list[tuple[str | None, list[int]]]:
    """Each prompt's text, where it came as text, and its token ids."""
    prompts = _listed(body.prompt)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InvalidRequest(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt")
    special = body.add_special_tokens is not False
    return [(p, await encoded(frontend, p, special)) if isinstance(p, str) else (None, p) for p in prompts]


def _listed(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One prompt or several, as a list."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if not ids:
        return [item for item in prompt if not isinstance(item, int)]
    if len(ids) < len(prompt):
        raise InvalidRequest("prompt must be one prompt of token ids or a list of prompts, not both", param="prompt")
    return [ids]


class _CompletionWriter:
    """Writes the answer to one body, as a whole or event by event."""

    def __init__(self, body: CompletionRequest, states: Sequence[RequestState], id: str, model: str) -> None:
        self._body, self._states, self._id, self._model = body, states, id, model
        self._created = int(time.time())
        self._usage = wants_usage(body)
        self._offsets: dict[int, int] = {}  # choice -> characters that its logprobs have covered
        fields = {"id": id, "object": "text_completion", "created": self._created, "model": model}
        self._head = b'data: %b,"choices":[' % encode(fields)[:-1]  # all but the choice is the same in each event
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def whole(self) -> Completion:
        choices = [
            self._choice(place * state.params.n, choice)
            for place, state in enumerate(self._states)
            for choice in state.choices
        ]
        return self._completion(choices)

    def event(self, first: int, choice: Choice) -> bytes:
        """The event for what is new of ``choice``; its prompt's choices begin at index ``first``."""
        return b"%b%b%b" % (self._head, encode(self._choice(first, choice)), self._tail)

    def last_event(self) -> bytes:
        """The usage, where it is asked for."""
        return b"data: %b\n\n" % encode(self._completion([])) if self._usage else b""

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        usage = usage_of(self._states)
        if self._body.max_tokens == 0:
            usage.total_tokens, usage.completion_tokens = usage.prompt_tokens, 0
        return Completion(self._id, self._created, self._model, choices, usage)

    def _choice(self, first: int, choice: Choice) -> CompletionChoice:
        body, delta = self._body, choice.take_delta()
        index, echo = first + choice.index, body.echo and delta.first
        answer = CompletionChoice(index, delta.text, None, choice.finish_reason, choice.stop_reason)
        if body.max_tokens == 0:
            delta = OutputDelta("", [], delta.logprobs and [], delta.first)
            answer = CompletionChoice(index, "", None, choice.finish_reason and "length")
        if echo:
            answer.text = choice.state.prompt_text + answer.text
        if delta.logprobs is not None:
            answer.logprobs = self._logprobs(index, choice.state, delta, bool(echo))
        if delta.first and body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs_of(choice.state)
        if body.return_token_ids:
            answer.token_ids = delta.token_ids
            answer.prompt_token_ids = choice.state.prompt_ids if delta.first else UNSET
        return answer

    def _logprobs(self, index: int, state: RequestState, delta: OutputDelta, echo: bool) -> CompletionLogprobs:
        ids = [*state.prompt_ids, *delta.token_ids] if echo else delta.token_ids
        entries = [*state.prompt_logprobs, *(delta.logprobs or ())] if echo else delta.logprobs or ()
        offset = self._offsets.get(index, 0)
        logprobs = completion_logprobs(state.tokenizer, ids, entries, offset)
        self._offsets[index] = offset + sum(map(len, logprobs.tokens))
        return logprobs
