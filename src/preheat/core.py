"""What the parts of the engine hand to each other: one class for each hop of a request's life.

``Request`` (frontend to loop) -> ``Schedule`` (scheduler to packer) -> ``Batch`` (packer to executor; it holds tensors
and so lives in :mod:`preheat.execution`) -> ``StepResult`` (executor to scheduler) -> ``Delta`` (loop to frontend).

Everything that crosses a process is a :class:`msgspec.Struct`, so that it travels as msgpack and never as pickle.
Nothing here imports torch, or any module of preheat but the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec
import numpy as np

from preheat.errors import WireError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 1024

OWN_ID = -2
"""The first id of dummy requests, counted downwards: clients' ids are positive, and -1 is the sampler's empty row."""


class SamplingField(NamedTuple):
    """What is known of a sampling parameter beside its name, type and default.

    ``acts`` says where it takes effect: in the sampler, in the scheduler, in the frontend (before the engine sees the
    request) or on the text. Numbers lie between ``low`` and ``high``, both included. ``recommended`` is the key of
    generation_config.json that may replace the default. ``http``: both completion endpoints accept it by this name.
    """

    help: str
    acts: Literal["sampler", "scheduler", "frontend", "text"]
    low: float | None = None
    high: float | None = None
    recommended: str | None = None
    http: bool = True


_INT32 = 2**31 - 1
_Row = SamplingField


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How the tokens of one request are chosen; names and meanings are those of vLLM and of the OpenAI API.

    This is the one table of sampling parameters: the command line, the HTTP bodies, the range checks and the OpenAPI
    document are made from it. ``seed`` None draws one per request. ``max_tokens`` None means "up to the model's
    length". ``logprobs`` / ``prompt_logprobs`` ask for that many alternatives per position (0: the chosen token alone).
    Raises ValueError, saying what to change, for a value outside its range.
    """

    n: Annotated[int, _Row("choices for each prompt", "frontend", 1, 128)] = 1
    temperature: Annotated[float, _Row("0 is greedy", "sampler", 0, 100, "temperature")] = 1.0
    top_p: Annotated[float, _Row("keep the most likely tokens up to this share", "sampler", 0, 1, "top_p")] = 1.0
    top_k: Annotated[int, _Row("keep this many tokens; 0 or -1 keeps all", "sampler", -1, _INT32, "top_k")] = 0
    min_p: Annotated[float, _Row("drop tokens below this share of the top one's", "sampler", 0, 1, "min_p")] = 0.0
    presence_penalty: Annotated[float, _Row("subtracted for each token generated", "sampler", -2, 2)] = 0.0
    frequency_penalty: Annotated[float, _Row("subtracted each time a token was generated", "sampler", -2, 2)] = 0.0
    repetition_penalty: Annotated[
        float,
        _Row("divides positive logits of seen tokens, multiplies others", "sampler", 0, 100, "repetition_penalty"),
    ] = 1.0
    logit_bias: Annotated[dict[int, float] | None, _Row('added to logits, as JSON: {"42": -5}', "sampler")] = None
    seed: Annotated[
        int | None, _Row("the same seed gives the same tokens; by default one is drawn", "sampler", -(2**63), 2**64 - 1)
    ] = None
    stop: Annotated[list[str] | str | None, _Row("strings that end the text", "text")] = None
    stop_token_ids: Annotated[list[int] | None, _Row("tokens that end the text", "sampler")] = None
    include_stop_str_in_output: Annotated[bool, _Row("keep the stop string", "text")] = False
    ignore_eos: Annotated[bool, _Row("go on after the end-of-sequence token", "frontend")] = False
    min_tokens: Annotated[int, _Row("tokens before anything may end the text", "sampler", 0, _INT32)] = 0
    max_tokens: Annotated[int | None, _Row("most tokens to generate", "scheduler", 1, _INT32, "max_new_tokens")] = 16
    logprobs: Annotated[int | None, _Row("alternatives for each token", "sampler", 0, _INT32, http=False)] = None
    prompt_logprobs: Annotated[int | None, _Row("alternatives for each prompt token", "sampler", 0, _INT32)] = None
    skip_special_tokens: Annotated[bool, _Row("leave special tokens out of the text", "text")] = True
    detokenize: Annotated[bool, _Row("turn tokens into text", "text", http=False)] = True

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
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


SAMPLING_FIELDS: Mapping[str, SamplingField] = MappingProxyType(
    {name: hint.__metadata__[0] for name, hint in get_type_hints(SamplingParams, include_extras=True).items()}
)
"""The rows of the table by name, in order."""

_RANGES = tuple(
    (name, field.low, field.high)
    for name, field in SAMPLING_FIELDS.items()
    if field.low is not None and field.high is not None
)


class Level(IntEnum):
    """How much of the sampler a step runs. A row's token is the same at every level that it may run at."""

    GREEDY = 0  # argmax alone
    FILTERED = 1  # some row draws at random
    FULL = 2  # some row has its logits changed first: penalties, logit_bias, min_tokens

    @classmethod
    def of(cls, params: SamplingParams) -> Level:
        """The lowest level that rows with ``params`` can run at."""
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        if penalised or params.logit_bias or params.min_tokens:
            return cls.FULL
        return cls.GREEDY if params.greedy else cls.FILTERED


class Request(msgspec.Struct, tag="request"):
    """One sequence to run (a client's request with ``n`` choices becomes ``n`` of these); everything is resolved.

    ``id`` is unique for a frontend and orders arrivals. ``seed`` is in [0, 2**64). ``max_tokens`` is what
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
    """Stop this sequence and free its blocks: the client left, or a stop string was found in its text."""

    id: int


class Drain(msgspec.Struct, tag="drain"):
    """Finish what is running, then exit; ``now``: exit at once."""

    now: bool = False


class Ask(msgspec.Struct, tag="ask"):
    """The frontend asks for a Report."""


class Finish(msgspec.Struct, array_like=True):
    """Why a sequence ended. ``stop_id`` is the stop token that ended it; ``error`` is set for reason "error"."""

    reason: FinishReason
    stop_id: int | None = None
    error: WireError | None = None


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
    """How far the engine's start is: ``done`` items of ``total``; ``eta_s`` is None while it cannot be estimated."""

    done: int
    total: int
    current: str
    eta_s: float | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine can run, within these limits. ``record`` is the warm-up's record, as JSON.

    ``blocked_reason`` says why it takes no requests all the same: a check at boot found its answers to be unreliable.
    ``max_prompt_len`` is the longest prompt that it can read, None where only ``max_model_len`` bounds it.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    seconds: float
    record: bytes = b""
    blocked_reason: str = ""
    max_prompt_len: int | None = None


class Report(msgspec.Struct, tag="report"):
    """The answer to Ask: the current record, as JSON."""

    record: bytes


class Died(msgspec.Struct, tag="died"):
    """The engine's last message: it cannot go on. ``message`` says why, in one line."""

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
