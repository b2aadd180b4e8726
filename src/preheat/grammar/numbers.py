"""Numbers of JSON within bounds, as nodes. Bounds are decimal numbers of any length: nothing is rounded."""

from __future__ import annotations

from decimal import Decimal

from preheat.grammar.characters import of
from preheat.grammar.nodes import EMPTY, NOTHING, Node, alt, chars, optional, repeat, seq, text

DIGIT = chars(of("0123456789"))
SOME, MORE = repeat(DIGIT, 1), repeat(DIGIT)
ZERO, POSITIVE = text("0"), seq(repeat(DIGIT), chars(of("123456789")), repeat(DIGIT))
"""``POSITIVE``: digits, at least one of them not zero."""

INTEGER = seq(optional(text("-")), alt(ZERO, seq(chars(of("123456789")), MORE)))
NUMBER = seq(
    INTEGER,
    optional(seq(text("."), SOME)),
    optional(seq(chars(of("eE")), optional(chars(of("+-"))), SOME)),
)


def digits(low: int, high: int, count: int, base: int = 10) -> Node:
    """Return the numbers from ``low`` to ``high``, of ``count`` digits."""
    if count == 0:
        return EMPTY
    if (low, high) == (0, base**count - 1):
        return repeat(_digit(0, base - 1), count, count)
    unit = base ** (count - 1)
    first, last = low // unit, high // unit
    if first == last:
        return seq(_digit(first, first), digits(low % unit, high % unit, count - 1, base))
    parts = list[Node]()
    if low % unit:
        parts.append(seq(_digit(first, first), digits(low % unit, unit - 1, count - 1, base)))
        first += 1
    if high % unit != unit - 1:
        parts.append(seq(_digit(last, last), digits(0, high % unit, count - 1, base)))
        last -= 1
    if first <= last:
        parts.append(seq(_digit(first, last), digits(0, unit - 1, count - 1, base)))
    return alt(*parts)


def _digit(low: int, high: int) -> Node:
    letters = "0123456789abcdef"[low : high + 1]
    return chars(of(letters + letters.upper()))


def integers(low: int | None, high: int | None) -> Node:
    """Return the integers from ``low`` to ``high``; None: without end."""
    if low is None and high is None:
        return INTEGER
    negative: Node = NOTHING
    natural: Node = NOTHING
    if low is None or low < 0:
        negative = _naturals(max(1, -high) if high is not None else 1, None if low is None else -low)
    if high is None or high >= 0:
        natural = _naturals(max(0, low or 0), high)
    return alt(seq(text("-"), negative), natural)


def _naturals(low: int, high: int | None) -> Node:
    """Return the integers from ``low``, at least 0, to ``high``."""
    if high is not None and low > high:
        return NOTHING
    least, most = len(str(low)), None if high is None else len(str(high))
    if most == least:
        return digits(low, high or 0, least)
    longer = seq(chars(of("123456789")), repeat(DIGIT, least, None if most is None else most - 2))
    found = [digits(low, 10**least - 1, least)]
    if most is None or most - least > 1:
        found.append(longer)
    if high is not None and most is not None:
        found.append(digits(10 ** (most - 1), high, most))
    return alt(*found)


Bound = tuple[Decimal, bool]
"""A bound, and whether the bound itself is allowed."""


def decimals(low: Bound | None, high: Bound | None) -> Node:
    """Return the numbers from ``low`` to ``high``, without exponents where there is a bound."""
    if low is None and high is None:
        return NUMBER
    negative: Node = NOTHING
    natural: Node = NOTHING
    if low is None or low[0] < 0:
        least = (high[0].copy_negate(), high[1]) if high is not None and high[0] < 0 else (Decimal(0), False)
        negative = _magnitudes(least, None if low is None else (low[0].copy_negate(), low[1]))
    if high is None or high[0] >= 0:
        natural = _magnitudes(low if low is not None and low[0] >= 0 else (Decimal(0), True), high)
    return alt(seq(text("-"), negative), natural)


def _magnitudes(low: Bound, high: Bound | None) -> Node:
    """Return the numbers from ``low``, at least 0, to ``high``, without signs."""
    first, least = _cut(low[0])
    if high is None:
        return alt(_with(first, _above(least, low[1]), not least and low[1]), _any_fraction(_naturals(first + 1, None)))
    last, most = _cut(high[0])
    if low[0] > high[0]:
        return NOTHING
    if first == last:
        return _with(first, _between(least, most, low[1], high[1]), not least and low[1] and (bool(most) or high[1]))
    return alt(
        _with(first, _above(least, low[1]), not least and low[1]),
        _any_fraction(_naturals(first + 1, last - 1)),
        _with(last, _below(most, high[1]), bool(most) or high[1]),
    )


def _cut(value: Decimal) -> tuple[int, str]:
    """Return the whole part of a number and its decimals, without zeros at the end."""
    whole, _, fraction = format(value, "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _any_fraction(whole: Node) -> Node:
    return seq(whole, optional(seq(text("."), SOME)))


def _with(whole: int, fraction: Node, none: bool) -> Node:
    """Return ``whole`` with one of the fractions; ``none``: or without a fraction."""
    behind = seq(text("."), fraction)
    return seq(text(str(whole)), optional(behind) if none else behind)


def _above(least: str, itself: bool) -> Node:
    """Return the digits of fractions from ``least`` on, at least one digit."""
    if not least:
        return SOME if itself else POSITIVE
    first, rest = int(least[0]), least[1:]
    behind = _above(rest, itself)
    return alt(
        seq(text(least[0]), alt(behind, EMPTY) if not rest and itself else behind),
        seq(_digit(first + 1, 9), MORE) if first < 9 else NOTHING,
    )


def _below(most: str, itself: bool) -> Node:
    """Return the digits of fractions up to ``most``, at least one digit."""
    if not most:
        return repeat(ZERO, 1) if itself else NOTHING
    first, rest = int(most[0]), most[1:]
    behind = _below(rest, itself)
    return alt(
        seq(text(most[0]), alt(behind, EMPTY) if rest or itself else behind),
        seq(_digit(0, first - 1), MORE) if first else NOTHING,
    )


def _between(least: str, most: str, itself: bool, most_itself: bool) -> Node:
    """Return the digits of fractions from ``least`` to ``most``, at least one digit."""
    if not least and not most:
        return repeat(ZERO, 1) if itself and most_itself else NOTHING
    one, other = least[:1] or "0", most[:1] or "0"
    rest, end = least[1:], most[1:]
    if one == other:
        ends = not rest and itself and (bool(end) or most_itself)
        inner = _between(rest, end, itself, most_itself)
        return seq(text(one), alt(inner, EMPTY) if ends else inner)
    low, high = _above(rest, itself), _below(end, most_itself)
    return alt(
        seq(text(one), alt(low, EMPTY) if not rest and itself else low),
        seq(_digit(int(one) + 1, int(other) - 1), MORE) if int(other) - int(one) > 1 else NOTHING,
        seq(text(other), alt(high, EMPTY) if end or most_itself else high),
    )
