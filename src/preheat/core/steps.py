"""One step: its rows, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from preheat.core.reports import TokenLogprobs
from preheat.core.requests import Image

Transfer = Literal["load", "store"]
"""A copy of a block: "load" to the device, "store" to the host."""


NO_PERSISTENT_BATCH = 0  # of a step that shares its rows with no other step


class ImageSpan(NamedTuple):
    """The tokens of ``row`` at the positions from ``first`` up to ``last``.

    Their embeddings are the kept embeddings of images from index ``source`` on.
    """

    row: int
    first: int
    last: int
    source: int


@dataclass(slots=True)
class StepImages:
    """The images that a step encodes, and the tokens that stand for images.

    Each image to encode comes with its index in the kept embeddings.
    """

    encode: list[tuple[int, Image]]
    spans: list[ImageSpan]


class StepStates(NamedTuple):
    """The state slots that the rows of a step read and write, in parts: int64 [parts] each.

    A part is ``extend`` tokens of a ``row``, behind the row's earlier parts. It reads the state in slot ``read``, and
    leaves the state behind its tokens in slot ``write``.
    """

    row: np.ndarray
    extend: np.ndarray
    read: np.ndarray
    write: np.ndarray


def own_states(slots: np.ndarray, extend: np.ndarray) -> StepStates:
    """Return the parts of rows that each read and write the state slot of their own.

    Row i computes ``extend[i]`` tokens of the sequence in ``slots[i]``. State slot 0 is for padding.
    """
    own = slots.astype(np.int64) + 1
    return StepStates(np.arange(len(slots)), extend.astype(np.int64), own, own)


class Plain(NamedTuple):
    """The facts of steps of decoding rows that change in nothing but a token each, until one of ``stop_ids`` is drawn.

    ``changes`` is the counter of the running sequences. If it differs when results come, some rows have ended.
    """

    changes: int
    stop_ids: frozenset[int]


@dataclass(slots=True)
class Schedule:
    """The rows of one step.

    Row i computes ``extend[i]`` tokens of the sequence in ``slots[i]``, from position ``first[i]`` on. It samples a
    token after each of the last ``num_sampled[i]`` of them. That number is 0 if more of the prompt follows, k + 1 if
    the row ends with k draft tokens, otherwise 1.

    Decode rows come first, rows with drafts last. The arrays describe the moment of scheduling; the slots may have
    moved on. Steps with the same ``persistent_batch`` number have the same decode rows, one token further in each step.
    So they can share data that depends only on the rows.
    """

    slots: np.ndarray  # int64 [rows]
    first: np.ndarray  # int32 [rows]
    extend: np.ndarray  # int32 [rows], at least 1
    num_sampled: np.ndarray  # int32 [rows]
    num_decode: int  # rows at the front with extend == num_sampled == 1
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [rows] of requests; empty in dummy batches
    started: dict[int, int] = field(default_factory=dict)  # request id -> tokens found in the prefix cache
    persistent_batch: int = NO_PERSISTENT_BATCH
    num_drafted: int = 0  # rows at the end with drafts
    images: StepImages | None = None  # None: no token of the step stands for an image
    loads: list[tuple[int, Any]] = field(default_factory=list)  # adapters to load before the step, each with its slot
    transfers: tuple[Transfer, ...] = ()  # copies between host and device before it
    states: StepStates | None = None  # None: each row reads and writes its own state slot, if layers have states
    plain: Plain | None = None  # None: more than a token of each row may change
    ends: np.ndarray = field(init=False)  # int32 [rows], the position after each row's last token
    rows: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.ends, self.rows = self.first + self.extend, len(self.slots)
        self.tokens = self.rows if self.num_decode == self.rows else int(self.extend.sum())

    @property
    def samples(self) -> np.ndarray:
        """Whether each row samples at all: bool [rows]."""
        return self.num_sampled > 0

    @property
    def has_drafts(self) -> bool:
        """Whether any row has draft tokens; if so, the last row has."""
        return self.rows > 0 and bool(self.num_sampled[-1] > 1)

    @property
    def verifies(self) -> bool:
        """Whether all rows decode, and some of them end with drafts."""
        return self.num_drafted > 0 and self.num_decode + self.num_drafted == self.rows

    @property
    def total_sampled(self) -> int:
        """Number of tokens that the step samples."""
        return self.rows if self.num_decode == self.rows else int(self.num_sampled.sum())

    def sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return row and position, int [total_sampled] each, of every sampled token, in row order."""
        if not self.has_drafts:
            rows = self.num_sampled.nonzero()[0]
            return rows, self.ends[rows]
        rows = np.arange(self.rows).repeat(self.num_sampled)
        # Sampled tokens left in the row, including this one.
        left = self.num_sampled.cumsum()[rows] - np.arange(len(rows))
        return rows, self.ends[rows] + 1 - left


@dataclass(slots=True)
class Swaps:
    """Block swaps to do before the next step: ``pairs`` int32 [n, 2].

    ``pairs`` is padded to ``size`` by pairs of the pad block with itself. No id occurs in two different pairs.
    """

    pairs: np.ndarray
    size: int


@dataclass(slots=True)
class StepResult:
    """The results of the device for one step.

    ``tokens`` has the sampled tokens in row order, marked by :func:`marked`.

    ``logprobs`` maps an index in ``tokens`` to that token's alternatives. ``prompt_logprobs`` maps a row to one entry
    for each computed token with a successor in the prompt. The entry is the successor's logprob, NaN where the logits
    are not finite.
    """

    tokens: np.ndarray  # int32 [total_sampled]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    hidden: dict[int, np.ndarray] | None = None  # of a pooling engine: by row, fp32 [tokens, hidden]
    summed: dict[int, int] | None = None  # by row, the tokens of which ``hidden`` has the sum, [1, hidden]
    digests: np.ndarray | None = None  # int64 [total_sampled], of the logits behind each token; None: nobody wants any


def marked(tokens: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """Mark ``tokens`` [n] from logits that are not ``finite``.

    A marked token is its complement, below zero.
    """
    return np.where(finite, tokens, ~tokens)


def unmarked(tokens: np.ndarray) -> np.ndarray:
    """Return the tokens before :func:`marked`."""
    return np.where(tokens < 0, ~tokens, tokens)
