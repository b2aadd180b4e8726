"""Products of rows with codes in panels: int8, int4 and fp4, with scales and zero points.

Contract. A code less its zero point is exact. The products of a group are one sum over its inputs in order, from zero.
Group by group the sum times the scale joins the output, in one fused multiply-add. A scale for each output is the
scale of one group with all inputs. Where a list names the group of each input, the difference times its scale is
rounded to float32, and an output is one sum over all inputs in order.

Layout of a panel. Each group has its codes, its 32 scales, then its 32 zero points in bfloat16, without rounding.
Codes of int8 lie side by side for each input. A word of four-bit codes has eight inputs of one output; int4 is stored
plus 8, fp4 as the bits of e2m1.
With a list the panels follow the list; a panel has all codes, then all scales, then all zero points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from preheat.backends.cpu.llvm.emit import BYTE, BYTES, FLOATS, LANES, LONG, WORD, WORDS, Function, Value
from preheat.backends.cpu.llvm.kinds import IN_WORD, PANEL, Product, Stored
from preheat.backends.cpu.llvm.narrow import numbers

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a scale or a zero point."""

AT_ONCE = IN_WORD
"""Inputs that are read together."""

AHEAD, CACHE_LINE = 2048, 64
"""Bytes from codes in use to codes that are asked for, and the bytes of one such question."""

_MANTISSA, _BIAS = 23, 127


class Layout(NamedTuple):
    """Bytes of a weight's parts: of the list before the panels, of a panel, and inside of a panel.

    ``scales`` and ``zeros`` begin at group 0; ``step`` leads to the next group's. ``group`` leads from the codes of a
    group to the next group's.
    """

    first: int
    panel: int
    group: int
    scales: int
    zeros: int
    step: tuple[int, int]


def layout(how: Product) -> Layout:
    """Return where the parts of a weight lie."""
    scales = how.scales
    assert scales is not None
    groups, bits = how.inputs // scales.group, 8 if how.stored == "int8" else 4
    codes, each, zero = (
        PANEL * scales.group * bits // 8,
        PANEL * SIZES[scales.stored],
        PANEL * SIZES["bfloat16"] * scales.zeros,
    )
    if scales.indexed:
        all_codes, all_scales = groups * codes, groups * each
        whole = all_codes + all_scales + groups * zero
        return Layout(4 * how.inputs, whole, 0, all_codes, all_codes + all_scales, (each, zero))
    whole = codes + each + zero
    return Layout(0, groups * whole, whole, codes, codes + each, (whole, whole))


class Codes:
    """Reader of the codes, scales and zero points of some panels, from ``panel`` on: ``vectors`` vectors of outputs."""

    def __init__(self, e: Function, how: Product, weight: Value, panel: Value, vectors: int) -> None:
        assert how.scales is not None
        self.e, self.how, self.scales, self._list = e, how, how.scales, weight
        self._places = layout(how)
        base = e.add(self._places.first, e.mul(panel, self._places.panel))
        self._panels = [e.at(weight, e.add(base, number * self._places.panel), BYTE) for number in range(vectors // 2)]

    def group_of(self, k: Value) -> Value:
        """Return the group of input ``k``, from the list."""
        return self.e.b.sext(self.e.load(self._list, k, WORD), LONG)

    def read_scales(self, group: Value) -> list[Value]:
        """Return the vectors of scales of a group, as floats."""
        return self._numbers(self.scales.stored, self._places.scales, self._places.step[0], group)

    def read_zeros(self, group: Value) -> list[Value] | None:
        """Return the vectors of zero points of a group, as floats."""
        if not self.scales.zeros:
            return None
        return self._numbers("bfloat16", self._places.zeros, self._places.step[1], group)

    def _numbers(self, stored: Stored, first: int, step: int, group: Value) -> list[Value]:
        places = self._halves(self.e.add(first, self.e.mul(group, step)), LANES * SIZES[stored])
        return [numbers(self.e, place, stored) for place in places]

    def read(self, group: Value, k: Value, zeros: list[Value] | None) -> Iterator[list[Value]]:
        """Yield the vectors of codes, less their ``zeros``, of :data:`AT_ONCE` inputs from ``k`` on of a group."""
        e, bits = self.e, 8 if self.how.stored == "int8" else 4
        each = PANEL * bits // 8
        at = e.add(e.mul(group, self._places.group), e.mul(k, each))
        for panel in self._panels:
            for line in range(0, AT_ONCE * each, CACHE_LINE):
                e.prefetch(e.at(panel, e.add(at, line, AHEAD), BYTE))
        if self.how.stored != "int8":
            words = [e.b.load(place, typ=WORDS, align=4) for place in self._halves(at, 4 * LANES)]
            yield from _floats(e, words) if self.how.stored == "fp4" else _unpacked(e, words, zeros)
            return
        for place in range(AT_ONCE):
            places = self._halves(e.add(at, place * each), LANES)
            whole = [e.b.sitofp(e.b.load(each, typ=BYTES, align=1), FLOATS) for each in places]
            yield whole if zeros is None else [e.b.fsub(*pair) for pair in zip(whole, zeros, strict=True)]

    def _halves(self, at: Value, size: int) -> list[Value]:
        """Return the addresses of two vectors of ``size`` bytes in each panel, from byte ``at`` on."""
        return [self.e.at(panel, self.e.add(at, half * size), BYTE) for panel in self._panels for half in (0, 1)]


def _unpacked(e: Function, words: list[Value], zeros: list[Value] | None) -> Iterator[list[Value]]:
    """Yield the codes in ``words``, less 8 and their zero points.

    A code stays where it lies, at bit p: as the last bits of a float it stands for 2 ** (23 - p) + code. The difference
    from 2 ** (23 - p) + 8 is exact, and so is the difference with the zero point added. The upper half of a word is
    shifted down first.
    """
    b = e.b
    for place in range(IN_WORD):
        if place == IN_WORD // 2:
            words = [b.lshr(word, e.w(4 * place)) for word in words]
        bit = 4 * (place % (IN_WORD // 2))
        exponent, offset = _BIAS + _MANTISSA - bit << _MANTISSA, e.v(float(2 ** (_MANTISSA - bit) + 8))
        bits = [b.or_(b.and_(word, e.w(15 << bit)), e.w(exponent)) for word in words]
        less = [offset] * len(words) if zeros is None else [b.fadd(zero, offset) for zero in zeros]
        yield [b.fsub(b.bitcast(each, FLOATS), one) for each, one in zip(bits, less, strict=True)]


def _floats(e: Function, words: list[Value]) -> Iterator[list[Value]]:
    """Yield twice the numbers of e2m1 in ``words``.

    Behind float32's exponent of 1 the bits of e2m1 are twice the number, if that is 2 or more. A lesser one is read as
    if a one stood in front: 1 is read for 0, and 3/2 for 1. Twice the number read, less 2, is right there, and too
    great elsewhere.
    """
    b, one = e.b, _BIAS << _MANTISSA
    for place in range(IN_WORD):
        tops = [b.shl(word, e.w(4 * (IN_WORD - 1 - place))) for word in words]
        sizes = [b.and_(b.lshr(top, e.w(6)), e.w(7 << _MANTISSA - 1)) for top in tops]
        reads = [b.bitcast(b.add(size, e.w(one)), FLOATS) for size in sizes]
        least = [b.fsub(b.fadd(each, each), e.v(2.0)) for each in reads]
        found = [b.select(b.fcmp_ordered("<", *pair), *pair) for pair in zip(least, reads, strict=True)]
        signs = [b.and_(top, e.w(-(1 << 31))) for top in tops]
        yield [b.bitcast(b.xor(b.bitcast(each, WORDS), sign), FLOATS) for each, sign in zip(found, signs, strict=True)]


def sums(e: Function, how: Product, weight: Value, unit: Value, x: Sequence[Value], vectors: int) -> list[list[Value]]:
    """Return the products of rows with a unit's outputs: [row][vector], as for plain numbers."""
    read = Codes(e, how, weight, e.mul(unit, vectors // 2), vectors)
    totals = _zeros(e, len(x), vectors)
    if read.scales.indexed:
        _add_indexed(e, read, x, totals)
    else:
        _add_groups(e, read, x, totals)
    return [[e.get(total) for total in line] for line in totals]


def _add_groups(e: Function, read: Codes, x: Sequence[Value], totals: list[list[Value]]) -> None:
    how, size = read.how, read.scales.group
    with e.loop(0, how.inputs // size) as group:
        parts, zeros = _zeros(e, len(totals), len(totals[0])), read.read_zeros(group)
        with e.loop(0, size, AT_ONCE) as k:
            first = e.add(e.mul(group, size), k)
            for place, codes in enumerate(read.read(group, k, zeros)):
                _add(e, codes, x, e.add(first, place), parts)
        scales = read.read_scales(group)
        for line, part in zip(totals, parts, strict=True):
            for total, each, scale in zip(line, part, scales, strict=True):
                e.set(total, e.fma(e.get(each), scale, e.get(total)))


def _add_indexed(e: Function, read: Codes, x: Sequence[Value], totals: list[list[Value]]) -> None:
    """Add all inputs in order, each with the scale and the zero point of its own group."""
    b = e.b
    with e.loop(0, read.how.inputs, AT_ONCE) as k:
        for place, codes in enumerate(read.read(e.i(0), k, None)):
            at = e.add(k, place)
            group = read.group_of(at)
            zeros, scales = read.read_zeros(group), read.read_scales(group)
            whole = codes if zeros is None else [b.fsub(*pair) for pair in zip(codes, zeros, strict=True)]
            weights = [b.fmul(*pair) for pair in zip(whole, scales, strict=True)]
            _add(e, weights, x, at, totals)


def _add(e: Function, weights: list[Value], x: Sequence[Value], k: Value, totals: list[list[Value]]) -> None:
    """Add the products of input ``k`` of each row."""
    for row, line in zip(x, totals, strict=True):
        factor = e.splat(e.load(row, k))
        for total, each in zip(line, weights, strict=True):
            e.set(total, e.fma(each, factor, e.get(total)))


def _zeros(e: Function, rows: int, vectors: int) -> list[list[Value]]:
    """Return variables that are zero wherever the code comes by."""
    return [[e.variable(e.v(0.0)) for _ in range(vectors)] for _ in range(rows)]
