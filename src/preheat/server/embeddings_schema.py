"""The bodies of the endpoints for embeddings: OpenAI's, and vLLM's for what only vLLM has."""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import Struct

from preheat.server.answers import Usage
from preheat.server.schema import ForModel, Name, accepted, rejected
from preheat.utils.json_size import MOST_IDS


@accepted("user")
@rejected("messages embed_dtype endianness mm_processor_kwargs")
class Texts(ForModel, kw_only=True):
    """What the endpoints for embeddings have in common."""

    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: Name | None = None
    priority: int | None = None


class EmbeddingRequest(Texts, kw_only=True):
    """POST /v1/embeddings. ``normalize``, or ``use_activation``: whether an embedding has length 1."""

    most_values: ClassVar[int] = MOST_IDS

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @property
    def normalizes(self) -> bool | None:
        return self.use_activation if self.normalize is None else self.normalize


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling."""

    task: Literal["embed"] | None = None


class ScoreRequest(Texts, kw_only=True):
    """POST /v1/score: one text and others, or as many of both."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(Texts, kw_only=True):
    """POST /v1/rerank. ``top_n`` 0: all."""

    query: str
    documents: list[str]
    top_n: int | None = None


class Embedding(Struct):
    """``embedding`` is text if base64 was asked for: fp32 in little-endian order."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    object: Literal["list"] = "list"


class PooledData(Struct):
    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingList(Struct):
    id: str
    created: int
    model: str
    data: list[PooledData]
    usage: Usage
    object: Literal["list"] = "list"


class Score(Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"


class Document(Struct):
    text: str


class Ranked(Struct):
    """``index`` is the document's place in the request."""

    index: int
    document: Document
    relevance_score: float


class Reranking(Struct):
    """``results`` are the most alike first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage
