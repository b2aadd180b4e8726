"""The size of a step, and its bucket.

A step is padded to its bucket, the size of one forward program.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["prompt", "decode", "mixed", "verify"]


class StepSize(NamedTuple):
    """The size of a step.

    ``longest`` is the length of its longest row: the computed tokens of a prompt row or of a row with drafts, the whole
    context of a decode row. ``blocks`` counts KV blocks, summed over rows. Fields without use in the policy may be 0.
    """

    phase: Phase
    rows: int
    tokens: int = 0
    longest: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        return str(Bucket(*self))


class Bucket(NamedTuple):
    """The padded size of a step.

    ``tokens`` is always the padded tokens of the step; ``longest`` and ``blocks`` are 0 where they are not part of the
    program. Make one with `prompt`, `decode`, `mixed` or `verify`.
    """

    phase: Phase
    rows: int
    tokens: int
    longest: int = 0
    blocks: int = 0

    @classmethod
    def prompt(cls, rows: int, longest: int) -> Bucket:
        """Return the bucket of ``rows`` prompts of ``longest`` tokens each."""
        return cls("prompt", rows, rows * longest, longest)

    @classmethod
    def decode(cls, rows: int, *, longest: int = 0, blocks: int = 0) -> Bucket:
        """Return the bucket of one token for each of ``rows``.

        At most one of ``longest`` and ``blocks`` may be given.
        """
        return cls("decode", rows, rows, longest, blocks)

    @classmethod
    def mixed(cls, tokens: int, rows: int) -> Bucket:
        """Return the bucket of ``tokens`` in one flat batch, from at most ``rows`` rows."""
        return cls("mixed", rows, tokens)

    @classmethod
    def verify(cls, rows: int, width: int) -> Bucket:
        """Return the bucket of ``rows`` sampled rows of up to ``width`` tokens.

        Each row is its last known token and the drafts behind it.
        """
        return cls("verify", rows, rows * width, width)

    @property
    def width(self) -> int:
        """The most tokens of a row where all rows decode.

        It is 1, or more with drafts; 0 where rows may read prompts.
        """
        return {"decode": 1, "verify": self.longest}.get(self.phase, 0)

    @property
    def dims(self) -> tuple[int, ...]:
        """The numbers that identify the bucket within its phase.

        They are in the order of the log lines.
        """
        if self.phase == "mixed":
            return (self.tokens, self.rows)
        second = self.longest or self.blocks
        return (self.rows, second) if second else (self.rows,)

    def named_dims(self) -> dict[str, int]:
        """Return `dims` with their names, for JSON."""
        if self.phase == "mixed":
            return {"tokens": self.tokens, "rows": self.rows}
        named = {"rows": self.rows, "longest": self.longest, "blocks": self.blocks}
        return {name: value for name, value in named.items() if value}

    def without_context(self) -> Bucket:
        """Return the bucket for programs that do not depend on contexts.

        A decode bucket becomes its rows alone.
        """
        return Bucket.decode(self.rows) if self.phase == "decode" else self

    def holds(self, size: StepSize) -> bool:
        """Return whether a step of ``size`` can run in this bucket.

        A mixed bucket holds steps of any phase. Any other bucket only holds steps of its own phase.
        """
        if size.rows > self.rows or size.tokens > self.tokens:
            return False
        if self.phase == "mixed":
            return True
        if size.phase != self.phase or (self.blocks and size.blocks > self.blocks):
            return False
        return not self.longest or size.longest <= self.longest

    def __str__(self) -> str:
        return f"({', '.join(map(str, (self.phase, *self.dims)))})"


def padded_work(bucket: Bucket) -> int:
    """Return the cost of a bucket relative to other buckets of its phase.

    A decode step reads its context: a rectangle if padded by length, a sum if padded by blocks.
    """
    if bucket.phase == "decode":
        return bucket.rows * bucket.longest if bucket.longest else bucket.rows + bucket.blocks
    return bucket.tokens
