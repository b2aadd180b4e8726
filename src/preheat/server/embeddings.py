"""POST /v1/embeddings, /pooling, /score and /rerank: embeddings of texts, and similarities by them."""

from __future__ import annotations

import base64
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.errors import InvalidRequest
from preheat.frontend.embedding import asked_of, check_dimensions, cosine, embedding, paired, prompt_of
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import RequestState
from preheat.server.answers import PromptTokensDetails, Usage, encoded
from preheat.server.body import interpreted, read_request
from preheat.server.completions import listed
from preheat.server.embeddings_schema import (
    Document,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    PooledData,
    PoolingList,
    PoolingRequest,
    Ranked,
    Reranking,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    Texts,
    texts_of,
)
from preheat.server.ignored import ignore
from preheat.server.middleware import request_id
from preheat.server.params import prepared
from preheat.server.stream import WholeWriter
from preheat.utils.pooling import Pooling

FLOAT_LE = np.dtype("<f4")


async def embeddings(request: Request) -> ASGIApp:
    """Make embeddings of texts."""
    frontend, body = await read_request(request, EmbeddingRequest)
    texts = _of_kind(request, frontend.embedding_of("Embeddings API"), body)
    return _EmbeddingWriter(request, body, await embedded_states(request, frontend, body, texts))


async def pooling(request: Request) -> ASGIApp:
    """Pool the hidden states of texts."""
    frontend, body = await read_request(request, PoolingRequest)
    texts = _of_kind(request, frontend.embedding_of("Pooling API"), body)
    return _PoolingWriter(request, body, await embedded_states(request, frontend, body, texts))


def _of_kind(request: Request, own: Pooling, body: EmbeddingRequest) -> str | list[str | int | list[int]]:
    """Return the input with the model's prompt for ``input_type`` before each text.

    Without such a prompt ``input_type`` is ignored. Raises InvalidRequest for token ids.
    """
    if body.input_type is None:
        return body.input
    before = prompt_of(own, body.input_type)
    if before is None:
        ignore(request, ["input_type"])
        return body.input
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("input_type puts a text before the input: give texts, or leave it out", param="input_type")
    return [f"{before}{text}" for text in texts]


async def score(request: Request) -> ASGIApp:
    """Score the similarity of texts."""
    frontend, body = await read_request(request, ScoreRequest)
    frontend.embedding_of("Score API")
    name, first, second = body.sides()
    paired(len(first), len(second), name)
    return _ScoreWriter(request, body, await embedded_states(request, frontend, body, [*first, *second]), len(first))


async def rerank(request: Request) -> ASGIApp:
    """Order documents by their similarity to a query."""
    frontend, body = await read_request(request, RerankRequest)
    frontend.embedding_of("Rerank API")
    if not body.documents:
        raise InvalidRequest("documents must not be empty", param="documents")
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest("top_n must not be negative; 0 returns all", param="top_n")
    if body.max_tokens_per_doc is None:
        texts = [*texts_of(body.query), *texts_of(body.documents)]
        return _RerankWriter(request, body, await embedded_states(request, frontend, body, texts))
    query = await embedded_states(request, frontend, body, texts_of(body.query))
    body.truncate_prompt_tokens, body.truncation_side = body.max_tokens_per_doc, "right"
    return _RerankWriter(
        request, body, query + await embedded_states(request, frontend, body, texts_of(body.documents))
    )


async def embedded_states(
    request: Request, frontend: Frontend, body: Texts, given: str | Sequence[str | int | list[int]]
) -> list[RequestState]:
    """Return the checked requests for the embeddings of the ``given`` texts."""
    own = frontend.embedding_of("Embeddings API")
    check_dimensions(own, body.dimensions)
    params = asked_of(own, body.truncate_prompt_tokens, body.truncation_side)
    with _as_input():
        prompts = await interpreted(
            request, partial(listed, frontend, given if isinstance(given, str) else list(given), params)
        )
        return await prepared(
            request, prompts, params, add_special_tokens=body.add_special_tokens is not False,
            cache_salt=body.cache_salt or "", priority=body.priority or 0, cap_length=True,
        )  # fmt: skip


@contextmanager
def _as_input() -> Iterator[None]:
    """Rename ``prompt`` to ``input`` in errors, after the field of these bodies."""
    try:
        yield
    except InvalidRequest as error:
        if not (error.param or "").startswith("prompt"):
            raise
        name = f"input{(error.param or '').removeprefix('prompt')}"
        raise type(error)(error.message.replace(error.param or "", name, 1), param=name) from error


class PooledWriter(WholeWriter):
    """Common base of the endpoints; ``prefix`` begins the answer's id."""

    prefix: str

    def __init__(self, request: Request, body: Texts, states: Sequence[RequestState]) -> None:
        super().__init__(request, states)
        self._body, self._pooling = body, self._frontend.embedding_of("Embeddings API")
        self._fields: dict[str, Any] = {
            "id": f"{self.prefix}-{request_id(request)}",
            "created": int(time.time()),
            "model": body.model or self._service.names[0],
        }

    @abstractmethod
    def whole(self) -> Struct: ...

    def vectors(self, normalize: bool | None = None) -> list[np.ndarray]:
        """Return the embeddings, in order. Raises InvalidRequest for more dimensions than the model has."""
        return [embedding(state, self._pooling, self._body.dimensions, normalize) for state in self._states]

    def usage(self) -> Usage:
        """Return the usage: tokens of all texts."""
        tokens = sum(len(state.prompt_ids) for state in self._states)
        return Usage(tokens, 0, tokens, PromptTokensDetails(sum(state.cached_tokens for state in self._states)))


class _VectorWriter(PooledWriter):
    """Base of the endpoints that answer with vectors."""

    def __init__(self, request: Request, body: EmbeddingRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, body, states)
        self._normalize, self._base64 = body.normalizes, body.encoding_format == "base64"

    def shown(self) -> list[Any]:
        """Encode the embeddings to JSON: numbers, or base64 of little-endian fp32."""
        vectors = self.vectors(self._normalize)
        if self._base64:
            return [encoded(base64.b64encode(vector.astype(FLOAT_LE).tobytes()).decode()) for vector in vectors]
        return [encoded(vector.tolist()) for vector in vectors]


class _EmbeddingWriter(_VectorWriter):
    prefix = "embd"

    def whole(self) -> EmbeddingList:
        data = [Embedding(*each) for each in enumerate(self.shown())]
        return EmbeddingList(**self._fields, data=data, usage=self.usage())


class _PoolingWriter(_VectorWriter):
    prefix = "pool"

    def whole(self) -> PoolingList:
        data = [PooledData(*each) for each in enumerate(self.shown())]
        return PoolingList(**self._fields, data=data, usage=self.usage())


class _ScoreWriter(PooledWriter):
    prefix = "score"

    def __init__(self, request: Request, body: ScoreRequest, states: Sequence[RequestState], first: int) -> None:
        super().__init__(request, body, states)
        self._first = first

    def whole(self) -> ScoreList:
        vectors = self.vectors()
        ones, others = vectors[: self._first], vectors[self._first :]
        ones *= len(others) // len(ones)
        data = [Score(place, cosine(*pair)) for place, pair in enumerate(zip(ones, others, strict=True))]
        return ScoreList(**self._fields, data=data, usage=self.usage())


class _RerankWriter(PooledWriter):
    prefix = "rerank"

    def __init__(self, request: Request, body: RerankRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, body, states)
        self._documents, self._top = texts_of(body.documents), body.top_n or len(body.documents)
        self._shows = body.return_documents is not False

    def whole(self) -> Reranking:
        query, *others = self.vectors()
        ranked = [
            Ranked(place, Document(text) if self._shows else UNSET, cosine(query, other))
            for place, (text, other) in enumerate(zip(self._documents, others, strict=True))
        ]
        ranked.sort(key=lambda each: -each.relevance_score)
        return Reranking(self._fields["id"], self._fields["model"], ranked[: self._top], self.usage())
