"""POST /v1/completions: checks the body, writes the answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Raw
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.core import SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.params_checker import recheck
from preheat.frontend.prompt_embeds import Embedded
from preheat.frontend.request_state import Choice, OutputDelta, RequestState
from preheat.server.http.body import interpreted, read_request
from preheat.server.http.stream import CompletionsWriter, Long
from preheat.server.http.turns import INLINE_VALUES
from preheat.server.openai import kv_transfer
from preheat.server.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionChunkChoice,
    PromptLogprobs,
    PromptPart,
    encode,
)
from preheat.server.openai.beam_search import as_searches
from preheat.server.openai.params import completion_logprobs, prepared, prompt_logprobs_of, sampling
from preheat.server.openai.schema import MAX_PROMPTS, CompletionRequest
from preheat.utils.parts import parts

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> ASGIApp:
    """Complete prompts."""
    frontend, body = await read_request(request, CompletionRequest)
    frontend.tasks.check_generates("Completions API")
    params = await interpreted(request, partial(_params, frontend, body))
    prompts, special = await _prompts(request, frontend, body, params), body.add_special_tokens is not False
    capped = body.max_tokens is None
    states = await prepared(
        request, prompts, params, add_special_tokens=special, cache_salt=body.cache_salt or "",
        priority=body.priority or 0, cap_length=capped,
    )  # fmt: skip
    kv_transfer.attach(request, body, states)
    as_searches(frontend, body, states)
    return _CompletionWriter(request, body, states)


def _params(frontend: Frontend, body: CompletionRequest) -> SamplingParams:
    if body.best_of is not None:
        _check_best_of(body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.prompt_logprobs
    if body.echo:
        frontend.input.checker.check_text("echo", "leave it out, and ask for return_token_ids")
        if prompt_logprobs is None:
            prompt_logprobs = body.logprobs
        if body.logprobs not in {None, prompt_logprobs}:
            raise InvalidRequest("prompt_logprobs must equal logprobs when echo is set", param="prompt_logprobs")
        max_tokens = max_tokens or 1  # scoring a prompt: one token is sampled and not shown
    params = sampling(frontend, body, max_tokens, body.logprobs, prompt_logprobs)
    if body.best_of is None or body.best_of == params.n:
        return params
    logprobs = 0 if params.logprobs is None else params.logprobs
    return recheck(params, n=body.best_of, logprobs=logprobs)


def _check_best_of(body: CompletionRequest) -> None:
    n, best_of = body.n or 1, body.best_of or 0
    if best_of < n:
        raise InvalidRequest(f"best_of is {best_of}, but must be at least n ({n})", param="best_of")
    if best_of > n and body.stream:
        raise InvalidRequest(
            "best_of cannot be streamed, because the best texts are known only at the end: set stream to false",
            param="best_of",
        )


async def _prompts(
    request: Request, frontend: Frontend, body: CompletionRequest, params: SamplingParams
) -> list[str | list[int] | Embedded]:
    """Return the prompts of ``body``, embeddings first.

    Beside embeddings an empty text counts as no prompt, since clients must send one.
    """
    if body.prompt_embeds is None:
        if body.prompt is None:
            raise InvalidRequest("Missing required parameter: prompt", param="prompt")
        return [*await interpreted(request, partial(listed, frontend, body.prompt, params))]
    if body.echo:
        raise InvalidRequest("prompt_embeds have no tokens that could be shown: leave out echo", param="echo")
    reads, given = frontend.prompt_embeds, body.prompt_embeds
    texts = [given] if isinstance(given, str) else given
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise InvalidRequest(f"prompt_embeds must hold 1 to {MAX_PROMPTS} prompts", param="prompt_embeds")
    turns = request.app.state.service.turns
    found: list[str | list[int] | Embedded] = []
    for text in texts:
        found.append(await turns.decode(request, partial(reads.decode, text)))
    if not body.prompt:
        return found
    return [*found, *await interpreted(request, partial(listed, frontend, body.prompt, params))]


def listed(
    frontend: Frontend, prompt: str | list[str | int | list[int]], params: SamplingParams
) -> list[str | list[int]]:
    """Return one prompt or several as a list.

    The length is checked first, since a prompt may have millions of items.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        frontend.input.check_length(prompt, params)
    elif not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    kinds = set[type]().union(*(map(type, part) for part in parts(prompt)))
    if int not in kinds:
        return [item for item in prompt if not isinstance(item, int)]
    if kinds != {int}:
        raise InvalidRequest("prompt must be one prompt of token ids or a list of prompts, not both", param="prompt")
    return [prompt]  # type: ignore[list-item]  # ids alone


def _best(state: RequestState, n: int) -> list[Choice]:
    """Return the ``n`` choices with the best mean logprob, best first.

    If there are just ``n``, return all in order.
    """
    if n == len(state.choices):
        return state.choices

    def mean(choice: Choice) -> float:
        return sum(entry.logprob for entry in choice.logprobs or ()) / max(len(choice.token_ids), 1)

    return sorted(state.choices, key=mean, reverse=True)[:n]


class _Prompt(NamedTuple):
    """A prompt as its choices show it: text and logprobs.

    ``logprobs`` has the form for ``echo``, ``alternatives`` the form for ``prompt_logprobs``.
    """

    text: str
    logprobs: PromptPart | None
    alternatives: PromptLogprobs


def _joined(answer: CompletionChunkChoice) -> bytes:
    """Encode a choice; the logprobs of its prompt are joined with its own now."""
    logprobs: Any = answer.logprobs
    if callable(logprobs):
        answer.logprobs = logprobs()
    return encode(answer)


class _CompletionWriter(CompletionsWriter):
    prefix, event_object = "cmpl", "text_completion"

    def __init__(self, request: Request, body: CompletionRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, body, states)
        self._echo, self._scores_only = body.echo, body.max_tokens == 0
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._n = None if body.best_of is None else body.n or 1
        self._hides_logprobs = self._n is not None and body.logprobs is None
        self._offsets: dict[int, int] = {}  # choice -> characters covered by its logprobs
        self._prompts: dict[int, _Prompt] = {}  # by the id of their state

    def whole(self) -> Completion:
        n = self._n or self._states[0].params.n
        choices: list[Any] = [
            Raw(_joined(self._choice(place * n + rank, choice)))
            for place, state in enumerate(self._states)
            for rank, choice in enumerate(_best(state, n))
        ]
        return Completion(**self._fields, choices=choices, usage=self.usage(), kv_transfer_params=self.transfer())

    def values(self, state: RequestState) -> int:
        return super().values(state) + self._shown(state) * state.params.n

    def _shown(self, state: RequestState) -> int:
        """Return the number of the prompt's values in the first part of each choice."""
        shows = self._echo or self._return_token_ids
        return len(state.prompt_ids) * (1 + (state.params.prompt_logprobs or 0)) if shows else 0

    async def read_prompt(self, state: RequestState) -> None:
        await self._service.turns.answer(self.values(state), partial(self._prompt, state))

    def event(self, first: int, choice: Choice) -> bytes | Long:
        begins = choice.begins
        answer = self._choice(first + choice.index, choice)
        values, tail = self._shown(choice.state) if begins else 0, self.tail(choice)
        if values < INLINE_VALUES:
            return self._head + _joined(answer) + tail
        return Long(values, lambda: self._head + _joined(answer) + tail)

    def completion_tokens(self, choice: Choice) -> int:
        return 0 if self._scores_only else super().completion_tokens(choice)

    def _choice(self, index: int, choice: Choice) -> CompletionChunkChoice:
        delta, state = self.take(choice), choice.state
        if self._hides_logprobs:
            delta.logprobs = None
        echo = bool(self._echo and delta.first)
        kind = CompletionChunkChoice if self._stream else CompletionChoice
        answer = kind(index, delta.text, None, *choice.shown_end)
        if self._scores_only:
            delta = OutputDelta("", [], delta.logprobs and [], delta.first)
            answer = kind(index, "", None, choice.shown_end[0] and "length")
        if echo:
            answer.text = self._prompt(state).text + answer.text
        if delta.logprobs is not None:
            answer.logprobs = self._logprobs(index, state, delta, echo)
        if isinstance(answer, CompletionChoice) and self._prompt_logprobs:
            answer.prompt_logprobs = self._prompt(state).alternatives
        if choice.sent_end and choice.receipt is not None:
            answer.receipt = choice.receipt
        if self._return_token_ids:
            answer.token_ids = delta.token_ids
            answer.prompt_token_ids = state.shown_ids if delta.first else None
        return answer

    def _logprobs(self, index: int, state: RequestState, delta: OutputDelta, echo: bool) -> Any:
        """Return the logprobs of ``delta``, or a function that encodes them behind the prompt's."""
        before = self._prompt(state).logprobs if echo else None
        offset = self._offsets.get(index, 0) if before is None else before.characters
        logprobs = completion_logprobs(self.names, delta.token_ids, delta.logprobs or (), offset)
        self._offsets[index] = offset + sum(map(len, logprobs.tokens))
        return logprobs if before is None else partial(before.followed_by, logprobs)

    def _prompt(self, state: RequestState) -> _Prompt:
        """Return the shown parts of the prompt, made once for all of its choices."""
        key = id(state)
        if key not in self._prompts:
            shows = self._echo and state.prompt_logprobs
            self._prompts[key] = _Prompt(
                state.prompt_text if self._echo else "",
                PromptPart.of(completion_logprobs(self.names, state.prompt_ids, state.prompt_logprobs, 0))
                if shows
                else None,
                prompt_logprobs_of(state) if self._prompt_logprobs else [],
            )
        return self._prompts[key]
