"""The figures of a server and of its engines, as plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from preheat.core import AuditStats, GrammarStats, Stats


class Histogram:
    """Numbers of values in each bucket, and the sum of all values.

    ``/metrics`` shows ``name`` and ``text``.
    """

    __slots__ = ("bounds", "counts", "name", "text", "total")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return pairs (upper bound, number of values up to it), the form of Prometheus."""
        reached, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            reached += count
            buckets.append((bound, float(reached)))
        return buckets


@dataclass(slots=True)
class Times:
    """Times of a sequence's events, by ``time.monotonic``; 0 means not yet."""

    arrived: float = 0.0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class EngineFigures:
    """Figures of one engine.

    ``items`` (by outcome), ``cold`` (by source), ``misses`` and ``warmup_seconds`` come from its last record.
    """

    stats: Stats = field(default_factory=Stats)
    grammars: GrammarStats = field(default_factory=GrammarStats)
    audit: AuditStats | None = None
    items: Mapping[str, int] = field(default_factory=dict)
    cold: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0
    warmup_seconds: float = 0.0


class LogFigures(Protocol):
    """Counts of a log of receipts."""

    written: int
    lost: int


@dataclass(slots=True)
class AnswerCacheFigures:
    """Figures of the answer cache: requests by what became of them, and the bytes that it holds."""

    hits: int = 0
    misses: int = 0
    checked: int = 0
    different: int = 0
    bytes: int = 0
