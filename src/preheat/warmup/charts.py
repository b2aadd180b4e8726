"""The layout of the drawings on the record's page, in pixels.

The template prints them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from preheat.warmup.record import ItemRecord, Record

WIDTH = 1080.0
CHAR = 6.4  # width of a digit or small letter in the drawings' font
EDGE = 14.0  # right margin, for half of the axis' last label
HIT_LEVELS = 4
WARM_UP = "warm-up"
"""The boot step in which items run: their times count from its start."""


class Bar(NamedTuple):
    """A rectangle with its tooltip.

    ``label`` is empty if it would not fit.
    """

    x: float
    width: float
    style: str
    tip: str
    label: str = ""


class Tick(NamedTuple):
    """A label of an axis."""

    at: float
    text: str


@dataclass
class Lane:
    """One line of the timeline."""

    name: str
    y: float
    height: float
    bars: list[Bar] = field(default_factory=list)


@dataclass
class Timeline:
    """The boot from left to right.

    Its steps are in one lane; a lane for each kind of item follows.
    """

    lanes: list[Lane]
    ticks: list[Tick]
    left: float
    right: float
    height: float
    width: float = WIDTH


class Cell(NamedTuple):
    """An item in a grid.

    ``number`` is its index in the record, ``level`` 0 (never hit) to 4 (most often).
    """

    x: float
    y: float
    number: int
    entry: ItemRecord
    level: int
    label: str


@dataclass
class Grid:
    """The items of one kind.

    One dimension of their shapes goes to the right, the others go downwards.
    """

    kind: str
    across: str
    down: str
    cells: list[Cell]
    columns: list[Tick]
    rows: list[Tick]
    left: float
    cell_width: float
    cell_height: float
    width: float
    height: float

    @property
    def entries(self) -> list[ItemRecord]:
        return [cell.entry for cell in self.cells]


def timeline(record: Record) -> Timeline | None:
    """Return the timeline of a boot; None for a record without times."""
    steps = record.steps
    end = max((step.started + step.seconds for step in steps), default=0.0)
    offset = next((step.started for step in steps if step.name == WARM_UP), end)
    ran = [entry for entry in record.entries if entry.seconds > 0]
    total = max([end, *(offset + entry.started + entry.seconds for entry in ran)])
    if total <= 0:
        return None
    names = list(dict.fromkeys(["boot"] * bool(steps) + [entry.kind for entry in ran]))
    left = CHAR * max(map(len, names)) + 22
    scale = (WIDTH - left - EDGE) / total
    lanes, y = {}, 0.0
    for name in names:
        height = 30.0 if name == "boot" else 18.0
        lanes[name] = Lane(name, y, height)
        y += height + 7
    for number, step in enumerate(steps):
        width = max(step.seconds * scale, 1.0)
        label = step.name if width > CHAR * len(step.name) + 12 else ""
        tip = f"{step.name}: {format_seconds(step.seconds)}"
        lanes["boot"].bars.append(Bar(left + step.started * scale, width, f"step{number % 2}", tip, label))
    for entry in ran:
        lanes[entry.kind].bars += _bars(entry, left + (offset + entry.started) * scale, scale)
    ticks = [Tick(left + at * scale, format_seconds(at)) for at in _round_steps(total, 8)]
    return Timeline(list(lanes.values()), ticks, left, WIDTH - EDGE, y + 18)


def _bars(entry: ItemRecord, x: float, scale: float) -> list[Bar]:
    compiled, touched = entry.compile_seconds * scale, entry.touch_seconds * scale
    tip = f"{entry.name}: {format_seconds(entry.compile_seconds)} compiling, {format_seconds(entry.touch_seconds)} run"
    bars = [Bar(x, compiled, "compile", tip)] if compiled else []
    return bars + ([Bar(x + compiled, max(touched, 0.7), "touch", tip)] if touched else [])


def grids(record: Record) -> list[Grid]:
    """Return a grid for each kind, in the order of the plan."""
    groups: dict[str, list[tuple[int, ItemRecord]]] = defaultdict(list)
    for index, entry in enumerate(record.entries):
        groups[entry.kind].append((index, entry))
    return [_grid(kind, items) for kind, items in groups.items()]


def _grid(kind: str, items: Sequence[tuple[int, ItemRecord]]) -> Grid:
    across, down = _axes([entry for _, entry in items])
    columns = sorted({_value(entry.shape, [across]) for _, entry in items})
    rows = list(dict.fromkeys(_value(entry.shape, down) for _, entry in items))
    texts = [", ".join(map(_text, row)) for row in rows]
    if all(isinstance(part, int) for row in rows for part in row):
        rows, texts = map(list, zip(*sorted(zip(rows, texts, strict=True)), strict=True))
    left = CHAR * max(map(len, [*texts, ""])) + 14 if down else 0.0
    width = min(max((WIDTH - left - EDGE) / len(columns), 3.4), 40.0)
    height = 26.0 if len(rows) <= 12 else 17.0
    most = max(entry.hits for _, entry in items)
    cells = [
        Cell(
            left + columns.index(_value(entry.shape, [across])) * width,
            rows.index(_value(entry.shape, down)) * height,
            index,
            entry,
            hit_level(entry.hits, most),
            short(entry.hits) if entry.hits and width > CHAR * len(short(entry.hits)) + 2 else "",
        )
        for index, entry in items
    ]
    return Grid(
        kind,
        across,
        " · ".join(name.replace("_", " ") for name in down),
        cells,
        _sparse([Tick(left + (i + 0.5) * width, _text(value[0])) for i, value in enumerate(columns)]),
        [Tick((i + 0.5) * height, text) for i, text in enumerate(texts)] if down else [],
        left,
        width,
        height,
        left + len(columns) * width + EDGE,
        len(rows) * height + 20,
    )


def _axes(entries: Sequence[ItemRecord]) -> tuple[str, list[str]]:
    """Return the dimension that goes across, and the others.

    The one with the most values goes across, numbers before words.
    """
    names = list(dict.fromkeys(name for entry in entries for name in entry.shape))

    def rank(name: str) -> tuple[bool, int]:
        values = {entry.shape.get(name) for entry in entries}
        return all(type(value) in (int, type(None)) for value in values), len(values)

    across = max(names, key=rank)
    return across, [name for name in names if name != across]


def _value(shape: dict[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(shape.get(name, 0) for name in names)


def _text(value: object) -> str:
    return {True: "changed", False: "unchanged"}[value] if isinstance(value, bool) else str(value)


def _sparse(ticks: Sequence[Tick]) -> list[Tick]:
    """Return as many labels as fit, always including the last."""
    kept: list[Tick] = []
    free = math.inf
    for tick in reversed(ticks):
        half = (CHAR * len(tick.text) + 8) / 2
        if tick.at + half <= free:
            kept.append(tick)
            free = tick.at - half
    return kept[::-1]


def hit_level(hits: int, most: int) -> int:
    """Return 0 for no hits, else 1 to HIT_LEVELS on a logarithmic scale."""
    if not hits:
        return 0
    return 1 + min(HIT_LEVELS - 1, int(HIT_LEVELS * math.log(hits) / math.log(most + 1)))


def short(count: int) -> str:
    """Return a count in at most four characters: 999, 1.2k, 38k, 2.0M."""
    for limit, unit in ((10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count * 10 // limit / 10}{unit}" if count < 10 * limit else f"{count // limit}{unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Return seconds with three significant digits in a suitable unit.

    For example 3.2 µs, 18.4 ms, 2.31 s, 4 min 10 s.
    """
    if seconds >= 100:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    for unit, name in ((1, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def _round_steps(total: float, most: int) -> list[float]:
    """Return 0, then round numbers up to ``total``, about ``most`` of them."""
    raw = total / most
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [step * number for number in range(int(total / step) + 1)]
