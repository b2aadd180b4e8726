"""The keys of programs: what an executor runs, as a graph where one was captured."""

from __future__ import annotations

from typing import NamedTuple, Self

from preheat.ops.sampling import Level
from preheat.plan.buckets import Bucket
from preheat.plan.items import SAMPLER_SETTINGS, SamplerKey, level


class Part(NamedTuple):
    """The program of some ``layers`` of a forward step of ``bucket``. The first part begins with the tokens, any other
    where the one before it ended.
    """

    bucket: Bucket
    layers: range


class SampleKey(NamedTuple):
    """The program that draws for ``size`` rows."""

    size: int
    level: Level

    @classmethod
    def of(cls, key: SamplerKey) -> Self:
        """What an item of the plan runs."""
        return cls(key.rows, Level[level(SAMPLER_SETTINGS[key.setting]).upper()])
