"""POST /v1/embeddings and /pooling: embeddings of texts."""

from __future__ import annotations

import base64
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from preheat.errors import InvalidRequest
from preheat.frontend.embedding import (
    check_dimensions,
    check_of_tokens,
    class_numbers,
    cosine,
    late_interaction,
    prompt_of,
    token_vectors,
)
from preheat.frontend.embedding import embeddings as made_embeddings
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import RequestState
from preheat.pooling.pooling import Pooling
from preheat.server.http.body import interpreted, read_request
from preheat.server.http.ignored import ignore
from preheat.server.http.middleware import request_id
from preheat.server.http.stream import WholeWriter
from preheat.server.http.text_fields import INPUT, Field, renamed
from preheat.server.openai.answers import PromptTokensDetails, Usage, encoded
from preheat.server.openai.completions import listed
from preheat.server.openai.params import prepared
from preheat.server.pooling.embeddings_schema import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    PooledData,
    PoolingList,
    PoolingRequest,
    Texts,
)

FLOAT_LE = np.dtype("<f4")


async def embeddings(request: Request) -> ASGIApp:
    """Make embeddings of texts."""
    frontend, body = await read_request(request, EmbeddingRequest)
    texts = _of_kind(request, frontend.tasks.embedding_of("Embeddings API"), body)
    return _EmbeddingWriter(request, body, await embedded_states(request, frontend, body, texts))


async def pooling(request: Request) -> ASGIApp:
    """Pool the hidden states of texts."""
    frontend, body = await read_request(request, PoolingRequest)
    own = frontend.tasks.pooling_of("Pooling API")
    if body.task is not None:
        own = frontend.tasks.pooling_for(body.task, "Pooling API")
    texts = _of_kind(request, own, body)
    if not own.of_tokens and body.task != "token_embed":
        return _PoolingWriter(request, body, await embedded_states(request, frontend, body, texts))
    check_of_tokens(own, body.dimensions)
    return _TokensWriter(request, body, await embedded_states(request, frontend, body, texts, of_tokens=True))


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


async def embedded_states(
    request: Request, frontend: Frontend, body: Texts, given: str | Sequence[str | int | list[int]], *,
    of_tokens: bool = False, field: Field = INPUT,
) -> list[RequestState]:  # fmt: skip
    """Return the checked requests for the embeddings of the ``given`` texts, or of their tokens.

    ``field`` has the names of the texts in errors.
    """
    own = frontend.tasks.pooling_of("Embeddings API")
    check_dimensions(own, body.dimensions)
    with renamed(field):
        params = frontend.tasks.asked_of(own, body.truncate_prompt_tokens, body.truncation_side, of_tokens=of_tokens)
        prompts = await interpreted(
            request, partial(listed, frontend, given if isinstance(given, str) else list(given), params.params)
        )
        return await prepared(
            request, prompts, params, add_special_tokens=body.add_special_tokens is not False,
            cache_salt=body.cache_salt or "", priority=body.priority or 0, cap_length=True,
        )  # fmt: skip


class PooledWriter(WholeWriter):
    """Common base of the endpoints; ``prefix`` begins the answer's id."""

    prefix: str

    def __init__(self, request: Request, body: Texts, states: Sequence[RequestState]) -> None:
        super().__init__(request, states)
        self._body, self._pooling = body, self._frontend.tasks.pooling_of("Pooling API")
        self._fields: dict[str, Any] = {
            "id": f"{self.prefix}-{request_id(request)}",
            "created": int(time.time()),
            "model": body.model or self._service.names[0],
        }

    @abstractmethod
    def whole(self) -> Struct | list[Any]: ...

    def vectors(self, normalize: bool | None = None) -> list[np.ndarray]:
        """Return the embeddings, in order. Raises InvalidRequest for more dimensions than the model has."""
        return made_embeddings(self._states, self._pooling, self._body.dimensions, normalize)

    def token_vectors(self, normalize: bool | None = None) -> list[np.ndarray]:
        """Return the vectors of each text's tokens, in order."""
        return [token_vectors(state, self._pooling, normalize) for state in self._states]

    def similarities(self, first: int) -> list[float]:
        """Return how alike the ``first`` texts and the others are: a cosine, or a late interaction of tokens."""
        of_tokens = self._pooling.of_tokens
        vectors, alike = (self.token_vectors(), late_interaction) if of_tokens else (self.vectors(), cosine)
        ones, others = vectors[:first], vectors[first:]
        return [alike(*pair) for pair in zip(ones * (len(others) // len(ones)), others, strict=True)]

    def numbers(self, activate: bool | None = None) -> list[np.ndarray]:
        """Return the numbers of each text's classes, in order."""
        return [class_numbers(state, self._pooling, activate) for state in self._states]

    def usage(self) -> Usage:
        """Return the usage: tokens of all texts."""
        tokens = sum(len(state.prompt_ids) for state in self._states)
        return Usage(tokens, 0, tokens, PromptTokensDetails(sum(state.cached_tokens for state in self._states)))


class _VectorWriter(PooledWriter):
    """Base of the endpoints that answer with vectors."""

    def __init__(self, request: Request, body: EmbeddingRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, body, states)
        self._normalize, self._base64 = body.normalizes, body.encoding_format == "base64"

    def made(self) -> list[np.ndarray]:
        """Return the numbers of each text."""
        return self.numbers(self._normalize) if self._pooling.classes else self.vectors(self._normalize)

    def shown(self) -> list[Any]:
        """Encode the embeddings to JSON: numbers, or base64 of little-endian fp32."""
        vectors = self.made()
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


class _TokensWriter(_PoolingWriter):
    """Answers with a vector of each token; base64 has the vectors of a text one behind the other."""

    def made(self) -> list[np.ndarray]:
        return self.token_vectors(self._normalize)
