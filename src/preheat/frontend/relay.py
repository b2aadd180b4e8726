"""Requests that another frontend prepared: they run here as they came, and their results go back unread.

The other frontend is a front before several servers (docs/fleet.md). It has the client, the text and the stop strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from preheat.core import MAX_STOP_IDS, Delta, Request, SamplingParams
from preheat.errors import ContextTooLong, InvalidRequest

MOST_WORDS, MOST_WORD_IDS = 2048, 65_536
"""Most forbidden words of a request, each in two spellings, and most of their token ids together."""


class Relay:
    """A request of another frontend, and the results that it has not got yet."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._parts: list[Delta] = []

    def add(self, delta: Delta) -> None:
        """Add the results of a step."""
        self._parts.append(delta)

    def take(self) -> list[Delta]:
        """Return the results since the last call."""
        parts, self._parts = self._parts, []
        return parts


def apart(delta: Delta, ids: Mapping[int, Relay]) -> dict[int, Delta]:
    """Return the results of a step for each of ``ids``, under the id of the other frontend."""
    found: dict[int, Delta] = {}

    def of(id: int) -> Delta | None:
        return found.setdefault(id, Delta()) if id in ids else None

    for place, (id, token) in enumerate(zip(delta.ids, delta.tokens, strict=True)):
        if (part := of(id)) is not None:
            at = len(part.ids)
            part.ids.append(ids[id].request.id)
            part.tokens.append(token)
            if place in delta.logprobs:
                part.logprobs[at] = delta.logprobs[place]
            part.digests += delta.digests[8 * place : 8 * place + 8]
    for name in ("started", "finished", "prompt_logprobs", "pooled", "adapters"):
        for id, value in getattr(delta, name).items():
            if (part := of(id)) is not None:
                getattr(part, name)[ids[id].request.id] = value
    return found


def shown_params(request: Request) -> SamplingParams:
    """Return the parameters of a relayed request for its state here: no text, one choice, nothing kept."""
    return msgspec.structs.replace(
        request.params, n=1, detokenize=False, stop=None, logprobs=None, prompt_logprobs=None, receipt=False,
        repetition_detection=None, thinking_token_budget=None,
    )  # fmt: skip


def token_ids(request: Request) -> Iterable[tuple[str, list[int]]]:
    """Yield all token ids of a request, by the name of the field."""
    yield "prompt", request.prompt
    yield "resume", request.delivered
    yield "stop_ids", request.stop_ids
    yield "bad_words", [id for word in request.bad_words for id in word]
    if request.thinking is not None:
        yield "thinking", [request.thinking.start, *request.thinking.ends, *request.thinking.last]


def check_relayed(request: Request, room: int) -> None:
    """Raise InvalidRequest for a relayed request out of bounds; ``room`` is left behind its prompt."""
    if request.segments:
        raise InvalidRequest("a front sends no images and no embeddings: ask this server itself", param="segments")
    if not request.prompt:
        raise InvalidRequest("The prompt is empty; give at least one token", param="prompt")
    if not 0 <= request.max_tokens <= room:
        raise ContextTooLong(
            f"max_tokens is {request.max_tokens}, but {room} tokens fit behind the prompt", param="max_tokens"
        )
    if len(request.delivered) > request.max_tokens:
        raise InvalidRequest(
            f"resume has {len(request.delivered)} tokens, but max_tokens is {request.max_tokens}", param="resume"
        )
    if not 0 <= request.seed < 2**64 or not 0 <= request.choice < max(request.params.n, 1):
        raise InvalidRequest(f"seed {request.seed} or choice {request.choice} is out of range", param="seed")
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise InvalidRequest(f"stop_ids may have at most {MAX_STOP_IDS} ids", param="stop_ids")
    words = request.bad_words
    if len(words) > MOST_WORDS or sum(map(len, words)) > MOST_WORD_IDS or not all(words):
        raise InvalidRequest(f"bad_words may have at most {MOST_WORDS} words, none of them empty", param="bad_words")
