"""The table: every shape that may run, and the cheapest of them for each need.

``fit`` is on the path of every step, so the answer to every possible need is worked out beforehand: two binary
searches and two list lookups find it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Work = Callable[[Bucket], float]


class WarnOnce:
    """The usual answer to a miss: ``counts`` by configuration, the first hundred by name, and one warning for each."""

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self.counts = {} if counts is None else counts

    @property
    def count(self) -> int:
        """All misses."""
        return sum(self.counts.values())

    def __call__(self, need: StepSize, shape: Bucket) -> None:
        name = str(need)
        if name not in self.counts:
            if len(self.counts) < MAX_MISSES_NAMED:
                logger.warning("%s", not_planned(need))
            else:
                name = OTHERS
        self.counts[name] = self.counts.get(name, 0) + 1


def not_planned(need: StepSize) -> str:
    """What is logged of a need beyond the ladders."""
    return f"Configuration: {need} was not warmed-up!"


@dataclass(frozen=True)
class PhaseDispatcher:
    """One phase: its region, the shapes on its ladders that can be chosen (cheapest first), and what happens beyond.

    ``cells[i][j]`` is the cheapest shape for needs up to ``a[i]`` and ``b[j]``. ``examples`` maps every shape, the
    fallback included, to the heaviest need found that chooses it. ``fallback`` is None where the ladders hold every
    need within the limits.
    """

    region: Region
    shapes: tuple[Bucket, ...]
    shadowed: tuple[tuple[Bucket, Bucket | None], ...]
    fallback: Bucket | None
    examples: Mapping[Bucket, StepSize]
    a: tuple[int, ...]
    b: tuple[int, ...]
    cells: tuple[tuple[Bucket | None, ...], ...]
    field_a: int
    field_b: int


class Dispatcher:
    """The shapes of all phases; it never changes. ``on_miss`` is told of every need that took a fallback."""

    __slots__ = ("_on_miss", "_phases")
    _phases: dict[Phase, PhaseDispatcher]
    _on_miss: OnMiss

    def __init__(self, phases: Iterable[PhaseDispatcher], on_miss: OnMiss | None = None) -> None:
        object.__setattr__(self, "_phases", {phase.region.phase: phase for phase in phases})
        object.__setattr__(self, "_on_miss", on_miss or WarnOnce())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the table is frozen: {name} cannot be set")

    @property
    def phases(self) -> Mapping[Phase, PhaseDispatcher]:
        """The tables by phase; a phase that is not here cannot be run under this policy."""
        return MappingProxyType(self._phases)

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """Every shape that ``fit`` can return, fallbacks last. None is there twice: a fallback lies on no ladder."""
        on_ladders = [shape for phase in self._phases.values() for shape in phase.shapes]
        return (*on_ladders, *(phase.fallback for phase in self._phases.values() if phase.fallback))

    def find(self, need: StepSize) -> Bucket | None:
        """The cheapest shape on the ladders that holds ``need``, or None: what an admission rule asks."""
        phase = self._phases[need.phase]
        i = bisect_left(phase.a, need[phase.field_a])
        j = bisect_left(phase.b, need[phase.field_b])
        return phase.cells[i][j]

    def fit(self, need: StepSize) -> Bucket:
        """The shape that a step of ``need`` runs in: never smaller than asked, never above a budget.

        Raises OutsideLimits for a need that no step within the limits has.
        """
        phase = self._phases[need.phase]
        shape = phase.cells[bisect_left(phase.a, need[phase.field_a])][bisect_left(phase.b, need[phase.field_b])]
        return shape if shape is not None else self._fall_back(phase, need)

    def _fall_back(self, phase: PhaseDispatcher, need: StepSize) -> Bucket:
        shape = phase.fallback
        if shape is None or not shape.holds(need):
            raise OutsideLimits(f"a step of {need}, {need.tokens} tokens, exceeds the limits that were planned for")
        self._on_miss(need, shape)
        return shape

    def peek(self, need: StepSize) -> Bucket:
        """What ``fit`` gives for a need within the limits, without telling anyone of a miss."""
        shape = self.find(need) or self._phases[need.phase].fallback
        if shape is None:
            raise OutsideLimits(f"{need} exceeds the limits that were planned for")
        return shape

    def example(self, shape: Bucket) -> StepSize:
        """A need, the heaviest found, for which ``fit`` gives ``shape``."""
        for phase in self._phases.values():
            if shape in phase.examples:
                return phase.examples[shape]
        raise KeyError(shape)


def build_phase(
    region: Region, candidates: Sequence[Bucket], fallback: Bucket, work: Work = padded_work
) -> PhaseDispatcher:
    """The table of one phase from candidates that respect every budget.

    Candidates that no need within ``region`` chooses are left out, and listed as shadowed with the shape that takes
    their place. ``fallback`` must hold every need of the region; it is used only where the candidates leave a gap.
    """
    grid = _Grid(region, _by_cost(list(dict.fromkeys(candidates)), work))
    chosen = grid.chosen()
    shadowed = tuple((grid.shapes[rank], grid.winner(rank)) for rank in np.flatnonzero(~chosen).tolist())
    if shadowed:
        grid = _Grid(region, [grid.shapes[rank] for rank in np.flatnonzero(chosen).tolist()])
    gap = grid.gap()
    return PhaseDispatcher(
        region=region,
        shapes=tuple(grid.shapes),
        shadowed=shadowed,
        fallback=None if gap is None else fallback,
        examples=_Examples(grid, {} if gap is None else {fallback: gap}),
        a=tuple(grid.values[0].tolist()),
        b=tuple(grid.values[1].tolist()),
        cells=grid.cells(),
        field_a=StepSize._fields.index(region.axes[0]),
        field_b=StepSize._fields.index(region.axes[1]),
    )


def _by_cost(shapes: list[Bucket], work: Work) -> list[Bucket]:
    """Cheapest first; of equally cheap ones the shorter, so that the order never depends on the input's."""
    column = _columns(shapes)
    length = np.where(column["longest"] + column["blocks"], column["longest"] + column["blocks"], column["tokens"])
    order = np.lexsort([column["rows"], length, np.array([work(shape) for shape in shapes])])
    return [shapes[i] for i in order.tolist()]


def _columns(shapes: Sequence[Bucket]) -> dict[str, np.ndarray]:
    """The numbers of ``shapes`` as int64 arrays, by field."""
    values = list(zip(*shapes, strict=True))[1:] or [()] * (len(Bucket._fields) - 1)
    return {name: np.array(column, np.int64) for name, column in zip(Bucket._fields[1:], values, strict=True)}


class _Grid:
    """The plane of a region cut at the dimensions of its shapes; each cell knows the first shape that holds it.

    ``shapes`` are in order of cost, so the first is the cheapest and a running minimum over positions finds it.
    """

    def __init__(self, region: Region, shapes: Sequence[Bucket]) -> None:
        self.region, self.shapes = region, shapes
        # An axis that is no part of a shape's key does not limit it.
        column = _columns(shapes)
        points = [np.where(column[axis], column[axis], UNBOUNDED) for axis in region.axes]
        cut = [np.unique(axis, return_inverse=True) for axis in points]
        self.values, self.where = [values for values, _ in cut], [index for _, index in cut]
        if len(self.values[0]) * len(self.values[1]) > MAX_CELLS:
            sizes = " x ".join(f"{len(values):,} {name}" for values, name in zip(self.values, region.axes, strict=True))
            raise SettingsError(f"the {region.phase} buckets have too many sizes ({sizes}): raise a bucket step")
        # One more cell on either axis for what lies beyond the ladders.
        best = np.full([len(values) + 1 for values in self.values], len(shapes), np.int64)
        np.minimum.at(best, tuple(self.where), np.arange(len(shapes)))
        for axis in (0, 1):
            best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis), axis)
        self.best = best
        self.a_top, self.reachable = self._reach()

    def _reach(self) -> tuple[np.ndarray, np.ndarray]:
        """For each cell the largest a of a need inside it, and whether there is any need inside it."""
        (a_low, a_high), (self.b_low, self.b_high) = (
            _edges(values, bound) for values, bound in zip(self.values, self.region.bounds, strict=True)
        )
        first, last = self.region.span(self.b_low, self.b_high)
        top = np.minimum(a_high[:, None], last[None, :])
        empty = (self.b_low > self.b_high)[None, :]
        return top, (top >= np.maximum(a_low[:, None], first[None, :])) & ~empty

    def chosen(self) -> np.ndarray:
        """Which shapes some need within the region gets: bool [shapes]."""
        found = np.zeros(len(self.shapes) + 1, bool)
        found[self.best[self.reachable]] = True
        return found[:-1]

    def last_cells(self) -> np.ndarray:
        """For each shape the last cell within the region that it serves, as a flat index: int64 [shapes]."""
        cells = np.flatnonzero(self.reachable)
        last = np.zeros(len(self.shapes) + 1, np.int64)
        np.maximum.at(last, self.best.ravel()[cells], cells)
        return last[:-1]

    def gap(self) -> StepSize | None:
        """A need within the region that no shape holds."""
        flat = np.flatnonzero(self.reachable & (self.best == len(self.shapes)))
        return self.need(int(flat[-1])) if len(flat) else None

    def winner(self, rank: int) -> Bucket | None:
        """What a need of exactly this shape gets in its place; None if there is no such need."""
        cell = self.where[0][rank], self.where[1][rank]
        return self.shapes[self.best[cell]] if self.reachable[cell] else None

    def need(self, cell: int) -> StepSize:
        """The heaviest need of a cell within the region."""
        i, j = divmod(cell, self.best.shape[1])
        a = int(self.a_top[i, j])
        return self.region.need(a, min(int(self.b_high[j]), int(self.region.top(np.asarray(a)))))

    def cells(self) -> tuple[tuple[Bucket | None, ...], ...]:
        """The grid as nested tuples of shapes, which index faster than arrays."""
        shapes = [*self.shapes, None]
        return tuple(tuple(shapes[rank] for rank in row) for row in self.best.tolist())


class _Examples(Mapping[Bucket, StepSize]):
    """A need for every shape of a grid in which each is chosen, worked out when asked for."""

    def __init__(self, grid: _Grid, more: dict[Bucket, StepSize]) -> None:
        self._grid, self._more = grid, more

    @cached_property
    def _cell(self) -> dict[Bucket, int]:
        return dict(zip(self._grid.shapes, self._grid.last_cells().tolist(), strict=True))

    def __getitem__(self, shape: Bucket) -> StepSize:
        return self._grid.need(self._cell[shape]) if shape in self._cell else self._more[shape]

    def __iter__(self) -> Iterator[Bucket]:
        yield from self._cell
        yield from self._more

    def __len__(self) -> int:
        return len(self._cell) + len(self._more)


def _edges(values: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and last coordinate of each interval between ``values``, the last one reaching up to ``bound``."""
    high = np.minimum(np.append(values, bound), bound)
    return np.append(1, high[:-1] + 1), high
