"""Names of texts in the errors of requests: the engine's side calls each of them a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from preheat.errors import InvalidRequest

Field = Callable[[int | None], str]
"""The name of a text in its body, by its number; None: all of them."""


def named(name: str) -> Field:
    """Return the names of the texts of one field."""
    return lambda number: name if number is None else f"{name}[{number}]"


def sides(first: str, count: int, second: str) -> Field:
    """Return the names of the texts of two fields, one behind the other: ``count`` texts are of the ``first``."""

    def field(number: int | None) -> str:
        if number is None or (number < count and count == 1):
            return second if number is None else first
        return f"{first}[{number}]" if number < count else f"{second}[{number - count}]"

    return field


INPUT = named("input")


@contextmanager
def renamed(field: Field) -> Iterator[None]:
    """Rename ``prompt`` in errors to the ``field`` of a body."""
    try:
        yield
    except InvalidRequest as error:
        found = re.fullmatch(r"prompt(?:\[(\d+)\])?", error.param or "")
        if found is None:
            raise
        name = field(None if found[1] is None else int(found[1]))
        said = error.message.replace(f"{found[0]}: prompt ", f"{name} ", 1)
        raise type(error)(said.replace(found[0], name, 1), param=name) from error
