"""The types that cross a border, one for each hop of a request's life.

``Request`` (frontend to loop) -> ``Schedule`` (scheduler to packer) -> ``Batch`` (packer to executor; it holds tensors
and so lives in :mod:`preheat.execution`) -> ``StepResult`` (executor to scheduler) -> ``Delta`` (loop to frontend).

Everything that crosses a process is a :class:`msgspec.Struct`, so that it travels as msgpack and never as pickle.
Nothing here imports torch or any other module of preheat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 1024

OWN_ID = -2
"""The first id of preheat's own dummy requests, counted downwards: never a client's id, nor the sampler's -1."""


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How the tokens of one request are chosen; names and meanings are those of vLLM and of the OpenAI API.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``seed`` None draws one per request. ``max_tokens`` None
    means "up to the model's length". ``logprobs`` / ``prompt_logprobs`` ask for that many alternatives per position
    (0: the chosen token alone). Without ``detokenize`` no text is made. Raises ValueError, saying what to change, for
    a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, low, high in RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails every comparison, so it is refused too
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if self.top_p <= 0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if any(not s for s in self.stop_strings):
            raise ValueError("stop must not contain an empty string")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings are found in text: set detokenize to true, or use stop_token_ids")
        if len(self.logit_bias or ()) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias or ())} entries, at most {MAX_LOGIT_BIAS} are allowed"
            )
        for bias in (self.logit_bias or {}).values():
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias values must be between -100 and 100, got {bias}")

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list, whatever form it was given in."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_INT32 = 2**31 - 1
RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", -1, _INT32),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0, 100),
    ("seed", -(2**63), 2**64 - 1),
    ("min_tokens", 0, _INT32),
    ("max_tokens", 1, _INT32),
    ("logprobs", 0, _INT32),
    ("prompt_logprobs", 0, _INT32),
)


class Request(msgspec.Struct, tag="request"):
    """One sequence to run (a client's request with ``n`` choices becomes ``n`` of these); everything is resolved.

    ``id`` is unique in a front door's life and orders arrivals. ``seed`` is in [0, 2**64). ``max_tokens`` is what
    may still be generated within the model's length. ``stop_ids`` end the sequence once ``min_tokens`` are out (the
    end-of-sequence ids, unless ``ignore_eos``, and ``stop_token_ids``); at most ``MAX_STOP_IDS``.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    choice: int = 0
    stop_ids: list[int] = []
    cache_salt: str = ""  # part of every block's hash, as an adapter or an image will be


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop this sequence and free what it holds: the client left, or a stop string was found in its text."""

    id: int


class Drain(msgspec.Struct, tag="drain"):
    """Finish what is running, then leave; ``now`` leaves at once."""

    now: bool = False


class Ask(msgspec.Struct, tag="ask"):
    """The front door wants a Report."""


class Finish(msgspec.Struct, array_like=True):
    """Why a sequence ended. ``stop_id`` is the stop token that did it; ``message`` is set for reason "error"."""

    reason: FinishReason
    stop_id: int | None = None
    message: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural logarithms of the model's own distribution (before penalties and temperature) at one position.

    ``rank`` counts from 1. ``top`` holds the most likely tokens in order, ties to the lowest id.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, tag="delta"):
    """What one step changed: token ``tokens[i]`` for sequence ``ids[i]`` (an id occurs k times for k tokens).

    A stop token that ended a sequence is in ``tokens`` as well. ``logprobs`` is by place i, ``finished`` and
    ``prompt_logprobs`` are by id. ``started`` gives the tokens read from the prefix cache for each sequence that began
    to run in this step.
    """

    ids: list[int] = []
    tokens: list[int] = []
    finished: dict[int, Finish] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    started: dict[int, int] = {}
    stats: Stats | None = None


class Stats(msgspec.Struct, tag="stats"):
    """Counters (since start) and gauges of the engine, for ``/metrics``."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    blocks_moved: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Progress(msgspec.Struct, tag="progress"):
    """How far the engine's start is: ``done`` items of ``total``; ``eta_s`` is None while nobody can tell."""

    done: int
    total: int
    current: str
    eta_s: float | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine can run, within these limits. ``record`` is what became of the plan, as JSON.

    ``held`` says why it must take no requests all the same: the check at boot failed.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    seconds: float
    record: bytes = b""
    held: str = ""


class Report(msgspec.Struct, tag="report"):
    """The answer to Ask: the record as it is now, as JSON."""

    record: bytes


class Died(msgspec.Struct, tag="died"):
    """The engine's last message when it cannot go on; ``message`` says why, in one line."""

    message: str


ToEngine = Request | Cancel | Drain | Ask
FromEngine = Delta | Progress | Ready | Report | Died


NO_PERSISTENT_BATCH = 0
"""``Schedule.persistent_batch`` of a step that shares its rows with no other step."""


@dataclass(slots=True)
class Schedule:
    """The rows of one step. Row i computes ``extend[i]`` tokens of the sequence in ``slots[i]``, from position
    ``first[i]`` on, and samples a token after each of the last ``num_sampled[i]`` of them: none if more of the prompt
    follows, k + 1 if the row ends with k draft tokens, otherwise one.

    Decoding rows come first, rows with drafts last. The arrays describe the moment of scheduling; the slots may be
    ahead of them. Steps with the same ``persistent_batch`` number have the same decoding rows, each one token further
    in every step, so what depends only on the rows can be reused between them.
    """

    slots: np.ndarray  # int64 [rows]
    first: np.ndarray  # int32 [rows]
    extend: np.ndarray  # int32 [rows], at least 1
    num_sampled: np.ndarray  # int32 [rows]
    num_decode: int  # rows at the front with extend == num_sampled == 1
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [rows] of requests; empty in dummy batches
    started: dict[int, int] = field(default_factory=dict)  # request id -> tokens found in the prefix cache
    persistent_batch: int = NO_PERSISTENT_BATCH
    ends: np.ndarray = field(init=False)  # int32 [rows], the position after each row's last token

    def __post_init__(self) -> None:
        self.ends = self.first + self.extend

    @property
    def rows(self) -> int:
        return len(self.slots)

    @property
    def tokens(self) -> int:
        return self.rows if self.num_decode == self.rows else int(self.extend.sum())

    @property
    def samples(self) -> np.ndarray:
        """bool [rows]: whether the row samples at all."""
        return self.num_sampled > 0

    @property
    def has_drafts(self) -> bool:
        """Whether some row, which is then the last, has draft tokens."""
        return self.rows > 0 and bool(self.num_sampled[-1] > 1)

    @property
    def total_sampled(self) -> int:
        """The tokens that the step samples."""
        return self.rows if self.num_decode == self.rows else int(self.num_sampled.sum())

    def sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and position, int [total_sampled] each, of every token that the step samples, in row order."""
        if not self.has_drafts:
            rows = self.num_sampled.nonzero()[0]
            return rows, self.ends[rows]
        rows = np.arange(self.rows).repeat(self.num_sampled)
        left = self.num_sampled.cumsum()[rows] - np.arange(len(rows))  # of the row, this token included
        return rows, self.ends[rows] + 1 - left


@dataclass(slots=True)
class Swaps:
    """Blocks whose contents change places before the next step: ``pairs`` int32 [n, 2], run as ``size`` of them.

    A pair may occur more than once, else no id does; what is missing up to ``size`` is the pad block with itself.
    """

    pairs: np.ndarray
    size: int


@dataclass(slots=True)
class StepResult:
    """What the device computed: ``tokens`` has the tokens sampled by each row, in row order.

    ``logprobs`` maps a place in ``tokens`` to that token's alternatives. ``prompt_logprobs`` maps a row to one entry
    per computed token that has a known successor in the prompt (the successor's logprob, at the successor's position).
    """

    tokens: np.ndarray  # int32 [total_sampled]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
