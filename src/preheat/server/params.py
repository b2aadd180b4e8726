"""What completions and chat completions mean in common: sampling parameters, prompts and logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from preheat.core import SAMPLING_FIELDS, SamplingParams, TokenLogprobs
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import RequestState
from preheat.frontend.tokenizer import Tokenizer
from preheat.server.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from preheat.server.schema import Sampling

LONG_TEXT = 20_000
"""Characters beyond which encoding leaves the event loop for a thread."""

_LOWEST = -9999.0  # JSON has no infinity
_HTTP_FIELDS = [name for name, field in SAMPLING_FIELDS.items() if field.http]


def sampling(
    frontend: Frontend, body: Sampling, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The sampling parameters of a body; raises InvalidRequest where they are wrong or contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    given = {name: getattr(body, name) for name in _HTTP_FIELDS}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return frontend.input.params(**given)


def wants_usage(body: Sampling) -> bool:
    """A stream is to end with an event that holds the usage."""
    return bool(body.stream_options and body.stream_options.include_usage)


async def encoded(frontend: Frontend, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of ``text``; a long one is encoded in a thread."""
    if len(text) < LONG_TEXT:
        return frontend.tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(frontend.tokenizer.encode, text, add_special_tokens)


def prompt_logprobs_of(state: RequestState) -> PromptLogprobs:
    """vLLM's shape: one mapping from token id per position of the prompt, None for the first."""
    return [None if entry is None else _by_id(state, entry) for entry in state.prompt_logprobs]


def _by_id(state: RequestState, entry: TokenLogprobs) -> dict[int, PromptLogprob]:
    return {
        id: PromptLogprob(max(p.logprob, _LOWEST), p.rank or 0, p.decoded_token or "")
        for id, p in state.position(entry).items()
    }


def completion_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
) -> CompletionLogprobs:
    """The shape of /v1/completions for tokens whose text begins at character ``offset``."""
    answer = CompletionLogprobs([], [], [], [])
    for id, entry in zip(ids, entries, strict=True):
        text = tokenizer.token_text(id)
        answer.tokens.append(text)
        answer.text_offset.append(offset)
        offset += len(text)
        answer.token_logprobs.append(None if entry is None else max(entry.logprob, _LOWEST))
        answer.top_logprobs.append(None if entry is None else _top_by_text(tokenizer, entry))
    return answer


def _top_by_text(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """Of tokens that look the same, the most likely one counts; the chosen token is always there."""
    top: dict[str, float] = {}
    for id, logprob in [*entry.top, (entry.token, entry.logprob)]:
        top.setdefault(tokenizer.token_text(id), max(logprob, _LOWEST))
    return top


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The shape of /v1/chat/completions."""
    return ChatLogprobs(
        [
            TokenLogprob(
                *_token(tokenizer, entry.token, entry.logprob),
                [TopLogprob(*_token(tokenizer, id, logprob)) for id, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def _token(tokenizer: Tokenizer, id: int, logprob: float) -> tuple[str, float, list[int]]:
    piece = tokenizer.token_bytes(id)
    return piece.decode(errors="replace"), max(logprob, _LOWEST), list(piece)
