"""Products of some rows with a weight in panels, where reading the weight takes about as long as summing.

Groups of a few rows pass over the weight one after another. Over a whole unit, the first group would wait for memory,
and memory would be idle while the others find the weights in a cache. So all groups pass over a chunk of the inputs
before the next chunk, and share the work of asking for the next one. Sums wait in memory between chunks, which is
exact: the order of each sum is the order of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from preheat.backends.cpu.llvm import targets
from preheat.backends.cpu.llvm.emit import BYTE, LANES, SECOND_LEVEL, Function, Value
from preheat.backends.cpu.llvm.kinds import PANEL, Product

CHUNK = 128
"""Inputs of a chunk: its weights stay in a first-level cache."""

LEAST, MOST = 5, 48
"""The numbers of rows that are multiplied so. More rows read wider units, and wait less for memory."""


class Group(NamedTuple):
    """``rows`` rows that pass over a chunk together, ``vectors`` of 16 outputs at a time.

    From ``least`` rows on, a row is computed several times in place of the rows that lack.
    """

    rows: int
    vectors: int
    least: int


GROUPS: Mapping[tuple[int, int], tuple[Group, ...]] = {
    (32, 512): (Group(8, 2, 5), Group(4, 2, 1)),
    (16, 256): (Group(6, 1, 5), Group(4, 1, 1)),
}
"""Groups by the vector registers and their bits, largest first. The last one takes all rows that are left."""


class Weights(NamedTuple):
    """The weight at ``address``; ``read(panel and half of it, input)`` loads 16 numbers of it.

    ``unit`` is the unit to multiply by, and ``ahead`` the one that this thread probably reads next.
    """

    address: Value
    read: Callable[[tuple[Value, int], Value], Value]
    unit: Value
    ahead: Value


class _Chunk(NamedTuple):
    """Inputs from ``begin`` to below ``end``, which ``groups`` groups of rows pass over, one after another."""

    begin: Value
    end: Value
    groups: Value


def serves(how: Product) -> bool:
    """Return whether products of some rows are computed in chunks on this processor."""
    return how.scales is None and targets.here().registers in GROUPS


def vectors_of(how: Product) -> int:
    """Return the vectors of a unit: of a panel, or of a panel of gates and the panel of their ups."""
    return 4 if how.gated else 2


def holds(e: Function, rows: Value) -> Value:
    """Return whether so many rows are computed in chunks."""
    return e.b.and_(e.less(LEAST - 1, rows), e.less(rows, MOST + 1))


def add_up(
    e: Function, how: Product, weights: Weights, row_at: Callable[[Value], Value], rows: Value, room: Value
) -> None:
    """Write the products of ``rows`` rows with a unit's outputs to ``room``: [row][vector]."""
    width, last = vectors_of(how) * LANES, e.sub(rows, 1)
    parts, groups = _parts(e, rows)
    with e.loop(0, how.inputs, CHUNK) as begin:
        chunk = _Chunk(begin, e.least(e.add(begin, CHUNK), how.inputs), groups)
        for group, before, start, stop in parts:
            with e.loop(start, stop, group.rows) as first:
                x = [row_at(e.least(e.add(first, place), last)) for place in range(group.rows)]
                number = e.add(before, e.div(e.sub(first, start), group.rows))
                _sum(e, how, weights, x, group, chunk, number, e.at(room, e.mul(first, width)))


def _parts(e: Function, rows: Value) -> tuple[list[tuple[Group, Value, Value, Value]], Value]:
    """Cut the rows into groups; return for each size the groups before, the first row and the end, and all groups."""
    parts, before, start = [], e.i(0), e.i(0)
    for group in GROUPS[targets.here().registers]:
        groups = e.div(e.add(e.sub(rows, start), group.rows - group.least), group.rows)
        stop = e.add(start, e.mul(groups, group.rows))
        parts.append((group, before, start, stop))
        start, before = e.least(stop, rows), e.add(before, groups)
    return parts, before


def _sum(
    e: Function, how: Product, weights: Weights, x: Sequence[Value], group: Group, chunk: _Chunk, number: Value,
    room: Value,
) -> None:  # fmt: skip
    """Add the products over the inputs of a chunk to the sums at ``room``; sums of the first chunk begin with zero.

    ``x`` are the addresses of the rows of the group ``number``.
    """
    vectors, fresh = vectors_of(how), e.b.icmp_signed("==", chunk.begin, e.i(0))
    for first in range(0, vectors, group.vectors):
        numbers = range(first, first + group.vectors)
        places = [(e.add(e.mul(weights.unit, vectors // 2), each // 2), each % 2) for each in numbers]
        kept = [[e.at(room, (row * vectors + each) * LANES) for each in numbers] for row in range(len(x))]
        totals = [[e.variable(e.v(0.0)) for _ in places] for _ in x]
        for total, place in zip(chain(*totals), chain(*kept), strict=True):
            e.set(total, e.b.select(fresh, e.v(0.0), e.vector(place)))
        start, step = _ahead(e, how, weights, first, group, chunk, number)
        asked = e.variable(start)
        with e.loop(chunk.begin, chunk.end) as k:
            e.prefetch(e.get(asked), SECOND_LEVEL)
            e.set(asked, e.at(e.get(asked), step, BYTE))
            own = [weights.read(place, k) for place in places]
            for row, line in zip(x, totals, strict=True):
                factor = e.splat(e.load(row, k))
                for total, each in zip(line, own, strict=True):
                    e.set(total, e.fma(each, factor, e.get(total)))
        for total, place in zip(chain(*totals), chain(*kept), strict=True):
            e.store(e.get(total), place)


def _ahead(
    e: Function, how: Product, weights: Weights, vector: int, group: Group, chunk: _Chunk, number: Value
) -> tuple[Value, Value]:
    """Return the memory that the group ``number`` asks for over a chunk: a start, and bytes from input to input.

    It is a part of the next chunk of the same panel; behind a unit's last chunk comes the first one of the next unit.
    All passes over a panel share the chunk evenly, so that its bytes arrive while all of them sum. ``vector`` is the
    first one of the pass.
    """
    size, passes = PANEL * (4 if how.stored == "float32" else 2), 2 // group.vectors  # bytes of an input of a panel
    following = e.add(chunk.begin, CHUNK)
    here = e.less(following, how.inputs)
    panel = e.add(e.mul(e.choose(here, weights.unit, weights.ahead), vectors_of(how) // 2), vector // 2)
    first = e.add(e.mul(panel, how.inputs), e.choose(here, following, 0))
    step = e.div(size // passes, chunk.groups)
    mine = e.add(e.mul(number, passes), vector % 2)
    return e.at(weights.address, e.add(e.mul(first, size), e.mul(e.mul(mine, CHUNK), step)), BYTE), step
