"""Products of rows with a weight in panels."""

from __future__ import annotations

from collections.abc import Callable

from preheat.backends.cpu.llvm import codes
from preheat.backends.cpu.llvm.activations import ACTIVATIONS, kept_between
from preheat.backends.cpu.llvm.emit import FLOATS, HALF, LANES, WORDS, Function, Value
from preheat.backends.cpu.llvm.job import Job, Phase
from preheat.backends.cpu.llvm.kinds import PANEL, Product, Stored
from preheat.backends.cpu.llvm.narrow import numbers

ROWS_AT_ONCE = 4
"""Rows that read a weight together, where there are as many. Changes no bits."""

VECTORS = {1: 8, ROWS_AT_ONCE: 4}
"""Most vectors of outputs that so many rows sum at once; 16 sums fit into registers."""

VECTORS_OF_CODES = 4
"""Most vectors of outputs that are summed at once from codes: they need registers before they are floats."""


def weights_at(e: Function, stored: Stored, weight: Value, panel: Value, inputs: int, k: Value) -> list[Value]:
    """Return the two vectors of input ``k`` in a panel, as floats."""
    at = e.mul(e.add(e.mul(panel, inputs), k), PANEL)
    if stored == "float32":
        return [e.vector(weight, e.add(at, LANES * half)) for half in (0, 1)]
    if stored == "float16":
        return [numbers(e, e.at(weight, e.add(at, LANES * half), HALF), stored) for half in (0, 1)]
    words = e.b.load(e.at(weight, at, HALF), typ=WORDS, align=4)  # a word: outputs j and j + 16
    return [e.b.bitcast(e.b.shl(words, e.w(16)), FLOATS), e.b.bitcast(e.b.and_(words, e.w(-65536)), FLOATS)]


def sums(e: Function, how: Product, weight: Value, unit: Value, x: Value, rows: int, vectors: int) -> list[list[Value]]:
    """Return the products of rows with a unit's outputs: [row][vector].

    The ``rows`` rows lie at ``x``; the ``unit`` has ``vectors`` vectors of outputs.
    """
    if how.scales is not None:
        return codes.sums(e, how, weight, unit, x, rows, vectors)
    totals = [[e.variable(e.v(0.0)) for _ in range(vectors)] for _ in range(rows)]
    for line in totals:
        for total in line:
            e.set(total, e.v(0.0))
    panels = [e.add(e.mul(unit, vectors // 2), number) for number in range(vectors // 2)]
    with e.loop(0, how.inputs) as k:
        weights = [each for panel in panels for each in weights_at(e, how.stored, weight, panel, how.inputs, k)]
        for row, line in enumerate(totals):
            factor = e.splat(e.load(x, e.add(k, row * how.inputs)))
            for total, each in zip(line, weights, strict=True):
                e.set(total, e.fma(each, factor, e.get(total)))
    return [[e.get(total) for total in line] for line in totals]


def widest(how: Product, rows: int) -> int:
    """Return the most vectors that a unit may have, for ``rows`` rows at once.

    The outputs must be a multiple of a unit's vectors. Gates lie beside their ups, so a gated unit has at least 4.
    """
    least = 4 if how.gated else 2
    most = VECTORS[rows] if how.scales is None else min(VECTORS[rows], VECTORS_OF_CODES)
    options = [each for each in (8, 4, 2) if least <= each <= most and how.padded % (each * LANES) == 0]
    return options[0]


def product(
    e: Job,
    how: Product,
    weight: Value,
    bias: Value | None,
    x: Value,
    finish: Callable[[Value, Value, Value], None],
    make: Callable[[], None] | None = None,
) -> list[Phase]:
    """Multiply the rows at ``x`` by a weight.

    ``finish(row, column, vector)`` stores 16 results. ``make`` fills ``x`` first, in each thread for itself. Returns
    the phases to wait for.
    """
    made = None if make is None else e.variable(e.i(0))
    if made is not None:
        e.set(made, e.i(0))
    phases, start = [], e.i(0)
    for rows in (ROWS_AT_ONCE, 1):
        vectors = widest(how, rows)
        stop = e.add(start, e.mul(e.div(e.sub(e.rows, start), rows), rows))
        count = e.choose(e.less(start, stop), how.padded // (LANES * vectors), 0)
        phases.append(phase := e.phase(count))
        with e.units(*phase) as unit:
            if made is not None and make is not None:
                with e.when(e.b.icmp_signed("==", e.get(made), e.i(0))):
                    make()
                    e.set(made, e.i(1))
            with e.loop(start, stop, rows) as row:
                found = sums(e, how, weight, unit, e.at(x, e.mul(row, how.inputs)), rows, vectors)
                for place, line in enumerate(found):
                    _finish(e, how, bias, unit, e.add(row, place), line, finish)
        start = stop
    return phases


def _finish(
    e: Function, how: Product, bias: Value | None, unit: Value, row: Value, line: list[Value],
    finish: Callable[[Value, Value, Value], None],
) -> None:  # fmt: skip
    """Add the bias of a unit's outputs, apply the activation, clip, and store."""
    if bias is not None:
        first = e.mul(unit, LANES * len(line))
        line = [e.b.fadd(each, e.vector(bias, e.add(first, LANES * at))) for at, each in enumerate(line)]
    if how.activation is not None:
        activate = ACTIVATIONS[how.activation]
        if how.gated:  # a panel of gates, then the panel of their ups
            gates, ups = ([line[4 * (at // 2) + part + at % 2] for at in range(len(line) // 2)] for part in (0, 2))
            line = [e.b.fmul(activate(e, gate), up) for gate, up in zip(gates, ups, strict=True)]
        else:
            line = [activate(e, each) for each in line]
    if how.clip is not None:
        line = [kept_between(e, each, how.clip) for each in line]
    first = e.mul(unit, LANES * len(line))
    for at, each in enumerate(line):
        finish(row, e.add(first, LANES * at), each)


def edge(e: Function, width: int, column: Value) -> Value | None:
    """Return a mask of the lanes from ``column`` on that a row of ``width`` results has, None where it has all."""
    return None if width % PANEL == 0 else e.first(e.sub(width, column))
