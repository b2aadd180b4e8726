"""The steps that can arise within the limits, phase by phase.

The sizes of a phase's steps are points (a, b) on two axes, for example the rows and the longest row of a prompt step.
A region holds the points that the scheduler can produce. The dispatcher is built for exactly these points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from preheat.plan.buckets import Bucket, Phase, StepSize

UNBOUNDED = 2**62
"""A bound on the second axis of a phase without one.

Every step is below it.
"""

Ints = npt.NDArray[np.int64]


class Dimension(NamedTuple):
    """A dimension with bucket sizes.

    It has a name in the settings, such as "prompt_bs", and a label in the log.

    ``by_row``: its bound depends on the rows, so that buckets are bounded one by one and not its range.
    """

    name: str
    label: str
    by_row: bool = False


PROMPT_ROWS, PROMPT_LENGTH = Dimension("prompt_bs", "bs"), Dimension("prompt_seq", "seq")
VERIFY_WIDTH = Dimension("verify_width", "width")
MIXED_TOKENS = Dimension("prompt_seq", "tokens")
DECODE_ROWS = Dimension("decode_bs", "bs")
DECODE_BLOCKS, DECODE_LENGTH = Dimension("decode_block", "block", by_row=True), Dimension("decode_seq", "seq")


class Region(Protocol):
    """The points (a, b), at least 1 each, that a phase's steps take.

    ``axes`` name the fields of StepSize for a and b; ``dimensions`` are the axes with bucket sizes.
    """

    phase: ClassVar[Phase]
    axes: ClassVar[tuple[str, str]]
    dimensions: ClassVar[tuple[Dimension, ...]]

    @property
    def bounds(self) -> tuple[int, int]:
        """The largest a and the largest b."""

    def span(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the first and last a for each i.

        They occur with some b in [low[i], high[i]] (none: last < first).
        """

    def top(self, a: Ints) -> Ints:
        """Return the largest b that occurs with each a."""

    def step_size(self, a: int, b: int) -> StepSize:
        """Return the heaviest step at a point."""

    def bucket(self, a: int, b: int = 0) -> Bucket:
        """Return the bucket of a size on each axis.

        It is cut down to the sizes that a step can need.
        """


@dataclass(frozen=True)
class PromptRegion(Region):
    """Rows (a) and longest row (b) of a prompt step.

    Other rows may be short, so only a + b - 1 tokens are sure.
    """

    max_rows: int
    max_len: int
    budget: int
    phase = "prompt"
    axes = ("rows", "longest")
    dimensions = (PROMPT_ROWS, PROMPT_LENGTH)

    @property
    def bounds(self) -> tuple[int, int]:
        return min(self.max_rows, self.budget), min(self.max_len, self.budget)

    def span(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        last = np.minimum(self.max_rows, self.budget + 1 - low)
        return np.ones_like(low), np.where(low <= self.max_len, last, 0)

    def top(self, a: Ints) -> Ints:
        largest: Ints = np.minimum(self.max_len, self.budget + 1 - a)
        return largest

    def step_size(self, a: int, b: int) -> StepSize:
        return StepSize("prompt", a, min(a * b, self.budget), b)

    def bucket(self, a: int, b: int = 0) -> Bucket:
        rows, longest = self.bounds
        return Bucket.prompt(min(a, rows), min(b, longest))


@dataclass(frozen=True)
class DecodeRegion(Region):
    """Rows (a) alone: the context's length is no part of the program."""

    max_rows: int
    phase = "decode"
    axes = ("rows", "blocks")
    dimensions = (DECODE_ROWS,)

    @property
    def bounds(self) -> tuple[int, int]:
        return self.max_rows, UNBOUNDED

    def span(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        return np.ones_like(low), np.full_like(low, self.max_rows)

    def top(self, a: Ints) -> Ints:
        return np.full_like(a, UNBOUNDED)

    def step_size(self, a: int, b: int) -> StepSize:
        return StepSize("decode", a, a)

    def bucket(self, a: int, b: int = 0) -> Bucket:
        return Bucket.decode(min(a, self.max_rows))


@dataclass(frozen=True)
class DecodeByBlocks(Region):
    """Rows (a) and KV blocks summed over them (b).

    A row has at least one block and at most a sequence's. ``num_blocks`` bounds the sum where no block is shared. A
    shared block counts once for each row, so sharing can exceed the blocks of the cache.
    """

    max_rows: int
    blocks_per_row: int
    num_blocks: int
    phase = "decode"
    axes = ("rows", "blocks")
    dimensions = (DECODE_ROWS, DECODE_BLOCKS)

    @property
    def bounds(self) -> tuple[int, int]:
        return self.max_rows, min(self.max_rows * self.blocks_per_row, self.num_blocks)

    def span(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        first = -(-low // self.blocks_per_row)
        return first, np.where(low <= self.bounds[1], np.minimum(self.bounds[0], high), 0)

    def top(self, a: Ints) -> Ints:
        largest: Ints = np.minimum(a * self.blocks_per_row, self.num_blocks)
        return largest

    def step_size(self, a: int, b: int) -> StepSize:
        return StepSize("decode", a, a, blocks=b)

    def bucket(self, a: int, b: int = 0) -> Bucket:
        rows = min(a, self.max_rows)
        return Bucket.decode(rows, blocks=min(b, rows * self.blocks_per_row, self.num_blocks))


@dataclass(frozen=True)
class DecodeByLength(Region):
    """Rows (a) and the longest row's context in tokens (b).

    Each other row holds at least one block.
    """

    max_rows: int
    max_len: int
    block_size: int
    num_blocks: int
    phase = "decode"
    axes = ("rows", "longest")
    dimensions = (DECODE_ROWS, DECODE_LENGTH)

    @property
    def bounds(self) -> tuple[int, int]:
        return self.max_rows, min(self.max_len, self.num_blocks * self.block_size)

    def span(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        last = np.minimum(self.max_rows, self.num_blocks + 1 + -low // self.block_size)
        return np.ones_like(low), np.where(low <= self.max_len, last, 0)

    def top(self, a: Ints) -> Ints:
        largest: Ints = np.minimum(self.max_len, (self.num_blocks + 1 - a) * self.block_size)
        return largest

    def step_size(self, a: int, b: int) -> StepSize:
        return StepSize("decode", a, a, longest=b)

    def bucket(self, a: int, b: int = 0) -> Bucket:
        rows, longest = self.bounds
        return Bucket.decode(min(a, rows), longest=min(b, longest))


@dataclass(frozen=True)
class MixedRegion(Region):
    """Tokens (a) and rows (b) of a flat step.

    A row has at least one token and at most a sequence's length. Rows only size index arrays, so every bucket has room
    for all rows.
    """

    max_tokens: int
    max_rows: int
    max_len: int
    phase = "mixed"
    axes = ("tokens", "rows")
    dimensions = (MIXED_TOKENS,)

    @property
    def bounds(self) -> tuple[int, int]:
        rows = min(self.max_rows, self.max_tokens)
        return min(self.max_tokens, rows * self.max_len), rows

    def span(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        rows = np.minimum(high, self.bounds[1])
        return low, np.where(low <= self.bounds[1], np.minimum(self.max_tokens, rows * self.max_len), 0)

    def top(self, a: Ints) -> Ints:
        largest: Ints = np.minimum(self.bounds[1], a)
        return largest

    def step_size(self, a: int, b: int) -> StepSize:
        return StepSize("mixed", b, a)

    def bucket(self, a: int, b: int = 0) -> Bucket:
        tokens, rows = self.bounds
        return Bucket.mixed(min(a, tokens), rows)


@dataclass(frozen=True)
class VerifyRegion(Region):
    """Rows (a) and the tokens of the longest one (b), drafts included.

    The scheduler drafts no more than some width of ``widths`` for which all rows fit the budget.
    """

    max_rows: int
    widths: tuple[int, ...]
    budget: int
    phase = "verify"
    axes = ("rows", "longest")
    dimensions = (DECODE_ROWS, VERIFY_WIDTH)

    @property
    def bounds(self) -> tuple[int, int]:
        return min(self.max_rows, self.budget // self.widths[0]), self.widths[-1]

    def span(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        widths = np.array(self.widths)
        padded = widths[np.minimum(np.searchsorted(widths, low), len(widths) - 1)]
        rows = np.where(low <= widths[-1], np.minimum(self.bounds[0], self.budget // padded), 0)
        return np.ones_like(low), rows

    def top(self, a: Ints) -> Ints:
        fits = np.searchsorted(np.array(self.widths), self.budget // np.maximum(a, 1), side="right")
        largest: Ints = np.array(self.widths)[np.maximum(fits - 1, 0)]
        return largest

    def step_size(self, a: int, b: int) -> StepSize:
        return StepSize("verify", a, a * b, b)

    def bucket(self, a: int, b: int = 0) -> Bucket:
        return Bucket.verify(min(a, self.bounds[0], self.budget // b), b)
