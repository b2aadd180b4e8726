"""Shared parts of completions and chat completions: sampling parameters, encoding, logprobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from preheat.core import Image, SamplingParams, TokenLogprobs, in_background
from preheat.errors import InvalidRequest
from preheat.frontend.encoding import in_groups
from preheat.frontend.frontend import Frontend
from preheat.frontend.input_processor import naming_prompt
from preheat.frontend.pairs import Pair
from preheat.frontend.prompt_embeds import Embedded
from preheat.frontend.request_state import CheckedParams, RequestState
from preheat.frontend.tokenizer import Tokenizer
from preheat.frontend.tracing import parent_of
from preheat.server.http.body import body_size
from preheat.server.http.local_call import BACKGROUND
from preheat.server.http.middleware import request_id
from preheat.server.http.turns import in_turn
from preheat.server.openai import answers
from preheat.server.openai.answers import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from preheat.server.openai.beam_search import search_params
from preheat.server.openai.schema import SAMPLING_HINTS, ForModel, Sampling
from preheat.server.openai.structured import structured_outputs


class TokenIds:
    """Names of tokens by their ids (``return_tokens_as_token_ids``).

    A server without a tokenizer names them so, too.
    """

    def token_bytes(self, id: int) -> bytes:
        return self.token_text(id).encode()

    def token_text(self, id: int) -> str:
        return f"token_id:{id}"


PromptInput = str | list[int] | Embedded | Pair
"""A prompt of a body."""

TOGETHER = 1 << 15
"""Characters or token ids of prompts that are prepared in one turn: about 10 ms."""

REPLICA_HEADER = "X-data-parallel-rank"

_LOWEST = -9999.0  # JSON has no infinity


def sampling_fields(body: ForModel) -> dict[str, Any]:
    """Return the sampling parameters that ``body`` gives by their own names."""
    return {name: getattr(body, name) for name in SAMPLING_HINTS if name in body.__struct_fields__}


def sampling(
    frontend: Frontend, body: Sampling, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a body. Raises InvalidRequest if they are wrong or contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed: set stream to false", param="prompt_logprobs")
    if body.logprob_token_ids and (logprobs is None or body.max_tokens == 0):
        raise InvalidRequest(
            "logprob_token_ids needs logprobs and tokens that are generated", param="logprob_token_ids"
        )
    given = sampling_fields(body)
    given["structured_outputs"] = structured_outputs(body)
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return search_params(body, given) if body.use_beam_search else frontend.input.params(**given)


async def prepared(
    request: Request,
    prompts: Sequence[PromptInput],
    params: SamplingParams | CheckedParams,
    *,
    add_special_tokens: bool,
    cache_salt: str,
    priority: int = 0,
    cap_length: bool,
    images: Sequence[Image] = (),
) -> list[RequestState]:
    """Return the checked requests for ``prompts``; ``params`` are checked unless they are already.

    Prompts that are certainly too long are refused before any is encoded. Short prompts are encoded together, a long
    one by itself. Each group of them has a turn of its own, so that other clients' prompts come in between. Raises
    InvalidRequest.
    """
    frontend: Frontend = request.app.state.service.frontend
    replica = replica_asked(request)
    for place, prompt in enumerate(prompts):
        with naming_prompt(place, len(prompts)):
            frontend.input.check_length(prompt, params.params if isinstance(params, CheckedParams) else params)
    total = max(body_size(request), sum(map(len, prompts)))
    if not isinstance(params, CheckedParams):
        params = await in_turn(request, total, partial(frontend.input.checker.checked, params))
    prepare = partial(
        frontend.prepare,
        params=params,
        request_id=request_id(request),
        add_special_tokens=add_special_tokens,
        cache_salt=cache_salt,
        priority=priority,
        cap_length=cap_length,
        images=images,
        lora_name=request.state.lora_name,
    )
    states = list[RequestState]()
    for places in in_groups(map(len, prompts), TOGETHER):
        some = {place: prompts[place] for place in places}
        encode = partial(
            frontend.input.encode_all, list(some.values()), [params.params] * len(some),
            add_special_tokens=add_special_tokens, cap_length=cap_length,
        )  # fmt: skip
        work = partial(_prepare_each, some, len(prompts), encode, prepare)
        states += await in_turn(request, sum(map(len, some.values())), work, total=total)
    yields = request.scope.get(BACKGROUND, False)
    for state in states:
        state.data_parallel_rank = replica
        if yields:
            state.priority = in_background(state.priority)
    if frontend.traces is not None:
        parent = parent_of(request.headers)
        for state in states:
            state.trace_headers = parent
    return states


def _prepare_each(
    prompts: Mapping[int, PromptInput],
    count: int,
    encode: Callable[[], list[list[int] | None]],
    prepare: Callable[..., RequestState],
) -> list[RequestState]:
    """Return the requests for ``prompts``, by their places among ``count``. ``encode`` encodes several together."""
    encoded, states = encode() if len(prompts) > 1 else [None], list[RequestState]()
    for (place, prompt), ids in zip(prompts.items(), encoded, strict=True):
        with naming_prompt(place, count):
            states.append(prepare(prompt, encoded=ids))
    return states


def replica_asked(request: Request) -> int | None:
    """Return the replica in vLLM's header, or None. Raises InvalidRequest for an unknown replica."""
    asked, size = request.headers.get(REPLICA_HEADER), request.app.state.service.settings.data_parallel_size
    if asked is None:
        return None
    if asked not in map(str, range(size)):
        raise InvalidRequest(
            f"{REPLICA_HEADER} must be a number from 0 to {size - 1}, got {asked!r}", param=REPLICA_HEADER
        )
    return int(asked)


async def load_images(request: Request, urls: Sequence[str]) -> list[Image]:
    """Return the images behind ``urls``, one after the other, loaded outside the event loop."""
    lanes = request.app.state.service.image_lanes
    room = request.app.state.service.frontend.input.room_for_images()
    return [] if lanes is None else await lanes.load(request, urls, room)


def prompt_logprobs_of(state: RequestState) -> PromptLogprobs:
    """Return prompt logprobs in vLLM's shape.

    Each position has a mapping by token id; the first position has None.
    """

    def by_id(entry: TokenLogprobs) -> Any:
        position = state.position(entry).items()
        return answers.encoded(
            {
                id: answers.PromptLogprob(max(p.logprob, _LOWEST), p.rank or 0, p.decoded_token or "")
                for id, p in position
            }
        )

    return [None if entry is None else by_id(entry) for entry in state.prompt_logprobs]


class _Texts(dict[int, str]):
    """The text of each token by its id, made at its first use."""

    def __init__(self, names: Tokenizer | TokenIds) -> None:
        self._names = names

    def __missing__(self, id: int) -> str:
        self[id] = text = self._names.token_text(id)
        return text


def completion_logprobs(
    names: Tokenizer | TokenIds, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
) -> CompletionLogprobs:
    """Return logprobs in the shape of /v1/completions.

    ``offset`` is the character where the text of the tokens begins. A thread that writes a long answer holds Python's
    lock, so a position takes few calls: the text of a token is made once.
    """
    answer, texts = CompletionLogprobs([], [], [], []), _Texts(names)
    for id, entry in zip(ids, entries, strict=True):
        text = texts[id]
        answer.tokens.append(text)
        answer.text_offset.append(offset)
        offset += len(text)
        if entry is None:
            answer.token_logprobs.append(None)
            answer.top_logprobs.append(None)
        else:
            logprob = entry.logprob
            answer.token_logprobs.append(_LOWEST if logprob < _LOWEST else logprob)
            answer.top_logprobs.append(answers.encoded(_top_by_text(texts, entry)))
    return answer


def _top_by_text(texts: Mapping[int, str], entry: TokenLogprobs) -> dict[str, float]:
    """Return the logprobs of one position by the tokens' texts.

    Of tokens with the same text, the likeliest one counts. The chosen token is always included.
    """
    top: dict[str, float] = {}
    for id, logprob in (*entry.top, (entry.token, entry.logprob)):
        text = texts[id]
        known = top.get(text, _LOWEST)
        top[text] = known if known > logprob else logprob
    return top


def chat_logprobs(names: Tokenizer | TokenIds, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return logprobs in the shape of /v1/chat/completions."""
    return ChatLogprobs(
        [
            answers.encoded(
                answers.TokenLogprob(
                    *_token(names, entry.token, entry.logprob),
                    [answers.TopLogprob(*_token(names, id, logprob)) for id, logprob in entry.top],
                )
            )
            for entry in entries
        ]
    )


def _token(names: Tokenizer | TokenIds, id: int, logprob: float) -> tuple[str, float, list[int]]:
    piece = names.token_bytes(id)
    return piece.decode(errors="replace"), max(logprob, _LOWEST), list(piece)
