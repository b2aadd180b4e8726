"""Sets of characters, as ranges of code points: sorted, with gaps between them, without surrogates."""

from __future__ import annotations

import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache

Ranges = tuple[tuple[int, int], ...]

ANY_CHARACTER: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def ranges(*pairs: tuple[int, int]) -> Ranges:
    """Return the set of the ranges ``pairs``; the ranges may overlap."""
    found = list[tuple[int, int]]()
    for low, high in sorted(pairs):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return common(tuple(found), ANY_CHARACTER)


def of(characters: str) -> Ranges:
    """Return the set of these characters."""
    return ranges(*((ord(each), ord(each)) for each in characters))


def union(one: Ranges, other: Ranges) -> Ranges:
    """Return the union of two sets."""
    return ranges(*one, *other) if one and other else one or other


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the intersection of two sets."""
    found, i, j = list[tuple[int, int]](), 0, 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low <= high:
            found.append((low, high))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def others(one: Ranges) -> Ranges:
    """Return the complement of a set."""
    found, start = list[tuple[int, int]](), 0
    for low, high in one:
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return common((*found, (start, sys.maxunicode)) if start <= sys.maxunicode else tuple(found), ANY_CHARACTER)


def holds(one: Ranges, character: int) -> bool:
    """Return whether ``character`` is in the set."""
    at = bisect_right(one, (character, sys.maxunicode)) - 1
    return at >= 0 and one[at][0] <= character <= one[at][1]


def _where(codes: Iterable[int]) -> Ranges:
    """Return the set of sorted ``codes``."""
    found = list[tuple[int, int]]()
    for code in codes:
        if found and code == found[-1][1] + 1:
            found[-1] = found[-1][0], code
        else:
            found.append((code, code))
    return common(tuple(found), ANY_CHARACTER)


@cache
def category(name: str) -> Ranges:
    """Return the characters of a general category of Unicode, such as ``L``; none if unknown."""
    return _where(code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)).startswith(name))


DIGITS, WORD = of("0123456789"), ranges((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE = union(of("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ranges((0x2000, 0x200A)))
r"""``\d``, ``\w`` and ``\s`` of ECMA 262, the syntax of patterns in JSON Schema."""


@cache
def unicode_class(letter: str) -> Ranges:
    r"""Return ``\d``, ``\w`` or ``\s`` by Unicode, as far as Python and Rust agree."""
    if letter == "d":
        return category("Nd")
    if letter == "s":
        return _where(code for code in range(sys.maxunicode + 1) if chr(code).isspace() and not 0x1C <= code <= 0x1F)
    return _where(code for code in range(sys.maxunicode + 1) if chr(code).isalnum() or code == 0x5F)
