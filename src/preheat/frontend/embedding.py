"""Embeddings: the request for one, and the embedding from the pooled hidden state."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from preheat.core import POOLS, SamplingParams
from preheat.errors import InvalidRequest
from preheat.frontend.long_texts import weighted_mean
from preheat.frontend.outputs import PoolingOutput, PoolingRequestOutput
from preheat.frontend.pairs import Pair
from preheat.frontend.request_state import RequestState
from preheat.pooling.pooling import Pooling
from preheat.pooling.sentence_modules import PoolingType
from preheat.utils.exact_sums import exact_sums


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of :meth:`preheat.LLM.embed`; names and meanings are vLLM's.

    ``dimensions``: the length of the embedding, for a matryoshka model. ``use_activation`` or ``normalize``: whether
    embeddings have length 1; None: as the model says. ``task`` "token_embed" asks for a vector of each token.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: Literal["embed", "classify", "token_embed"] | None = None

    @property
    def normalizes(self) -> bool | None:
        return self.use_activation if self.normalize is None else self.normalize


_AT_ONCE = 64
"""Embeddings that are normalized at once."""

_LAST = SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)


def asked_of(kind: PoolingType, truncate: int | None, side: str | None) -> SamplingParams:
    """Return the sampling parameters that make the engine report hidden states.

    The report covers one token, or all tokens of the prompt; the prefix cache then serves none of them. With the
    ``kind`` ALL each token has a vector. A single token is sampled and not shown. ``truncate`` is
    ``truncate_prompt_tokens``, ``side`` is ``truncation_side``. Raise InvalidRequest if no text can be cut so.
    """
    pool = POOLS.index(kind) if kind in POOLS else None
    try:
        return replace(_LAST, prompt_logprobs=pool, truncate_prompt_tokens=truncate, truncation_side=side)
    except ValueError as error:
        raise InvalidRequest(str(error), param="truncate_prompt_tokens") from error


def check_dimensions(pooling: Pooling, dimensions: int | None) -> None:
    """Raise InvalidRequest unless the first ``dimensions`` numbers of an embedding are an embedding too."""
    if dimensions is None:
        return
    if not pooling.matryoshka:
        raise InvalidRequest(
            "The model does not support matryoshka representation, so dimensions cannot be chosen: leave it out",
            param="dimensions",
        )
    if dimensions < 1 or (pooling.dimensions and dimensions not in pooling.dimensions):
        allowed = f"one of {', '.join(map(str, pooling.dimensions))}" if pooling.dimensions else "at least 1"
        raise InvalidRequest(f"dimensions is {dimensions}, but must be {allowed}", param="dimensions")


def embedding(
    state: RequestState, pooling: Pooling, dimensions: int | None = None, normalize: bool | None = None
) -> np.ndarray:
    """Return the embedding of a finished request, fp32 [hidden] or its first ``dimensions``.

    ``normalize`` None: as ``pooling`` says. The length for the normalization is computed exactly and rounded once. The
    embedding of a text in chunks is the mean of the chunks' embeddings, with their tokens as weights; as in vLLM, the
    mean itself is not normalized.
    """
    if not state.chunks:
        return vector_of(state.pooled, pooling, dimensions, normalize)
    vectors = [vector_of(choice.pooled, pooling, dimensions, normalize) for choice in state.choices]
    return weighted_mean(vectors, [len(chunk) for chunk in state.chunks])


def embeddings(
    states: Sequence[RequestState], pooling: Pooling, dimensions: int | None = None, normalize: bool | None = None
) -> list[np.ndarray]:
    """Return the embedding of each finished request, as :func:`embedding` does; many are normalized at once."""
    normalizes = pooling.normalize if normalize is None else normalize
    found: list[np.ndarray] = []
    for first in range(0, len(states), _AT_ONCE):
        some = states[first : first + _AT_ONCE]
        if not normalizes or any(state.chunks for state in some):
            found += [embedding(state, pooling, dimensions, normalize) for state in some]
        else:
            vectors = np.frombuffer(b"".join([state.pooled for state in some]), np.float32)
            found += list(_normalized(_first(vectors.reshape(len(some), -1), dimensions)))
    return found


def vector_of(
    pooled: bytes, pooling: Pooling, dimensions: int | None = None, normalize: bool | None = None
) -> np.ndarray:
    """Return the embedding of a text, or of one chunk, from its ``pooled`` state."""
    vector = _first(np.frombuffer(pooled, np.float32), dimensions)
    normalizes = pooling.normalize if normalize is None else normalize
    found: np.ndarray = _normalized(vector[None])[0] if normalizes else vector
    return found


def _first(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Return the first ``dimensions`` numbers of ``vectors`` [..., size]. Raises InvalidRequest if they have fewer."""
    size = vectors.shape[-1]
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(f"dimensions is {dimensions}, but the model's vectors have {size}", param="dimensions")
    return vectors[..., :dimensions]


def token_vectors(state: RequestState, pooling: Pooling, normalize: bool | None = None) -> np.ndarray:
    """Return the vectors of a finished request's tokens, fp32 [tokens, size]; each is normalized as an embedding is."""
    found = np.frombuffer(state.pooled, np.float32).reshape(len(state.prompt_ids), -1)
    normalizes = pooling.normalize if normalize is None else normalize
    return _normalized(found) if normalizes else found


def check_of_tokens(pooling: Pooling, dimensions: int | None) -> None:
    """Raise InvalidRequest unless each token of a text can have a vector."""
    if pooling.classes or (pooling.dense and not pooling.of_tokens):
        raise InvalidRequest("token_embed is not supported, as the model has a head behind the pooled state of a text")
    if dimensions is not None:
        raise InvalidRequest("dimensions has no meaning for the vectors of tokens: leave it out", param="dimensions")


def _normalized(vectors: np.ndarray) -> np.ndarray:
    """Return fp32 ``vectors`` [n, size] with length 1; a vector of zeros stays."""
    lengths = np.sqrt(exact_sums(vectors.astype(np.float64) ** 2))
    lengths[lengths == 0] = 1.0
    found: np.ndarray = vectors / lengths.astype(np.float32)[:, None]
    return found


def class_numbers(state: RequestState, pooling: Pooling, activate: bool | None) -> np.ndarray:
    """Return the numbers of a finished request's classes, fp32 [classes].

    ``activate`` None: as ``pooling`` says. An activation is computed in float64 and rounded once.
    """
    logits = np.frombuffer(state.pooled, np.float32)[: len(pooling.classes)]
    if not (pooling.normalize if activate is None else activate) or pooling.activation == "none":
        return logits
    numbers = logits.astype(np.float64).tolist()
    if pooling.activation == "sigmoid":
        found = [_sigmoid(x) for x in numbers]
    else:
        most = max(numbers)
        powers = [math.exp(x - most) for x in numbers]
        total = math.fsum(powers)
        found = [power / total for power in powers]
    return np.array(found, np.float32)


def _sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), without an overflow."""
    power = math.exp(-abs(x))
    return 1.0 / (1.0 + power) if x >= 0 else power / (1.0 + power)


def pairs_of(
    pooling: Pooling, first: Sequence[str], second: Sequence[str], most_second: int | None = None
) -> list[Pair]:
    """Return the pairs of texts; a single ``first`` text is paired with each of ``second``."""
    ones = [*first] * (len(second) // len(first))
    return [
        Pair(one, other, pooling.types, most_second, pooling.template) for one, other in zip(ones, second, strict=True)
    ]


def pooled_output(state: RequestState, pooling: Pooling, params: PoolingParams) -> PoolingRequestOutput[PoolingOutput]:
    """Return the result of a finished request, by ``params``."""
    return pooled_outputs([state], pooling, params)[0]


def pooled_outputs(
    states: Sequence[RequestState], pooling: Pooling, params: PoolingParams
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Return the results of finished requests, by ``params``."""
    if pooling.classes:
        numbers = [PoolingOutput(class_numbers(state, pooling, params.normalizes)) for state in states]
        pairs = zip(states, numbers, strict=True)
        return [PoolingRequestOutput(state.request_id, each, state.prompt_ids) for state, each in pairs]
    if pooling.of_tokens or params.task == "token_embed":
        data = [token_vectors(state, pooling, params.normalizes) for state in states]
    else:
        data = embeddings(states, pooling, params.dimensions, params.normalizes)
    return [
        PoolingRequestOutput(
            state.request_id, PoolingOutput(each), state.prompt_ids, num_cached_tokens=state.cached_tokens
        )
        for state, each in zip(states, data, strict=True)
    ]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = math.sqrt(math.fsum((a * a).tolist()) * math.fsum((b * b).tolist()))
    return math.fsum((a * b).tolist()) / lengths if lengths else 0.0


def late_interaction(one: np.ndarray, other: np.ndarray) -> float:
    """Return the sum over the vectors ``one`` of the greatest product with one of the vectors ``other``.

    Contract: products of float32 are summed in float64 by numpy, in an order fixed by their number, for each pair by
    itself; the greatest products are summed exactly and rounded once.
    """
    wide = other.astype(np.float64)
    return math.fsum(float((wide * vector).sum(axis=1).max()) for vector in one)


def paired(first: int, second: int, param: str) -> int:
    """Return the number of scores of ``first`` texts with ``second`` others.

    One text is compared with all others; several are compared pairwise. Raises InvalidRequest if the numbers differ.
    """
    if not first or not second or first not in (1, second):
        raise InvalidRequest(
            f"{first} texts cannot be paired with {second}: give one text, or as many as on the other side", param=param
        )
    return second


KINDS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
    "document": ("passage",),
    "passage": ("document",),
}
"""Other names of the kinds of texts, as clients of other services write them."""


def prompt_of(pooling: Pooling, kind: str, param: str = "input_type") -> str | None:
    """Return the prefix that the model puts before texts of a ``kind``, which the field ``param`` names.

    None if the model has no prefixes. Raises InvalidRequest for an unknown kind.
    """
    if not pooling.prompts:
        return None
    for name in (kind, *KINDS.get(kind, ())):
        if name in pooling.prompts:
            return pooling.prompts[name]
    raise InvalidRequest(f"{param} must be one of {', '.join(pooling.prompts)}, got {kind!r}", param=param)


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of an embedding and how many there are, as vLLM's examples do."""
    shown = [*embeds[:4]] if len(embeds) > 4 else [*embeds]
    sys.stdout.write(f"{prefix}: {str(shown)[:-1] + ', ...]' if len(embeds) > 4 else shown} (size={len(embeds)})\n")
