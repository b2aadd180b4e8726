"""JSON strings: all spellings of a text by RFC 8259, section 7."""

from __future__ import annotations

from functools import lru_cache

from preheat.grammar.characters import Ranges, common, of, others, ranges
from preheat.grammar.nodes import (
    EVERYTHING,
    Alt,
    Both,
    Chars,
    Node,
    Not,
    Repeat,
    Seq,
    alt,
    both,
    chars,
    repeat,
    seq,
    text,
)
from preheat.grammar.numbers import digits

PLAIN: Ranges = others(ranges((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
"""Characters that may stand for themselves."""

SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters with an escape of two characters, and the second character of the escape."""


def quoted(node: Node) -> Node:
    """Return the JSON strings with values in ``node``, with their quotation marks."""
    return seq(text('"'), spelled(node), text('"'))


def spelled(node: Node) -> Node:
    """Return the spellings of the texts of ``node``."""
    match node:
        case Chars(found):
            return character(found)
        case Seq(parts):
            return seq(*map(spelled, parts))
        case Alt(parts):
            return alt(*map(spelled, parts))
        case Repeat(inner, least, most):
            return repeat(spelled(inner), least, most)
        case Both(parts):
            return both(*map(spelled, parts))
        case Not(inner):
            return both(ANY, Not(spelled(inner)))
    raise TypeError(f"no regular expression: {node!r}")


@lru_cache(maxsize=4096)
def character(found: Ranges) -> Node:
    """Return the spellings of one character of ``found``."""
    short = "".join(letter for each, letter in SHORT.items() if common(of(each), found))
    return alt(
        chars(common(found, PLAIN)),
        seq(text("\\"), chars(of(short))),
        *(_unit(low, high) for low, high in common(found, ((0, 0xFFFF),))),
        *(each for low, high in common(found, ((0x10000, 0x10FFFF),)) for each in _pairs(low, high)),
    )


def _pairs(low: int, high: int) -> list[Node]:
    """Return the escapes, as pairs of surrogates, of the characters from ``low`` to ``high``."""
    low, high = low - 0x10000, high - 0x10000
    first, last = low >> 10, high >> 10
    if first == last:
        spans = [(first, first, low & 0x3FF, high & 0x3FF)]
    else:
        spans = [(first, first, low & 0x3FF, 0x3FF), (first + 1, last - 1, 0, 0x3FF), (last, last, 0, high & 0x3FF)]
    return [
        seq(
            text("\\u"),
            digits(0xD800 + begin, 0xD800 + end, 4, 16),
            text("\\u"),
            digits(0xDC00 + low, 0xDC00 + high, 4, 16),
        )
        for begin, end, low, high in spans
        if begin <= end
    ]


def _unit(low: int, high: int) -> Node:
    """Return the escapes of the code units from ``low`` to ``high``."""
    return seq(text("\\u"), digits(low, high, 4, 16))


ANY = spelled(EVERYTHING)
