"""How many values a JSON text has, counted before it is decoded.

A decoder holds Python's lock until it is done, so that no other thread runs: how long that is depends on how many
objects it makes. Counting them takes milliseconds for 16 MB, in numpy's loops, which other threads run beside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from preheat.errors import InvalidRequest

MOST_VALUES = 2**18
"""Values in a body, or in a JSON text within it: Python's lock is held while they are made, and at times again."""

MOST_IDS = 5 * MOST_VALUES
"""Values in a body of token ids, which are made faster: more than a context of a million tokens has."""

MOST_CONTAINERS = 2**16
"""Lists and objects in a body, each of which takes as long as several other values."""

_CHUNK = 1 << 18
"""Bytes that are looked at together: their masks stay in a processor's cache."""

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN, _LOWER = ord("{"), 0x20
"""With this bit, ``[`` is ``{``; no other byte is."""


class JsonSize(NamedTuple):
    """``values``: how many there are, at most: each one but the first follows a comma or opens a list or an object.
    ``containers``: the lists and objects among them. ``members``: the values that have names, in objects.
    """

    values: int
    containers: int
    members: int


def check_size(text: bytes, what: str, most: int = MOST_VALUES, param: str | None = None) -> None:
    """Raise InvalidRequest if ``what``, the JSON in ``text``, has too many values to be decoded."""
    if len(text) <= MOST_CONTAINERS:
        return
    size = json_size(text)
    for count, limit, name in (
        (size.values, most, "values"),
        (size.members, MOST_VALUES, "values with names"),
        (size.containers, MOST_CONTAINERS, "lists and objects"),
    ):
        if count > limit:
            raise InvalidRequest(f"{what} has more than {limit:,} {name}: send less in one request", param=param)


def json_size(text: bytes) -> JsonSize:
    """Return the size of a JSON ``text``; of any other text, some number."""
    values, containers, members, inside, escape = 1, 0, 0, False, False
    for start in range(0, len(text), _CHUNK):
        chunk = np.frombuffer(text, np.uint8, min(_CHUNK, len(text) - start), start)
        quotes = chunk == _QUOTE
        backslashes = chunk == _BACKSLASH
        escaped, escape = _escaped(backslashes, escape)
        if escaped is not None:
            quotes &= ~escaped
        outside = np.logical_xor.accumulate(quotes) == inside
        inside = bool(outside[-1]) is False
        opened = int(np.count_nonzero(((chunk | _LOWER) == _OPEN) & outside))
        containers += opened
        values += opened + int(np.count_nonzero((chunk == _COMMA) & outside))
        members += int(np.count_nonzero((chunk == _COLON) & outside))
    return JsonSize(values, containers, members)


def _escaped(backslashes: np.ndarray, first: bool) -> tuple[np.ndarray | None, bool]:
    """Which bytes a backslash escapes, given whether the ``first`` one is; and whether the byte after them is.

    A byte is escaped if the run of backslashes before it is of odd length.
    """
    if not first and not backslashes.any():
        return None, False
    places = np.arange(1, len(backslashes) + 1, dtype=np.int32)
    others = np.where(backslashes, np.int32(-1 if first else 0), places)
    run = places - np.maximum(np.maximum.accumulate(others), 0)
    if first:
        run += np.maximum.accumulate(others) < 0
    odd = (run & 1).astype(bool)
    return np.concatenate(([first], odd[:-1])), bool(odd[-1])
