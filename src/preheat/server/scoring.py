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
from preheat.server.body import read_request
from preheat.server.embeddings import PooledWriter, as_input, embedded_states
from preheat.server.embeddings_schema import (
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
from preheat.server.params import prepared
from preheat.server.schema import MAX_PROMPTS


async def score(request: Request) -> ASGIApp:
    """Score pairs of texts."""
    frontend, body = await read_request(request, ScoreRequest)
    own = frontend.scoring_of("Score API")
    name, first, second = body.sides()
    paired(len(first), len(second), name)
    if own.scores_pairs:
        return _PairScoreWriter(request, body, await pair_states(request, body, first, second))
    return _ScoreWriter(request, body, await embedded_states(request, frontend, body, [*first, *second]), len(first))


async def rerank(request: Request) -> ASGIApp:
    """Order documents by their scores with a query."""
    frontend, body = await read_request(request, RerankRequest)
    own = frontend.scoring_of("Rerank API")
    if not body.documents:
        raise InvalidRequest("documents must not be empty", param="documents")
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest("top_n must not be negative; 0 returns all", param="top_n")
    query, documents = texts_of(body.query), texts_of(body.documents)
    if own.scores_pairs:
        states = await pair_states(request, body, query, documents, most_second=body.max_tokens_per_doc)
        return _PairRankWriter(request, body, states)
    if body.max_tokens_per_doc is None:
        return _RankWriter(request, body, await embedded_states(request, frontend, body, [*query, *documents]))
    first = await embedded_states(request, frontend, body, query)
    body.truncate_prompt_tokens, body.truncation_side = body.max_tokens_per_doc, "right"
    return _RankWriter(request, body, first + await embedded_states(request, frontend, body, documents))


async def pair_states(
    request: Request, body: Texts, first: Sequence[str], second: Sequence[str], *, most_second: int | None = None
) -> list[RequestState]:
    """Return the checked requests for pairs of texts; at most ``most_second`` tokens of a second text count."""
    frontend: Frontend = request.app.state.service.frontend
    own = frontend.scoring_of("Score API")
    if body.dimensions is not None or body.add_special_tokens is False:
        name = "add_special_tokens" if body.dimensions is None else "dimensions"
        raise InvalidRequest(f"{name} has no meaning for pairs of texts: leave it out", param=name)
    if len(second) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(second)} pairs, but at most {MAX_PROMPTS} are scored at once", param="documents")
    with as_input():
        return await prepared(
            request, pairs_of(own, first, second, most_second),
            frontend.asked_of(own, body.truncate_prompt_tokens, body.truncation_side), add_special_tokens=True,
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
