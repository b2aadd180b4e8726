"""Terms of adapters: rows shrunk by their adapter's first matrices, and expanded where a product ends.

Contract, as in :mod:`preheat.ops.matmul`. The inputs are cut into parts of 512 from the first one on. A part is one sum
over its inputs in order, and the sums of the parts are added from the first to the last. The sum is multiplied by the
adapter's scale, and rounded to bfloat16 where the model and its adapters are of bfloat16. A tile is one sum over its 16
ranks in order, and the tiles' sums are added from the first to the last. The term is added to the output behind the
bias and before the activation. A row without an adapter is skipped. Where the row's adapter has no matrices, -0.0 is
added: it changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from llvmlite import ir

from preheat.backends.cpu.llvm.emit import LANES, LONG, POINTER, WORD, WORDS, Function, Value
from preheat.backends.cpu.llvm.job import Job, Once, Phase
from preheat.backends.cpu.llvm.kinds import FRAME, PANEL, TERMS, Product, Terms
from preheat.backends.cpu.llvm.narrow import NARROW
from preheat.ops.matmul import NOTHING
from preheat.ops.values import PART, TILE

PARTS_AT_ONCE = 4
"""Parts of the inputs that are summed side by side. Changes no bits."""

assert TILE == LANES, "a tile of ranks is one vector"


class Adapted(NamedTuple):
    """Addresses of the frame of a layer's adapter slots, and of each row's slot; negative numbers for none.

    Where each row meets one of several matrices, the layer has slots for each of them: slot * matrices + matrix.
    """

    frame: Value
    slots: Value


def pair(e: Function, terms: Terms, slot: Value, part: Value) -> Value:
    """Return the number of the matrices of ``part`` of the adapter in ``slot``."""
    return e.add(e.mul(slot, terms.parts), part)


def shrink(
    e: Job, how: Product, adapted: Adapted, rows: Value, row_at: Callable[[Value], Value], make: Once | None
) -> Phase:
    """Shrink the rows with adapters, of ``rows`` rows.

    ``row_at(row)`` is the address of a row's inputs; ``make`` fills the inputs. A unit is a row and a part of
    the outputs.
    """
    terms = how.terms
    assert terms is not None
    names = "first", "tiles", "scales", "rounded"
    first, tiles, scales, rounded = (e.field(adapted.frame, TERMS[name], POINTER) for name in names)
    shrunk, any_row = e.pointer("shrunk"), e.less(0, e.field(e.frame, FRAME["adapted"]))
    phase = e.phase(e.choose(any_row, e.mul(rows, terms.parts), 0))
    with e.units(*phase) as unit:
        row, part = e.div(unit, terms.parts), e.rem(unit, terms.parts)
        slot = e.field(adapted.slots, row)
        with e.when(e.less(-1, slot)):
            number = pair(e, terms, slot, part)
            count = e.field(tiles, number)
            if make is not None:
                with e.when(e.less(0, count)):
                    make()
            with e.loop(0, count) as tile:
                place = e.mul(e.add(e.mul(number, terms.tiles), tile), how.inputs * TILE)
                sums = _sums(e, how.inputs, row_at(row), e.at(first, place))
                scaled = e.b.fmul(sums, e.splat(e.load(scales, number)))
                halves = e.less(0, e.field(rounded, number))
                scaled = e.b.select(
                    halves, NARROW["bfloat16"].widened(e, NARROW["bfloat16"].narrowed(e, scaled)), scaled
                )
                e.store(scaled, shrunk, e.mul(e.add(e.mul(unit, terms.tiles), tile), TILE))
    return phase


def _sums(e: Function, inputs: int, x: Value, first: Value) -> Value:
    """Return the products of the row at ``x`` with a tile [inputs, 16] of a first matrix."""
    whole = [(at, PART) for at in range(0, inputs - PART + 1, PART)]
    groups = [whole[at : at + PARTS_AT_ONCE] for at in range(0, len(whole), PARTS_AT_ONCE)]
    if inputs % PART:
        groups.append([(inputs - inputs % PART, inputs % PART)])
    found = list[Value]()
    for group in groups:
        totals = [e.variable(e.v(0.0)) for _ in group]
        with e.loop(0, group[0][1]) as k:
            for (start, _), total in zip(group, totals, strict=True):
                at = e.add(k, start)
                e.set(total, e.fma(e.vector(first, e.mul(at, TILE)), e.splat(e.load(x, at)), e.get(total)))
        found += [e.get(total) for total in totals]
    return reduce(e.b.fadd, found)


def add_terms(e: Job, how: Product, adapted: Adapted, row: Value, panel: Value, line: list[Value]) -> list[Value]:
    """Return a row's outputs in panels from ``panel`` on, ``line``, plus the term of the row's adapter."""
    terms = how.terms
    assert terms is not None
    slot, found = e.field(adapted.slots, row), [e.variable(each) for each in line]
    term = [e.variable(e.v(0.0)) for _ in (0, 1)]
    call = _expand(e.module, how, terms)
    with e.when(e.less(-1, slot)):
        shrunk = e.at(e.pointer("shrunk"), e.mul(row, terms.parts * terms.tiles * TILE))
        for place in range(len(line) // 2):
            e.b.call(call, [adapted.frame, shrunk, slot, e.add(panel, place), *term])
            for total, more in zip(found[2 * place :], term, strict=False):
                e.set(total, e.b.fadd(e.get(total), e.get(more)))
    return [e.get(total) for total in found]


def _expand(module: ir.Module, how: Product, terms: Terms) -> ir.Function:
    """Return the function that expands a row for a panel: two vectors.

    Its arguments are the frame of the adapter slots, the shrunk row, its adapter slot, the panel, and two addresses
    for the results. Products with the same outputs and terms share it.
    """
    name = f"expand_{how.padded}_{terms.parts}_{terms.tiles}"
    if (known := module.globals.get(name)) is not None:
        return known
    e = Function(module, name, [POINTER, POINTER, LONG, LONG, POINTER, POINTER])
    e.function.linkage = "internal"
    e.function.attributes.add("noinline")
    frame, shrunk, slot, panel, *out = e.args
    second, tiles, parts, lanes = (e.field(frame, TERMS[x], POINTER) for x in ("second", "tiles", "parts", "lanes"))
    low, high = (e.field(parts, e.add(e.mul(panel, 2), place)) for place in (0, 1))
    found = [e.variable(e.v(NOTHING)) for _ in out]
    with e.loop(low, high) as part:
        totals = [e.variable(e.v(NOTHING)) for _ in out]
        with e.loop(0, e.field(tiles, pair(e, terms, slot, part))) as tile:
            ranks = e.mul(e.add(e.mul(slot, terms.tiles), tile), TILE)
            row = e.at(shrunk, e.mul(e.add(e.mul(part, terms.tiles), tile), TILE))
            sums = [e.v(0.0) for _ in out]
            for rank in range(TILE):
                factor = e.splat(e.load(row, rank))
                at = e.add(e.mul(e.add(ranks, rank), how.padded), e.mul(panel, PANEL))
                columns = [e.vector(second, e.add(at, LANES * half)) for half in (0, 1)]
                sums = [e.fma(each, factor, sum_) for each, sum_ in zip(columns, sums, strict=True)]
            for total, sum_ in zip(totals, sums, strict=True):
                e.set(total, e.b.fadd(e.get(total), sum_))
        mine = e.splat(e.b.trunc(part, WORD), WORDS)
        for half, (each, total) in enumerate(zip(found, totals, strict=True)):
            at = e.at(lanes, e.add(e.mul(panel, PANEL), LANES * half), WORD)
            own = e.b.icmp_signed("==", e.b.load(at, typ=WORDS, align=4), mine)
            e.set(each, e.b.select(own, e.get(total), e.get(each)))
    for place, each in zip(out, found, strict=True):
        e.store(e.get(each), place)
    e.close()
    return e.function
