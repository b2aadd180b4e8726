"""The result of a request, finished or not; names and fields are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


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
class RequestOutput:
    """One prompt and its choices, in order. ``prompt_logprobs[0]`` is None, since nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
