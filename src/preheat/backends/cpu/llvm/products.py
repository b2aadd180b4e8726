"""Products of rows with a weight in panels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from preheat.backends.cpu.llvm import chunks, codes, targets
from preheat.backends.cpu.llvm.activations import ACTIVATIONS, UPS, kept_between
from preheat.backends.cpu.llvm.emit import BYTE, FLOATS, HALF, LANES, SECOND_LEVEL, WORDS, Function, Value
from preheat.backends.cpu.llvm.job import Job, Once, Phase, wait
from preheat.backends.cpu.llvm.kinds import FRAME, LAYER_FRAME, PANEL, Product
from preheat.backends.cpu.llvm.narrow import numbers
from preheat.backends.cpu.llvm.terms import Adapted, add_terms, shrink


class Tile(NamedTuple):
    """``rows`` rows that read a weight together, and the ``vectors`` that they sum at once.

    From ``least`` rows on, a row is computed several times in place of the rows that lack; 0: no row lacks.
    """

    rows: int
    vectors: int
    least: int = 0


class Tiles(NamedTuple):
    """The tiles of a product's rows, largest first: of ``many`` rows, and of fewer rows than its largest tile takes."""

    many: tuple[Tile, ...]
    few: tuple[Tile, ...]


TILES: Mapping[tuple[int, int], Tiles] = {
    (32, 512): Tiles((Tile(4, 4), Tile(1, 8)), (Tile(1, 8),)),
    (16, 256): Tiles((Tile(6, 1, 5), Tile(4, 1, 2), Tile(1, 8)), (Tile(3, 2, 2), Tile(1, 8))),
    (32, 128): Tiles((Tile(6, 1), Tile(3, 2), Tile(1, 4)), (Tile(3, 2), Tile(1, 4))),
    (16, 128): Tiles((Tile(2, 1), Tile(1, 2)), (Tile(1, 2),)),
}
"""Tiles by the vector registers and their bits.

The sums of several rows, the weights of one input and one number of a row fit into the registers. A single row waits
for memory, and is faster with more sums. Changes no bits.
"""

READS_AHEAD = frozenset({(16, 256)})
"""Vector registers, and their bits, of processors that are asked for the next unit's weights while they sum.

Groups of rows after the first one find a unit in a cache, so memory would be idle. Measured with AVX2.
"""

UNIT_BYTES = 1 << 19
"""Most bytes of a unit's weights where units are read ahead: they should fit into a second-level cache."""

TILES_OF_CODES = Tiles((Tile(4, 4), Tile(1, 4)), (Tile(1, 4),))
"""The same for codes: they need registers before they are floats."""

_Part = tuple[Tile, Value, Value]
"""Rows that are computed in groups of a tile: the first row, and the end of the last group."""

Finish = Callable[[Value, Value, Value], None]
"""Use of a product's results: the row, the first column, and 16 results."""


class Operands(NamedTuple):
    """Addresses of a product's operands; ``row(number)`` is the address of a row's inputs.

    ``ahead`` is the unit whose weights this thread probably reads next.
    """

    weight: Value
    row: Callable[[Value], Value]
    bias: Value | None = None
    terms: Adapted | None = None
    ahead: Value | None = None


class Ahead(NamedTuple):
    """Memory to ask for in the passes of groups of rows over a unit: at each input ``step`` bytes more."""

    start: Value
    step: Value


class Visits(NamedTuple):
    """``rows`` rows, each of one of several matrices; the others are addresses of integers of 64 bits.

    ``visited`` has the number of matrices with rows, then their numbers. The rows of matrix e are numbered from
    ``starts[e]`` to below ``starts[e + 1]``. ``slots`` are the rows' adapter slots.
    """

    rows: Value
    visited: Value
    starts: Value
    slots: Value


def weight_at(e: Function, how: Product, weight: Value, vector: Value, k: Value) -> Value:
    """Return the numbers of input ``k`` for 16 outputs, the ``vector``-th of the weight, as floats.

    ``vector`` is a pair: a panel and a half of it.
    """
    panel, half = vector
    at = e.mul(e.add(e.mul(panel, how.inputs), k), PANEL)
    if how.stored == "float32":
        return e.vector(weight, e.add(at, LANES * half))
    if how.stored == "float16":
        return numbers(e, e.at(weight, e.add(at, LANES * half), HALF), how.stored)
    words = e.b.load(e.at(weight, at, HALF), typ=WORDS, align=4)  # a word: outputs j and j + 16
    return e.b.bitcast(e.b.and_(words, e.w(-65536)) if half else e.b.shl(words, e.w(16)), FLOATS)


def sums(
    e: Function, how: Product, weight: Value, unit: Value, x: Sequence[Value], at_once: int, vectors: int,
    ahead: Ahead | None = None,
) -> list[list[Value]]:  # fmt: skip
    """Return the products of rows with a unit's outputs: [row][vector].

    ``x`` are the addresses of the rows; the ``unit`` has ``vectors`` vectors of outputs, summed ``at_once`` at a time.
    """
    if how.scales is not None:
        return codes.sums(e, how, weight, unit, x, vectors)
    found: list[list[Value]] = [[] for _ in x]
    for first in range(0, vectors, at_once):
        done = first // at_once * how.inputs
        numbers = range(first, min(first + at_once, vectors))
        places = [(e.add(e.mul(unit, vectors // 2), number // 2), number % 2) for number in numbers]
        totals = [[e.variable(e.v(0.0)) for _ in places] for _ in x]
        for total in chain(*totals):
            e.set(total, e.v(0.0))
        with e.loop(0, how.inputs) as k:
            if ahead is not None:
                e.prefetch(e.at(ahead.start, e.mul(e.add(k, done), ahead.step), BYTE), SECOND_LEVEL)
            weights = [weight_at(e, how, weight, place, k) for place in places]
            for row, line in zip(x, totals, strict=True):
                factor = e.splat(e.load(row, k))
                for total, each in zip(line, weights, strict=True):
                    e.set(total, e.fma(each, factor, e.get(total)))
        for line, more in zip(found, totals, strict=True):
            line += [e.get(total) for total in more]
    return found


def tiles(how: Product) -> Tiles:
    """Return the tiles of a product's rows."""
    return TILES[targets.here().registers] if how.scales is None else TILES_OF_CODES


def widest(how: Product, tile: Tile) -> int:
    """Return the most vectors that a unit may have, whose rows are computed in groups of a ``tile``.

    The outputs must be a multiple of a unit's vectors. Gates lie beside their ups, so a gated unit has at least 4.
    """
    least, most = 4 if how.gated else 2, max(tile.vectors, 4)
    options = [each for each in (8, 4, 2) if least <= each <= most and how.padded % (each * LANES) == 0]
    if tile.rows == 1 or not reads_ahead(how):
        return options[0]
    return next((each for each in options if each * vector_bytes(how) <= UNIT_BYTES), options[-1])


def reads_ahead(how: Product) -> bool:
    """Return whether the threads ask for the weights of their next units."""
    return how.scales is None and targets.here().registers in READS_AHEAD


def vector_bytes(how: Product) -> int:
    """Return the bytes of the weights of 16 outputs: numbers, no codes."""
    return how.inputs * LANES * (4 if how.stored == "float32" else 2)


def product(e: Job, how: Product, name: str, x: Value, finish: Finish, make: Once | None = None) -> list[Phase]:
    """Multiply the rows at ``x`` by the weight ``name`` of the layer's frame.

    ``make`` fills ``x`` first, in each thread for itself. Returns the phases to wait for.
    """

    def row_at(row: Value) -> Value:
        return e.at(x, e.mul(row, how.inputs))

    operands = _operands(e, how, name, row_at, e.pointer("slots"))
    if operands.terms is not None:
        wait(e, [shrink(e, how, operands.terms, e.rows, row_at, make)])
    many, some = tiles(how)
    few, phases = e.less(e.rows, many[0].least or many[0].rows), []
    rest = e.b.not_(few)
    if chunks.serves(how):
        phases.append(_chunked(e, how, operands, finish, make))
        few, rest = (e.b.and_(each, e.b.not_(chunks.holds(e, e.rows))) for each in (few, rest))
    for holds, mine, tile in ((rest, many, many[0]), (few, some, some[-1])):
        vectors = widest(how, tile)
        phases.append(phase := e.phase(e.choose(holds, how.padded // (LANES * vectors), 0)))
        with e.units(*phase) as unit:
            if make is not None:
                make()
            ahead = e.add(unit, e.field(e.frame, FRAME["threads"])) if tile.rows > 1 and reads_ahead(how) else None
            read = operands._replace(ahead=ahead)
            _rows(e, how, read, unit, (e.i(0), e.rows), mine, vectors, finish)
    return phases


def _chunked(e: Job, how: Product, operands: Operands, finish: Finish, make: Once | None) -> Phase:
    """Multiply as :func:`product` if the rows are as many as :mod:`preheat.backends.cpu.llvm.chunks` says."""
    vectors = chunks.vectors_of(how)
    room, width = e.room(chunks.MOST * vectors * LANES), vectors * LANES
    phase = e.phase(e.choose(chunks.holds(e, e.rows), how.padded // width, 0))
    with e.units(*phase) as unit:
        if make is not None:
            make()
        ahead = e.add(unit, e.field(e.frame, FRAME["threads"]))
        weights = chunks.Weights(operands.weight, partial(weight_at, e, how, operands.weight), unit, ahead)
        chunks.add_up(e, how, weights, operands.row, e.rows, room)
        with e.loop(0, e.rows) as row:
            sums = e.at(room, e.mul(row, width))
            _finish(e, how, operands, unit, row, [e.vector(sums, LANES * at) for at in range(vectors)], finish)
    return phase


def visited_product(
    e: Job, how: Product, name: str, visits: Visits, row_at: Callable[[Value], Value], finish: Finish,
    make: Once | None = None,
) -> Phase:  # fmt: skip
    """Multiply rows by the matrices of ``visits``.

    The matrices lie one behind the other at ``name`` of the layer's frame. A unit is a matrix and a block of its
    outputs. Returns the phase to wait for.
    """
    operands = _operands(e, how, name, row_at, visits.slots)
    if operands.terms is not None:
        wait(e, [shrink(e, how, operands.terms, visits.rows, row_at, make)])
    many = tiles(how).many
    vectors = widest(how, many[0])
    blocks = how.padded // (LANES * vectors)
    phase = e.phase(e.mul(e.field(visits.visited, 0), blocks))
    step = e.field(e.layer, LAYER_FRAME[f"{name}_step"])
    with e.units(*phase) as unit:
        if make is not None:
            make()
        number = e.field(visits.visited, e.add(e.div(unit, blocks), 1))
        start, end = (e.field(visits.starts, e.add(number, more)) for more in (0, 1))
        mine = operands._replace(weight=e.at(operands.weight, e.mul(number, step), BYTE))
        if operands.bias is not None:
            mine = mine._replace(bias=e.at(operands.bias, e.mul(number, how.padded)))
        _rows(e, how, mine, e.rem(unit, blocks), (start, end), many, vectors, finish)
    return phase


def _operands(e: Job, how: Product, name: str, row_at: Callable[[Value], Value], slots: Value) -> Operands:
    """Return the operands of the product ``name`` of the layer's frame; ``slots`` are the rows' adapter slots."""
    bias = e.part(f"{name}_bias") if how.bias else None
    terms = None if how.terms is None else Adapted(e.part(f"{name}_terms"), slots)
    return Operands(e.part(name), row_at, bias, terms)


def _rows(
    e: Job, how: Product, operands: Operands, unit: Value, span: tuple[Value, Value], some: Sequence[Tile],
    vectors: int, finish: Finish,
) -> None:  # fmt: skip
    """Multiply the rows of ``span`` (first, end) by a unit's outputs, in groups of ``some`` tiles, largest first.

    The sums of a group wait in memory for their last steps, which are written once for all its rows.
    """
    start, end = span
    parts = list[_Part]()
    for tile in some:
        lacking = tile.rows - tile.least if tile.least else 0
        groups = e.div(e.add(e.sub(end, start), lacking), tile.rows)
        parts.append((tile, start, stop := e.add(start, e.mul(groups, tile.rows))))
        start = e.least(stop, end) if lacking else stop
    asking = [each for each in parts if operands.ahead is not None and each[0].vectors == some[0].vectors]
    for part in parts:
        tile, start, stop = part
        rows, last = tile.rows, e.sub(end, 1)
        with e.loop(start, stop, rows) as first:
            places = [e.add(first, place) for place in range(rows)]
            x = [operands.row(e.least(place, last) if tile.least else place) for place in places]
            ahead = _ahead(e, how, operands, asking, (part, first), vectors) if part in asking else None
            found = sums(e, how, operands.weight, unit, x, tile.vectors, vectors, ahead)
            if rows == 1:
                _finish(e, how, operands, unit, first, found[0], finish)
                continue
            room = e.room(rows * vectors * LANES)
            for at, each in enumerate(chain(*found)):
                e.store(each, room, at * LANES)
            with e.loop(0, e.least(e.i(rows), e.sub(end, first)) if tile.least else rows) as place:
                line = [e.vector(room, e.add(e.mul(place, vectors * LANES), at * LANES)) for at in range(vectors)]
                _finish(e, how, operands, unit, e.add(first, place), line, finish)


def _ahead(
    e: Job, how: Product, operands: Operands, asking: Sequence[_Part], here: tuple[_Part, Value], vectors: int
) -> Ahead:  # fmt: skip
    """Return the part of the next unit's weights to ask for while the group of rows from ``first`` on is summed.

    The groups of the parts ``asking`` share the unit evenly, so that its bytes arrive while all of them are summed.
    ``here`` are the part of the group, and ``first``.
    """
    (mine, first), all_groups, number = here, e.i(0), e.i(0)
    for part in asking:
        tile, start, stop = part
        groups = e.div(e.sub(stop, start), tile.rows)
        if part is mine:
            number = e.add(all_groups, e.div(e.sub(first, start), tile.rows))
        all_groups = e.add(all_groups, groups)
    at_once, bytes_ = mine[0].vectors, vector_bytes(how)
    step = e.div(at_once * bytes_ // how.inputs, all_groups)
    steps = vectors // at_once * how.inputs  # of a group
    unit = e.at(operands.weight, e.mul(operands.ahead, vectors * bytes_), BYTE)
    return Ahead(e.at(unit, e.mul(e.mul(number, steps), step), BYTE), step)


def _finish(
    e: Job, how: Product, operands: Operands, unit: Value, row: Value, line: list[Value], finish: Finish
) -> None:
    """Add the bias and the adapter's term to a unit's outputs, apply the activation, clip or scale, and store."""
    first = e.mul(unit, LANES * len(line))
    if operands.bias is not None:
        line = [e.b.fadd(each, e.vector(operands.bias, e.add(first, LANES * at))) for at, each in enumerate(line)]
    if operands.terms is not None:
        line = add_terms(e, how, operands.terms, row, e.mul(unit, len(line) // 2), line)
    if how.activation is not None:
        activate = ACTIVATIONS[how.activation]
        if how.gated:  # a panel of gates, then the panel of their ups
            gates, ups = ([line[4 * (at // 2) + part + at % 2] for at in range(len(line) // 2)] for part in (0, 2))
            changed = UPS.get(how.activation)
            ups = ups if changed is None else [changed(e, up) for up in ups]
            line = [e.b.fmul(activate(e, gate), up) for gate, up in zip(gates, ups, strict=True)]
        else:
            line = [activate(e, each) for each in line]
    if how.clip is not None:
        line = [kept_between(e, each, how.clip) for each in line]
    if how.factor is not None:
        line = [e.b.fmul(each, e.v(how.factor)) for each in line]
    first = e.mul(unit, LANES * len(line))
    for at, each in enumerate(line):
        finish(row, e.add(first, LANES * at), each)


def edge(e: Function, width: int, column: Value) -> Value | None:
    """Return a mask of the lanes from ``column`` on that a row of ``width`` results has, None where it has all."""
    return None if width % PANEL == 0 else e.first(e.sub(width, column))


def stored(e: Job, out: Value, width: int) -> Finish:
    """Return a finish that stores results in rows of ``width`` numbers at ``out``."""

    def finish(row: Value, column: Value, vector: Value) -> None:
        e.put(vector, out, e.add(e.mul(row, width), column), edge(e, width, column))

    return finish


def added(e: Job, out: Value, width: int) -> Finish:
    """Return a finish that adds results to rows of ``width`` numbers at ``out``."""

    def finish(row: Value, column: Value, vector: Value) -> None:
        at, mask = e.add(e.mul(row, width), column), edge(e, width, column)
        e.put(e.b.fadd(e.vector(out, at, mask), vector), out, at, mask)

    return finish
