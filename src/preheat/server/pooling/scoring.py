"""POST /score and /rerank: how well texts fit, by a cross-encoder or by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.errors import InvalidRequest
from preheat.frontend.embedding import paired, pairs_of
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import RequestState
from preheat.server.http.body import read_request
from preheat.server.http.text_fields import named, renamed, sides
from preheat.server.openai.params import prepared
from preheat.server.openai.schema import MAX_PROMPTS
from preheat.server.pooling.embeddings import PooledWriter, embedded_states
from preheat.server.pooling.embeddings_schema import (
    Document,
    Ranked,
    Reranking,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    Texts,
    texts_of,
)


async def score(request: Request) -> ASGIApp:
    """Score pairs of texts."""
    frontend, body = await read_request(request, ScoreRequest)
    own = frontend.tasks.scoring_of("Score API")
    (name, other), first, second = body.sides()
    paired(len(first), len(second), name)
    if own.scores_pairs:
        return _PairScoreWriter(request, body, await pair_states(request, body, first, second, other))
    _check_count(len(first) + len(second), other)
    field = sides(name, len(first), other)
    states = await embedded_states(request, frontend, body, [*first, *second], field=field)
    return _ScoreWriter(request, body, states, len(first))


async def rerank(request: Request) -> ASGIApp:
    """Order documents by their scores with a query."""
    frontend, body = await read_request(request, RerankRequest)
    own = frontend.tasks.scoring_of("Rerank API")
    if not body.documents:
        raise InvalidRequest("documents must not be empty", param="documents")
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest("top_n must not be negative; 0 returns all", param="top_n")
    query, documents = texts_of(body.query), texts_of(body.documents)
    if own.scores_pairs:
        most = body.max_tokens_per_doc
        states = await pair_states(request, body, query, documents, "documents", most_second=most)
        return _PairRankWriter(request, body, states)
    _check_count(1 + len(documents), "documents")
    field = sides("query", 1, "documents")
    if body.max_tokens_per_doc is None or body.max_tokens_per_doc > (own.max_embed_len or _longest(frontend)):
        states = await embedded_states(request, frontend, body, [*query, *documents], field=field)
        return _RankWriter(request, body, states)
    states = await embedded_states(request, frontend, body, query, field=named("query"))
    body.truncate_prompt_tokens, body.truncation_side = body.max_tokens_per_doc, "right"
    states += await embedded_states(request, frontend, body, documents, field=named("documents"))
    return _RankWriter(request, body, states)


def _longest(frontend: Frontend) -> int:
    """Return the most tokens of a text: a greater ``max_tokens_per_doc`` cuts no document, as some clients send."""
    return frontend.limits().max_model_len


def _check_count(texts: int, name: str) -> None:
    """Raise InvalidRequest, naming the field ``name``, if there are too many ``texts`` on both sides."""
    if texts > MAX_PROMPTS:
        raise InvalidRequest(f"{texts} texts, but at most {MAX_PROMPTS} are read at once: send fewer", param=name)


async def pair_states(
    request: Request, body: Texts, first: Sequence[str], second: Sequence[str], name: str, *,
    most_second: int | None = None,
) -> list[RequestState]:  # fmt: skip
    """Return the checked requests for pairs of texts; at most ``most_second`` tokens of a second text count.

    ``name`` is the field of the second texts.
    """
    frontend: Frontend = request.app.state.service.frontend
    own = frontend.tasks.scoring_of("Score API")
    if body.dimensions is not None or body.add_special_tokens is False:
        name = "add_special_tokens" if body.dimensions is None else "dimensions"
        raise InvalidRequest(f"{name} has no meaning for pairs of texts: leave it out", param=name)
    if len(second) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(second)} pairs, but at most {MAX_PROMPTS} are scored at once", param=name)
    with renamed(named(name)):
        return await prepared(
            request, pairs_of(own, first, second, most_second),
            frontend.tasks.asked_of(own, body.truncate_prompt_tokens, body.truncation_side), add_special_tokens=True,
            cache_salt=body.cache_salt or "", priority=body.priority or 0, cap_length=True,
        )  # fmt: skip


class _ScoreWriter(PooledWriter):
    prefix = "score"

    def __init__(self, request: Request, body: ScoreRequest, states: Sequence[RequestState], first: int = 0) -> None:
        super().__init__(request, body, states)
        self._first, self._activate = first, body.activates

    def whole(self) -> ScoreList:
        data = [Score(place, score) for place, score in enumerate(self.scores())]
        return ScoreList(**self._fields, data=data, usage=self.usage())

    def scores(self) -> list[float]:
        """Return how alike the embeddings of each pair are."""
        return self.similarities(self._first)


class _PairScoreWriter(_ScoreWriter):
    def scores(self) -> list[float]:
        """Return the number of each pair."""
        return [float(numbers[0]) for numbers in self.numbers(self._activate)]


class _RankWriter(PooledWriter):
    prefix = "rerank"

    def __init__(self, request: Request, body: RerankRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, body, states)
        self._documents, self._top = texts_of(body.documents), body.top_n or len(body.documents)
        self._shows, self._activate = body.return_documents is not False, body.activates

    def whole(self) -> Reranking:
        ranked = [
            Ranked(place, Document(text) if self._shows else UNSET, score)
            for place, (text, score) in enumerate(zip(self._documents, self.scores(), strict=True))
        ]
        ranked.sort(key=lambda each: -each.relevance_score)
        return Reranking(self._fields["id"], self._fields["model"], ranked[: self._top], self.usage())

    def scores(self) -> list[float]:
        """Return how alike the query and each document are."""
        return self.similarities(1)


class _PairRankWriter(_RankWriter):
    def scores(self) -> list[float]:
        """Return the number of the query with each document."""
        return [float(numbers[0]) for numbers in self.numbers(self._activate)]
