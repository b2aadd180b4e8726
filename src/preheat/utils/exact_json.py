"""JSON with all digits of numbers: a double has about 17 digits, msgpack's integers have 64 bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

_INTEGERS = range(-(2**63), 2**64)


def exact_number(text: str) -> float | Decimal:
    """Return the number in ``text``: a float if it is exact, else a Decimal. Raises ValueError for a vast exponent."""
    exact, near = decimal(text), float(text)
    return near if near - near == 0 and Decimal(repr(near)) == exact else exact


def decimal(text: str) -> Decimal:
    """Return the number in ``text`` exactly. Raises ValueError for an exponent that has no Decimal."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError("Number out of range") from None


def dumps(value: Any) -> str:
    """Return the JSON of ``value``, with all digits. Raises ValueError if it is no JSON."""
    return "".join(_parts(value))


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for place, (name, each) in enumerate(value.items()):
            yield f"{', ' if place else ''}{json.dumps(str(name), ensure_ascii=False)}: "
            yield from _parts(each)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for place, each in enumerate(value):
            yield ", " if place else ""
            yield from _parts(each)
        yield "]"
    elif isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value} is not a number of JSON")
        yield str(value)
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def travels(value: Any) -> bool:
    """Return whether msgpack keeps all numbers of ``value``."""
    if isinstance(value, dict):
        return all(map(travels, value.values()))
    if isinstance(value, list | tuple):
        return all(map(travels, value))
    return not isinstance(value, Decimal) and (not isinstance(value, int) or value in _INTEGERS)
