"""The dispatcher finds the cheapest planned bucket for each step.

``fit`` runs at every step, so the answers for all step sizes are worked out beforehand: two binary searches and two
lookups find one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from preheat.errors import OutsideLimits, SettingsError
from preheat.plan.buckets import Bucket, Phase, StepSize, padded_work
from preheat.plan.regions import UNBOUNDED, Region

logger = logging.getLogger(__name__)

MAX_CELLS = 8_000_000
MAX_MISSES_NAMED = 100
OTHERS = "others"

OnMiss = Callable[[StepSize, Bucket], None]


class WarnOnce:
    """The default ``on_miss``: warns once of each size, and counts.

    It is called for step sizes beyond the buckets. ``counts`` are misses by step size; the first hundred sizes have
    names. A step that takes the fallback is warm. The cold monitor reports first runs.
    """

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self.counts = {} if counts is None else counts

    def __call__(self, size: StepSize, bucket: Bucket) -> None:
        name = str(size)
        if name not in self.counts:
            if len(self.counts) < MAX_MISSES_NAMED:
                logger.warning("Configuration: %s is beyond the bucket sizes and runs as %s", size, bucket)
            else:
                name = OTHERS
        self.counts[name] = self.counts.get(name, 0) + 1


@dataclass(frozen=True)
class PhaseDispatcher:
    """One phase with its region, buckets and fallback.

    Steps can choose each of the ``buckets``, cheapest first. ``cells[i][j]`` is the cheapest bucket for steps up to
    ``a[i]`` and ``b[j]``; a and b are the fields ``field_a`` and ``field_b`` of a StepSize. ``shadowed`` are buckets
    that no step chooses, each with its cheaper replacement. ``fallback`` and ``gap``, a step that needs it, are None if
    the buckets hold every step within the limits.
    """

    region: Region
    buckets: tuple[Bucket, ...]
    shadowed: tuple[tuple[Bucket, Bucket | None], ...]
    fallback: Bucket | None
    gap: StepSize | None
    grid: _Grid
    a: tuple[int, ...]
    b: tuple[int, ...]
    cells: tuple[tuple[Bucket | None, ...], ...]
    field_a: int
    field_b: int

    def example(self, bucket: Bucket) -> StepSize | None:
        """Return the heaviest step size found that chooses ``bucket``.

        Returns None if no step of this phase does.
        """
        if bucket == self.fallback:
            return self.gap
        cell = self.grid.last_cells.get(bucket)
        return None if cell is None else self.grid.step_size(cell)


class Dispatcher:
    """The buckets of all phases; immutable.

    ``on_miss`` is called for every step that takes a fallback.
    """

    __slots__ = ("_on_miss", "_phases")
    _phases: dict[Phase, PhaseDispatcher]
    _on_miss: OnMiss

    def __init__(self, phases: Iterable[PhaseDispatcher], on_miss: OnMiss | None = None) -> None:
        object.__setattr__(self, "_phases", {phase.region.phase: phase for phase in phases})
        object.__setattr__(self, "_on_miss", on_miss or WarnOnce())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the dispatcher is frozen: {name} cannot be set")

    @property
    def phases(self) -> Mapping[Phase, PhaseDispatcher]:
        """The dispatchers of the bucketing policy's phases, by phase."""
        return MappingProxyType(self._phases)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that ``fit`` can return, each once, fallbacks last."""
        regular = [bucket for phase in self._phases.values() for bucket in phase.buckets]
        return (*regular, *(phase.fallback for phase in self._phases.values() if phase.fallback))

    def find(self, size: StepSize) -> Bucket | None:
        """Return the cheapest bucket that holds ``size``, fallbacks left out, or None.

        Used for admission.
        """
        phase = self._phases[size.phase]
        i = bisect_left(phase.a, size[phase.field_a])
        j = bisect_left(phase.b, size[phase.field_b])
        return phase.cells[i][j]

    def fit(self, size: StepSize) -> Bucket:
        """Return the bucket that a step of ``size`` runs in.

        It is never smaller than the step and never above a budget. Raises OutsideLimits for a size that no step within
        the limits has.
        """
        phase = self._phases[size.phase]
        bucket = phase.cells[bisect_left(phase.a, size[phase.field_a])][bisect_left(phase.b, size[phase.field_b])]
        return bucket if bucket is not None else self._fall_back(phase, size)

    def _fall_back(self, phase: PhaseDispatcher, size: StepSize) -> Bucket:
        bucket = phase.fallback
        if bucket is None or not bucket.holds(size):
            raise OutsideLimits(f"a step of {size}, {size.tokens} tokens, exceeds the limits that were planned for")
        self._on_miss(size, bucket)
        return bucket

    def peek(self, size: StepSize) -> Bucket:
        """Return the result of ``fit`` for a step within the limits, without calling ``on_miss``."""
        bucket = self.find(size) or self._phases[size.phase].fallback
        if bucket is None:
            raise OutsideLimits(f"{size} exceeds the limits that were planned for")
        return bucket

    def example(self, bucket: Bucket) -> StepSize:
        """Return the heaviest step size found for which ``fit`` gives ``bucket``."""
        for phase in self._phases.values():
            if example := phase.example(bucket):
                return example
        raise KeyError(bucket)


def build_phase(region: Region, candidates: Sequence[Bucket], fallback: Bucket) -> PhaseDispatcher:
    """Return the dispatcher of one phase from candidates that respect every budget.

    Candidates that no step within ``region`` chooses are listed as shadowed. ``fallback`` must hold every step of the
    region; it is used only if the candidates leave a gap.
    """
    grid = _Grid(region, _by_cost(list(dict.fromkeys(candidates))))
    chosen = grid.chosen()
    shadowed = tuple((grid.buckets[rank], grid.winner(rank)) for rank in np.flatnonzero(~chosen).tolist())
    if shadowed:
        grid = _Grid(region, [grid.buckets[rank] for rank in np.flatnonzero(chosen).tolist()])
    gap = grid.gap()
    return PhaseDispatcher(
        region=region,
        buckets=tuple(grid.buckets),
        shadowed=shadowed,
        fallback=None if gap is None else fallback,
        gap=gap,
        grid=grid,
        a=tuple(grid.values[0].tolist()),
        b=tuple(grid.values[1].tolist()),
        cells=grid.cells(),
        field_a=StepSize._fields.index(region.axes[0]),
        field_b=StepSize._fields.index(region.axes[1]),
    )


def _by_cost(buckets: list[Bucket]) -> list[Bucket]:
    """Return the buckets, cheapest first, then shortest.

    The order does not depend on the input's.
    """
    column = _columns(buckets)
    length = np.where(column["longest"] + column["blocks"], column["longest"] + column["blocks"], column["tokens"])
    order = np.lexsort([column["rows"], length, np.array([padded_work(bucket) for bucket in buckets])])
    return [buckets[i] for i in order.tolist()]


def _columns(buckets: Sequence[Bucket]) -> dict[str, np.ndarray]:
    """Return the numbers of ``buckets`` as int64 arrays, by field."""
    values = list(zip(*buckets, strict=True))[1:] or [()] * (len(Bucket._fields) - 1)
    return {name: np.array(column, np.int64) for name, column in zip(Bucket._fields[1:], values, strict=True)}


class _Grid:
    """The plane of a region cut at the dimensions of its buckets.

    ``best`` is the first bucket that holds each cell. ``buckets`` are in order of cost, so the first is the cheapest
    and a running minimum over positions finds it.
    """

    def __init__(self, region: Region, buckets: Sequence[Bucket]) -> None:
        self.region, self.buckets = region, buckets
        # An axis that is no part of a bucket's key does not limit it.
        column = _columns(buckets)
        points = [np.where(column[axis], column[axis], UNBOUNDED) for axis in region.axes]
        cut = [np.unique(axis, return_inverse=True) for axis in points]
        self.values, self.where = [values for values, _ in cut], [index for _, index in cut]
        if len(self.values[0]) * len(self.values[1]) > MAX_CELLS:
            sizes = " x ".join(f"{len(values):,} {name}" for values, name in zip(self.values, region.axes, strict=True))
            raise SettingsError(f"the {region.phase} buckets have too many sizes ({sizes}): raise a bucket step")
        # One more cell on each axis for steps beyond all buckets.
        best = np.full([len(values) + 1 for values in self.values], len(buckets), np.int64)
        np.minimum.at(best, tuple(self.where), np.arange(len(buckets)))
        for axis in (0, 1):
            best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis), axis)
        self.best = best
        self.a_top, self.reachable = self._reach()

    def _reach(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the largest a of a step in each cell.

        Also return whether there is any step in the cell.
        """
        (a_low, a_high), (self.b_low, self.b_high) = (
            _edges(values, bound) for values, bound in zip(self.values, self.region.bounds, strict=True)
        )
        first, last = self.region.span(self.b_low, self.b_high)
        top = np.minimum(a_high[:, None], last[None, :])
        empty = (self.b_low > self.b_high)[None, :]
        return top, (top >= np.maximum(a_low[:, None], first[None, :])) & ~empty

    def chosen(self) -> np.ndarray:
        """Return whether some step within the region chooses each bucket: bool [buckets]."""
        found = np.zeros(len(self.buckets) + 1, bool)
        found[self.best[self.reachable]] = True
        return found[:-1]

    @cached_property
    def last_cells(self) -> dict[Bucket, int]:
        """The last cell within the region that each bucket serves, as a flat index."""
        cells = np.flatnonzero(self.reachable)
        last = np.zeros(len(self.buckets) + 1, np.int64)
        np.maximum.at(last, self.best.ravel()[cells], cells)
        return dict(zip(self.buckets, last[:-1].tolist(), strict=True))

    def gap(self) -> StepSize | None:
        """Return the size of a step that no bucket holds, or None.

        The step lies within the region.
        """
        flat = np.flatnonzero(self.reachable & (self.best == len(self.buckets)))
        return self.step_size(int(flat[-1])) if len(flat) else None

    def winner(self, rank: int) -> Bucket | None:
        """Return the cheaper bucket for a step of exactly this bucket's size.

        Returns None if there is no such step.
        """
        cell = self.where[0][rank], self.where[1][rank]
        return self.buckets[self.best[cell]] if self.reachable[cell] else None

    def step_size(self, cell: int) -> StepSize:
        """Return the heaviest step of a cell within the region."""
        i, j = divmod(cell, self.best.shape[1])
        a = int(self.a_top[i, j])
        return self.region.step_size(a, min(int(self.b_high[j]), int(self.region.top(np.asarray(a)))))

    def cells(self) -> tuple[tuple[Bucket | None, ...], ...]:
        """Return the grid as nested tuples of buckets.

        Tuples index faster than arrays.
        """
        buckets = [*self.buckets, None]
        return tuple(tuple(buckets[rank] for rank in row) for row in self.best.tolist())


def _edges(values: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last coordinate of each interval between ``values``.

    The last one ends at ``bound``.
    """
    high = np.minimum(np.append(values, bound), bound)
    return np.append(1, high[:-1] + 1), high
