"""The endpoints of Text Embeddings Inference: /embed, /predict, /rerank with ``texts``, and /info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import preheat
from preheat.errors import InvalidRequest
from preheat.frontend.embedding import check_of_tokens, prompt_of
from preheat.frontend.pairs import Pair
from preheat.frontend.request_state import RequestState
from preheat.pooling.pooling import Pooling
from preheat.server.http.body import peeked, read_request
from preheat.server.http.service import Service
from preheat.server.http.text_fields import named, renamed, sides
from preheat.server.openai.params import prepared
from preheat.server.openai.schema import MAX_PROMPTS
from preheat.server.pooling import scoring
from preheat.server.pooling.embeddings import PooledWriter, embedded_states
from preheat.server.pooling.embeddings_schema import Texts
from preheat.server.pooling.scoring import pair_states
from preheat.server.pooling.tei_schema import (
    Cut,
    EmbedRequest,
    EmbedTokensRequest,
    Info,
    Prediction,
    PredictRequest,
    Rank,
    RerankTextsRequest,
    SimilarityOptions,
    SimilarityRequest,
)

INPUTS = named("inputs")
"""The texts of TEI's bodies."""


async def embed(request: Request) -> ASGIApp:
    """Make embeddings of texts; the answer is a list of vectors."""
    frontend, body = await read_request(request, EmbedRequest)
    given = prompted(frontend.tasks.embedding_of("Embed API"), body.inputs, body.prompt_name)
    states = await embedded_states(request, frontend, _asked(body, body.dimensions), given, field=INPUTS)
    return _VectorsWriter(request, body, states)


async def embed_all(request: Request) -> ASGIApp:
    """Return the states of all tokens of texts, as they are; a ColBERT's vectors have length 1."""
    frontend, body = await read_request(request, EmbedTokensRequest)
    own = frontend.tasks.pooling_of("Embed all API")
    check_of_tokens(own, None)
    given = prompted(own, body.inputs, body.prompt_name)
    states = await embedded_states(request, frontend, _asked(body), given, of_tokens=True, field=INPUTS)
    return _TokensWriter(request, _asked(body), states)


async def embed_sparse(request: Request) -> ASGIApp:
    """Refuse to make sparse vectors."""
    raise InvalidRequest("The model does not support Embed sparse API: it has no head for sparse vectors, see /embed")


async def similarity(request: Request) -> ASGIApp:
    """Compare a sentence with others; the answer is a list of cosines."""
    frontend, body = await read_request(request, SimilarityRequest)
    own, how = frontend.tasks.embedding_of("Similarity API"), body.parameters or SimilarityOptions()
    if not body.inputs.sentences:
        raise InvalidRequest("inputs.sentences must not be empty", param="inputs")
    given = prompted(own, [body.inputs.source_sentence, *body.inputs.sentences], how.prompt_name)
    asked = _asked(Cut(model=body.model, truncate=how.truncate, truncation_direction=how.truncation_direction))
    field = sides("inputs.source_sentence", 1, "inputs.sentences")
    return _SimilarityWriter(request, asked, await embedded_states(request, frontend, asked, given, field=field))


async def by_kind(request: Request) -> ASGIApp:
    """Do what the model is for: embed texts, rank texts, or classify them."""
    own = request.app.state.service.frontend.tasks.pooling_of("Embed API")
    if not own.classes:
        return await embed(request)
    return await (_rerank_texts if own.scores_pairs else predict)(request)


def prompted(
    own: Pooling, given: str | Sequence[str | int | list[int]], name: str | None
) -> str | Sequence[str | int | list[int]]:
    """Return the inputs with the model's prompt ``name`` before each. Raises InvalidRequest for token ids."""
    if name is None:
        return given
    texts = [given] if isinstance(given, str) else given
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("prompt_name puts a text before the inputs: give texts", param="prompt_name")
    before = prompt_of(own, name, "prompt_name")
    if before is None:
        raise InvalidRequest(
            f"prompt_name is {name!r}, but the model has no prompts: leave it out", param="prompt_name"
        )
    return [f"{before}{text}" for text in texts]


async def predict(request: Request) -> ASGIApp:
    """Classify texts, or pairs of texts."""
    frontend, body = await read_request(request, PredictRequest)
    own = frontend.tasks.classes_of("Predict API")
    batch = isinstance(body.inputs, list) and any(isinstance(each, list) for each in body.inputs)
    given: list[Any] = body.inputs if batch and isinstance(body.inputs, list) else [body.inputs]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest(f"inputs must hold 1 to {MAX_PROMPTS} texts or pairs, got {len(given)}", param="inputs")
    with renamed(INPUTS):
        states = await prepared(
            request, [_read(own, each) for each in given], frontend.tasks.asked_of(own, body.kept, body.side),
            add_special_tokens=True, cache_salt="", cap_length=True,
        )  # fmt: skip
    return _PredictWriter(request, body, states, batch)


async def rerank(request: Request) -> ASGIApp:
    """Order documents, or TEI's texts, by their scores with a query."""
    asked = await peeked(request, _Named)
    return await (scoring.rerank if asked is None or asked.texts is UNSET else _rerank_texts)(request)


class _Named(Struct):
    """The field that tells TEI's body from Cohere's."""

    texts: Raw | UnsetType = UNSET


async def _rerank_texts(request: Request) -> ASGIApp:
    """Order texts; the answer is a list."""
    frontend, body = await read_request(request, RerankTextsRequest)
    if not frontend.tasks.scoring_of("Rerank API").scores_pairs:
        raise InvalidRequest("The model does not support Rerank API with texts: it reads no pairs; write documents")
    if not body.texts:
        raise InvalidRequest("texts must not be empty", param="texts")
    states = await pair_states(request, _asked(body), [body.query], body.texts, "texts")
    return _RanksWriter(request, body, states)


async def info(request: Request) -> Response:
    """Return the model and the limits of the server."""
    service: Service = request.app.state.service
    own, settings = service.frontend.tasks.pooling_of("Info API"), service.settings
    limits = service.frontend.limits()
    kind: dict[str, Any] = {"embedding": {"pooling": own.type.lower()}}
    if own.classes:
        names = dict(enumerate(own.classes))
        labels = {"id2label": {str(id): name for id, name in names.items()},
                  "label2id": {name: id for id, name in names.items()}}  # fmt: skip
        kind = {"reranker" if own.scores_pairs else "classifier": labels}
    found = Info(
        model_id=service.names[0],
        model_dtype=settings.dtype,
        model_type=kind,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_input_length=own.max_embed_len or min(limits.max_model_len, limits.max_prompt_len or limits.max_model_len),
        max_batch_tokens=settings.max_num_batched_tokens or limits.max_model_len,
        max_client_batch_size=MAX_PROMPTS,
        version=preheat.__version__,
    )
    return Response(msgspec.json.encode(found), media_type="application/json")


def _asked(body: Cut, dimensions: int | None = None) -> Texts:
    """Return the fields of vLLM's bodies that say the same."""
    return Texts(model=body.model, dimensions=dimensions, truncate_prompt_tokens=body.kept, truncation_side=body.side)


def _read(own: Pooling, given: str | Sequence[str]) -> str | Pair:
    """Return one input: a text, or a pair. Raises InvalidRequest for another number of texts."""
    texts = [given] if isinstance(given, str) else given
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"an input must be a text or two texts, got {len(texts)}", param="inputs")
    return Pair(texts[0], texts[1], own.types, template=own.template)


class _VectorsWriter(PooledWriter):
    prefix = "embd"

    def __init__(self, request: Request, body: EmbedRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, _asked(body, body.dimensions), states)
        self._normalize = body.normalize is not False

    def whole(self) -> list[list[float]]:
        return [vector.tolist() for vector in self.vectors(self._normalize)]


class _TokensWriter(PooledWriter):
    prefix = "embd"

    def whole(self) -> list[list[list[float]]]:
        """Return the vectors of each text's tokens: hidden states are not normalized."""
        return [vectors.tolist() for vectors in self.token_vectors(self._pooling.of_tokens)]


class _SimilarityWriter(PooledWriter):
    prefix = "score"

    def whole(self) -> list[float]:
        return self.similarities(1)


class _PredictWriter(PooledWriter):
    prefix = "classify"

    def __init__(self, request: Request, body: PredictRequest, states: Sequence[RequestState], batch: bool) -> None:
        super().__init__(request, _asked(body), states)
        self._activate, self._batch = not body.raw_scores, batch

    def whole(self) -> list[Any]:
        """Return each input's classes, the greatest number first; without a batch the classes of the one input."""
        found = []
        for numbers in self.numbers(self._activate):
            named = map(Prediction, numbers.tolist(), self._pooling.classes)
            found.append(sorted(named, key=lambda each: -each.score))
        return found if self._batch else found[0]


class _RanksWriter(PooledWriter):
    prefix = "rerank"

    def __init__(self, request: Request, body: RerankTextsRequest, states: Sequence[RequestState]) -> None:
        super().__init__(request, _asked(body), states)
        self._texts, self._shows, self._activate = body.texts, body.return_text, not body.raw_scores

    def whole(self) -> list[Rank]:
        scores = [float(numbers[0]) for numbers in self.numbers(self._activate)]
        found = [
            Rank(place, score, text if self._shows else UNSET)
            for place, (text, score) in enumerate(zip(self._texts, scores, strict=True))
        ]
        return sorted(found, key=lambda each: -each.score)
