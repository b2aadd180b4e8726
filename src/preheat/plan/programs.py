"""The keys of runnable programs: what an item of the plan stands for, and what a step says that it ran.

A forward program's key is its `Bucket`.
"""

from __future__ import annotations

from typing import NamedTuple

from preheat.core import Level
from preheat.plan.buckets import Bucket


class SamplerProgram(NamedTuple):
    """Logits of ``rows`` positions, and one token from each."""

    rows: int
    level: Level

    def __str__(self) -> str:
        return f"(sampler, {self.rows}, {self.level.name.lower()})"


class SwapProgram(NamedTuple):
    """``pairs`` pairs of blocks change places, padding included."""

    pairs: int

    def __str__(self) -> str:
        return f"(swap, {self.pairs})"


Program = Bucket | SamplerProgram | SwapProgram
