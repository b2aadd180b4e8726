"""The keys of runnable programs: what an item of the plan stands for, and what a step says that it ran.

A forward program's key is its `Bucket`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from preheat.core import SamplingParams
from preheat.plan.buckets import Bucket


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


@dataclass(frozen=True, slots=True)
class SamplerProgram:
    """Logits of ``rows`` positions, and one token from each."""

    rows: int
    level: Level

    def __str__(self) -> str:
        return f"(sampler, {self.rows}, {self.level.name.lower()})"


@dataclass(frozen=True, slots=True)
class SwapProgram:
    """``pairs`` pairs of blocks change places, padding included."""

    pairs: int

    def __str__(self) -> str:
        return f"(swap, {self.pairs})"


Program = Bucket | SamplerProgram | SwapProgram
