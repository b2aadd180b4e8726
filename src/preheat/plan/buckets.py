"""The size of a step, and the bucket that it is padded to: the key of one forward program."""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["prompt", "decode", "mixed"]


class StepSize(NamedTuple):
    """What one step requires. ``longest`` is the length of its longest row: the tokens that a prompt row computes, the
    whole context of a decode row. ``blocks`` counts KV blocks, summed over rows. Fields that the policy's phases do
    not look at may stay 0.
    """

    phase: Phase
    rows: int
    tokens: int = 0
    longest: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        return _describe(self.phase, self.rows, self.tokens, self.longest, self.blocks)


class Bucket(NamedTuple):
    """What a step is padded to. ``tokens`` is always the padded tokens of the step; ``longest`` and ``blocks`` are 0
    where they are not part of the program. Make one with `prompt`, `decode` or `mixed`.
    """

    phase: Phase
    rows: int
    tokens: int
    longest: int = 0
    blocks: int = 0

    @classmethod
    def prompt(cls, rows: int, longest: int) -> Bucket:
        """``rows`` prompts of ``longest`` tokens each."""
        return cls("prompt", rows, rows * longest, longest)

    @classmethod
    def decode(cls, rows: int, *, longest: int = 0, blocks: int = 0) -> Bucket:
        """One token for each of ``rows``; at most one of the context's two measures belongs to the key."""
        return cls("decode", rows, rows, longest, blocks)

    @classmethod
    def mixed(cls, tokens: int, rows: int) -> Bucket:
        """``tokens`` in one flat batch, from at most ``rows`` rows."""
        return cls("mixed", rows, tokens)

    @property
    def dims(self) -> tuple[int, ...]:
        """The numbers that identify the bucket within its phase, in the order of the log lines."""
        if self.phase == "mixed":
            return (self.tokens, self.rows)
        second = self.longest or self.blocks
        return (self.rows, second) if second else (self.rows,)

    def named_dims(self) -> dict[str, int]:
        """`dims` with their names, for JSON."""
        if self.phase == "mixed":
            return {"tokens": self.tokens, "rows": self.rows}
        named = {"rows": self.rows, "longest": self.longest, "blocks": self.blocks}
        return {name: value for name, value in named.items() if value}

    def holds(self, size: StepSize) -> bool:
        """Whether a step of ``size`` can run in this bucket. A flat bucket holds steps of any phase; a rectangle
        (``prompt``) or one token a row (``decode``) only those of its own phase.
        """
        if size.rows > self.rows or size.tokens > self.tokens:
            return False
        if self.phase == "mixed":
            return True
        if size.phase != self.phase or (self.blocks and size.blocks > self.blocks):
            return False
        return not self.longest or size.longest <= self.longest

    def __str__(self) -> str:
        return _describe(self.phase, self.rows, self.tokens, self.longest, self.blocks)


def padded_work(bucket: Bucket) -> int:
    """How much a bucket costs beside others of its phase, in tokens of work.

    A decode step reads its context: by length it is a rectangle, by blocks a sum.
    """
    if bucket.phase == "decode":
        return bucket.rows * bucket.longest if bucket.longest else bucket.rows + bucket.blocks
    return bucket.tokens


def _describe(phase: Phase, rows: int, tokens: int, longest: int, blocks: int) -> str:
    if phase == "mixed":
        return f"(mixed, {tokens}, {rows})"
    second = longest if phase == "prompt" else longest or blocks
    return f"({phase}, {rows}, {second})" if second else f"({phase}, {rows})"
