"""The bodies of the endpoints for embeddings, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct, UnsetType

from preheat.errors import InvalidRequest
from preheat.server.openai.answers import Usage
from preheat.server.openai.schema import ForModel, Name, Spelled, accepted, rejected
from preheat.utils.json_size import MOST_IDS


@accepted("user")
@rejected("messages embed_dtype endianness mm_processor_kwargs")
class Texts(ForModel, kw_only=True):
    """Fields common to the endpoints for embeddings."""

    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Name | None = None
    priority: int | None = None


class EmbeddingRequest(Texts, kw_only=True):
    """POST /v1/embeddings.

    ``normalize``, or ``use_activation``, says whether an embedding has length 1. ``input_type`` is the kind of the
    texts, such as "query" or "document"; the model may have a prompt for it.
    """

    most_values: ClassVar[int] = MOST_IDS

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    input_type: Name | None = None

    @property
    def normalizes(self) -> bool | None:
        return self.use_activation if self.normalize is None else self.normalize


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling."""

    task: Literal["embed", "classify", "token_embed"] | None = None


class Activated(Texts, kw_only=True):
    """Fields of endpoints of numbers: ``use_activation``, or ``activation``, is about the model's activation."""

    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def activates(self) -> bool | None:
        return self.activation if self.use_activation is None else self.use_activation


class ClassifyRequest(Activated, kw_only=True):
    """POST /classify."""

    most_values: ClassVar[int] = MOST_IDS

    input: str | list[str | int | list[int]]


class TextItem(Struct, forbid_unknown_fields=True):
    """A text as an object; some clients send texts so."""

    text: str


SomeTexts = str | TextItem | list[str | TextItem]

NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The pairs of names for the two sides of a score."""


class ScoreRequest(Activated, kw_only=True):
    """POST /v1/score: one text against several, or equally many on both sides.

    The two sides are named by one of four pairs.
    """

    text_1: SomeTexts | None = None
    text_2: SomeTexts | None = None
    queries: SomeTexts | None = None
    documents: SomeTexts | None = None
    items: SomeTexts | None = None
    data_1: SomeTexts | None = None
    data_2: SomeTexts | None = None

    def sides(self) -> tuple[tuple[str, str], list[str], list[str]]:
        """Return the names of both sides, and their texts. Raises InvalidRequest unless one pair is given."""
        names = dict.fromkeys(name for pair in NAMES for name in pair)
        present = tuple(name for name in names if getattr(self, name) is not None)
        given = next((pair for pair in NAMES if pair == present), None)
        if given is None:
            pairs = ", ".join(" and ".join(pair) for pair in NAMES)
            missing = next((two for one, two in NAMES if present == (one,)), present[0] if present else "text_1")
            raise InvalidRequest(f"Give two sides to compare: one of {pairs}", param=missing)
        first, second = (texts_of(getattr(self, name)) for name in given)
        return given, first, second


class RerankRequest(Activated, kw_only=True):
    """POST /v1/rerank.

    With ``top_n`` 0 all documents are returned. Only the first ``max_tokens_per_doc`` tokens of a document count.
    """

    spelled: ClassVar[Spelled] = {"truncate_prompt_tokens": ("truncate_prompt_tokens", "max_tokens_per_doc")}

    query: str | TextItem
    documents: list[str | TextItem]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None


def texts_of(given: SomeTexts) -> list[str]:
    """Return the texts of one side."""
    items = given if isinstance(given, list) else [given]
    return [item if isinstance(item, str) else item.text for item in items]


class Embedding(Struct):
    """One embedding. It is text (base64 of little-endian fp32) if the request asked for base64."""

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
    data: list[float | list[float]] | str
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


class Classification(Struct):
    """The numbers of a text's classes, and the class with the greatest number."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage
    object: Literal["list"] = "list"


class Document(Struct):
    text: str
    multi_modal: None = None


class Ranked(Struct):
    """A ranked document. ``index`` is its place in the request."""

    index: int
    document: Document | UnsetType
    relevance_score: float


class Reranking(Struct):
    """The ranking. ``results`` begin with the most similar document."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage
