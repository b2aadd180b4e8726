"""The result of a request, finished or not; names and fields are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import numpy as np

if TYPE_CHECKING:
    from preheat.frontend.adapters import LoRARequest
    from preheat.frontend.receipt import Proof, Receipt


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability; ``rank`` counts from 1; ``decoded_token`` is its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> its logprob at one position: the chosen token first, then the most likely ones in order."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``finish_reason`` is "stop", "length", "abort", or None while it runs.

    A stop token is in ``token_ids``, not in ``text``. ``stop_reason`` is the stop string or the stop token's id; None
    for the model's own end of sequence. ``routed_experts`` and ``kv_transfer_params`` are always None here. A choice
    that has ended has a ``receipt`` if the request asks for one.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    routed_experts: np.ndarray | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = field(default=None, compare=False)
    kv_transfer_params: dict[str, Any] | None = None
    proof: Proof | None = field(default=None, compare=False, repr=False)  # becomes the receipt

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of a choice that has ended, made at its first reading."""
        return None if self.proof is None else self.proof.receipt

    def finished(self) -> bool:
        """Say whether the choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """Times of a request's events, and its number of tokens; names are vLLM's.

    ``arrival_time`` is in seconds since 1970; all other times are from ``time.monotonic``. 0: not yet.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that a beam search found.

    ``tokens`` and ``text`` begin with the prompt; ``logprobs`` cover only the answer. ``finish_reason`` is "stop" for
    an end of sequence, which is in ``tokens``, else "length".
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = field(default=None, compare=False)


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences after one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class PoolingOutput:
    """The pooled vector of a prompt: fp32 [dimensions]; vLLM has a torch tensor (``torch.from_numpy`` makes one)."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """Make an embedding of a prompt's pooled vector."""
        return cls(pooled.data.tolist())

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The numbers of a prompt's classes, behind the model's activation: mostly probabilities."""

    probs: list[float]

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """Make probabilities of a prompt's pooled vector."""
        return cls(pooled.data.tolist())

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit: a cross-encoder's number, or the cosine of their embeddings, -1 to 1."""

    score: float

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """Make a score of a single number."""
        return cls(float(pooled.data.item()))


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """One prompt and its pooled output; for a score, both prompts, one after the other."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class _OfPooled(PoolingRequestOutput[Pooled]):
    __slots__ = ()
    _kind: ClassVar[Any]

    @classmethod
    def from_base(cls, pooled: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Make the result from the same prompt's pooled output."""
        names = ("request_id", "prompt_token_ids", "finished", "num_cached_tokens")
        return cls(outputs=cls._kind.from_base(pooled.outputs), **{name: getattr(pooled, name) for name in names})


class EmbeddingRequestOutput(_OfPooled[EmbeddingOutput]):
    """A prompt and its embedding."""

    __slots__ = ()
    _kind = EmbeddingOutput


class ClassificationRequestOutput(_OfPooled[ClassificationOutput]):
    """A prompt and the probabilities of its classes."""

    __slots__ = ()
    _kind = ClassificationOutput


class ScoringRequestOutput(_OfPooled[ScoringOutput]):
    """Two prompts and how alike they are."""

    __slots__ = ()
    _kind = ScoringOutput


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices, in order.

    ``prompt_logprobs[0]`` is None, since nothing precedes the first token. Fields that only encoders and transfers of a
    KV cache fill are None, as in vLLM. Equality ignores ``metrics`` and ``lora_request``, so two results of the same
    request are equal.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestStateStats | None = field(default=None, compare=False)
    lora_request: LoRARequest | None = field(default=None, compare=False)
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
