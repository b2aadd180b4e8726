"""The padding of a plan, averaged over sampled steps.

Rows are uniform, lengths uniform on a logarithmic scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
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


def padding_by_phase(dispatcher: Dispatcher, *, context: bool = True) -> dict[str, Padding]:
    """Return the padding of each phase, fallbacks included.

    With ``context`` contexts are padded too.
    """
    return {phase: _measure(dispatcher, *_sampled(part.region), context) for phase, part in dispatcher.phases.items()}


def _measure(dispatcher: Dispatcher, sizes: Iterable[StepSize], spread: str, context: bool) -> Padding:
    extra, worst, worst_need, count, added, before = 0.0, -1.0, "", 0, 0.0, None
    for size in sizes:
        if size != before:  # a small plan has fewer sizes than samples, and equal ones follow each other
            added, before = _added(dispatcher, size, context), size
        extra, count = extra + added, count + 1
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


def _sampled(region: Region) -> tuple[Iterator[StepSize], str]:
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
        return (region.step_size(row, int(region.top(np.asarray(row)))) for row in rows), f"rows uniform over 1-{a}"
    rows_evenly = sorted({int(row) for row in np.linspace(1, a, min(a, SAMPLES))})
    if isinstance(region, DecodeByBlocks | DecodeByLength):
        return _sampled_decodes(region, rows_evenly), f"rows uniform over 1-{a}, contexts log-uniform"
    return (region.step_size(row, 0) for row in rows_evenly), f"rows uniform over 1-{a}"


def _each(lengths: list[int], size_of: Callable[[int], StepSize]) -> Iterator[StepSize]:
    """Yield the size of each length. Equal lengths follow each other in a small plan, and share their size."""
    before: int | None = None
    for length in lengths:
        if length != before:
            before, size = length, size_of(length)
        yield size


def _sampled_decodes(region: DecodeByBlocks | DecodeByLength, rows: list[int]) -> Iterator[StepSize]:
    for row in rows[:: max(1, len(rows) // 128)]:
        top = int(region.top(np.asarray(row)))
        low = row if isinstance(region, DecodeByBlocks) else SHORTEST
        for value in _log_spaced(low, top, 16):
            yield region.step_size(row, value)


def _log_spaced(low: int, high: int, samples: int = SAMPLES) -> list[int]:
    return [int(value) for value in np.rint(np.geomspace(min(low, high), high, samples))]
