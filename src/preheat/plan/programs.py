"""The keys of runnable programs. A forward program's key is its `Bucket`."""

from __future__ import annotations

from typing import NamedTuple

from preheat.core import Level
from preheat.plan.buckets import Bucket


class SamplerProgram(NamedTuple):
    """Computes the logits of ``rows`` positions and draws one token from each."""

    rows: int
    level: Level

    def __str__(self) -> str:
        return f"(sampler, {self.rows}, {self.level.name.lower()})"


class SwapProgram(NamedTuple):
    """Swaps ``pairs`` pairs of blocks, padding included."""

    pairs: int

    def __str__(self) -> str:
        return f"(swap, {self.pairs})"


Program = Bucket | SamplerProgram | SwapProgram
