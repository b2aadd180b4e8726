"""The padding of a plan, averaged over sampled steps.

Rows are uniform, lengths uniform on a logarithmic scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from preheat.plan.buckets import Bucket, StepSize, padded_work
from preheat.plan.dispatcher import Dispatcher
from preheat.plan.regions import DecodeByBlocks, DecodeByLength, Region

SHORTEST = 16
"""Shorter prompts are not sampled: they cost next to nothing, however much they are padded."""
SAMPLES = 2_000


@dataclass(frozen=True)
class Padding:
    """Work added by padding, relative to the work without it.

    ``mean`` and ``worst`` are over ``needs`` samples.
    """

    mean: float
    worst: float
    worst_need: str
    needs: int
    spread: str

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self) | {"mean": round(self.mean, 6), "worst": round(self.worst, 6)}


def padding_by_phase(dispatcher: Dispatcher, *, context: bool) -> dict[str, Padding]:
    """Return the padding of each phase, fallbacks included.

    With ``context`` contexts are padded too.
    """
    return {phase: _measure(dispatcher, *_sampled(part.region), context) for phase, part in dispatcher.phases.items()}


def _measure(dispatcher: Dispatcher, sizes: Iterable[tuple[StepSize, int]], spread: str, context: bool) -> Padding:
    extra, worst, worst_need, count = 0.0, -1.0, "", 0
    for size, times in sizes:
        added = _added(dispatcher, size, context)
        extra, count = extra + times * added, count + times
        if added > worst:
            worst, worst_need = added, str(size)
    return Padding(extra / count, worst, worst_need, count, spread)


def _added(dispatcher: Dispatcher, size: StepSize, context: bool) -> float:
    """Return the work that padding adds to a step of ``size``, relative to its work without padding."""
    exact, padded = _exact(size), dispatcher.peek(size)
    if not context:
        exact, padded = exact.without_context(), padded.without_context()
    return padded_work(padded) / padded_work(exact) - 1


def _exact(size: StepSize) -> Bucket:
    if size.phase == "prompt":
        return Bucket.prompt(size.rows, size.longest)
    if size.phase == "mixed":
        return Bucket.mixed(size.tokens, size.rows)
    if size.phase == "verify":
        return Bucket.verify(size.rows, size.longest)
    return Bucket.decode(size.rows, longest=size.longest, blocks=size.blocks)


def _sampled(region: Region) -> tuple[Iterator[tuple[StepSize, int]], str]:
    """Return sampled sizes, each with its number of samples, and a description of the samples."""
    a, b = region.bounds
    if region.phase == "mixed":
        lengths = _log_spaced(SHORTEST, a)
        return _each(lengths, lambda n: StepSize("mixed", 1, n)), f"tokens log-uniform over {lengths[0]}-{lengths[-1]}"
    if region.phase == "prompt":
        lengths = _log_spaced(SHORTEST, b)
        sizes = _each(lengths, lambda n: region.step_size(1, n))
        return sizes, f"one row, tokens log-uniform over {lengths[0]}-{lengths[-1]}"
    if region.phase == "verify":
        rows = range(1, a + 1, max(1, a // SAMPLES))
        sizes = _each(rows, lambda row: region.step_size(row, int(region.top(np.asarray(row)))))
        return sizes, f"rows uniform over 1-{a}"
    rows_evenly = sorted({int(row) for row in np.linspace(1, a, min(a, SAMPLES))})
    if isinstance(region, DecodeByBlocks | DecodeByLength):
        return _sampled_decodes(region, rows_evenly), f"rows uniform over 1-{a}, contexts log-uniform"
    return _each(rows_evenly, lambda row: region.step_size(row, 0)), f"rows uniform over 1-{a}"


def _each(lengths: Sequence[int], size_of: Callable[[int], StepSize]) -> Iterator[tuple[StepSize, int]]:
    """Yield the size of each length. Equal lengths follow each other in a small plan, and are one size."""
    return ((size_of(length), len(list(alike))) for length, alike in groupby(lengths))


def _sampled_decodes(region: DecodeByBlocks | DecodeByLength, rows: list[int]) -> Iterator[tuple[StepSize, int]]:
    for row in rows[:: max(1, len(rows) // 128)]:
        top = int(region.top(np.asarray(row)))
        low = row if isinstance(region, DecodeByBlocks) else SHORTEST
        yield from _each(_log_spaced(low, top, 16), partial(region.step_size, row))


def _log_spaced(low: int, high: int, samples: int = SAMPLES) -> list[int]:
    return [int(value) for value in np.rint(np.geomspace(min(low, high), high, samples))]
