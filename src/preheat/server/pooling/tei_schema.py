"""The bodies of the endpoints of Text Embeddings Inference (TEI)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from preheat.server.openai.schema import ForModel, Name, Spelled
from preheat.utils.json_size import MOST_IDS


class Cut(ForModel, kw_only=True):
    """Fields of all bodies: with ``truncate`` a text that is too long is cut on the side ``truncation_direction``."""

    spelled: ClassVar[Spelled] = {
        "truncate_prompt_tokens": ("truncate",), "truncation_side": ("truncation_direction",), "prompt": ("inputs",)
    }  # fmt: skip

    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None

    @property
    def kept(self) -> int | None:
        """The tokens to keep: -1 is as many as fit, None is all."""
        return -1 if self.truncate else None

    @property
    def side(self) -> Literal["left", "right"]:
        return "left" if (self.truncation_direction or "").lower() == "left" else "right"


class EmbedRequest(Cut, kw_only=True):
    """POST /embed. ``prompt_name`` is the name of a prompt of sentence-transformers."""

    most_values: ClassVar[int] = MOST_IDS

    inputs: str | list[str | int | list[int]]
    normalize: bool | None = None
    prompt_name: Name | None = None
    dimensions: int | None = None


class EmbedTokensRequest(Cut, kw_only=True):
    """POST /embed_all. ``prompt_name`` is the name of a prompt of sentence-transformers."""

    most_values: ClassVar[int] = MOST_IDS

    inputs: str | list[str | int | list[int]]
    prompt_name: Name | None = None


class Compared(Struct, forbid_unknown_fields=True):
    """One sentence, and sentences to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityOptions(Struct, forbid_unknown_fields=True):
    """Fields of /similarity that other bodies have beside their inputs."""

    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    prompt_name: Name | None = None


class SimilarityRequest(ForModel, kw_only=True):
    """POST /similarity: the cosines of a sentence's embedding and the embeddings of others."""

    spelled: ClassVar[Spelled] = {
        **{field: tuple(f"parameters.{name}" for name in names) for field, names in Cut.spelled.items()},
        "prompt": ("inputs",),
    }

    inputs: Compared
    parameters: SimilarityOptions | None = None


class TokenizeTextsRequest(ForModel, kw_only=True):
    """POST /tokenize with ``inputs``."""

    spelled: ClassVar[Spelled] = {"prompt": ("inputs",)}

    inputs: str | list[str]
    add_special_tokens: bool | None = None
    prompt_name: Name | None = None


class TokenPiece(Struct):
    """A token, with its place in the text's characters; a special token has none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(ForModel, kw_only=True):
    """POST /decode: the ids of a text, or of several texts."""

    most_values: ClassVar[int] = MOST_IDS

    ids: list[int | list[int]]
    skip_special_tokens: bool | None = None


class PredictRequest(Cut, kw_only=True):
    """POST /predict: a text, a pair of texts, or a batch of lists of one or two texts."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False


class RerankTextsRequest(Cut, kw_only=True):
    """POST /rerank with TEI's ``texts`` in place of documents."""

    spelled: ClassVar[Spelled] = {**Cut.spelled, "prompt": ("texts",)}

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class Prediction(Struct):
    """A class and its number."""

    score: float
    label: str


class Rank(Struct):
    """A text's place in the request, and its score."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Info(Struct):
    """The model and the limits of the server."""

    model_id: str
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    version: str
    model_sha: str | None = None
    max_batch_requests: int | None = None
    tokenization_workers: int = 1
    auto_truncate: bool = False
