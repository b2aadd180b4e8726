"""The result of a request, finished or not; names and fields are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np


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
    for the model's own end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that a beam search found. ``tokens`` and ``text`` begin with the prompt; ``logprobs`` are of what
    follows it. ``finish_reason`` is "stop" for an end of sequence, which is in ``tokens``, else "length".
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences after one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class PoolingOutput:
    """What a prompt became: fp32 [dimensions]; a torch tensor in vLLM, from which ``torch.from_numpy`` is a step."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ScoringOutput:
    """How alike two texts are: the cosine of the angle between their embeddings, -1 to 1."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """One prompt, and what it became; of a score both prompts, one after the other."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices, in order. ``prompt_logprobs[0]`` is None, since nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
