"""Number of values in a JSON text, its levels, and digits of its numbers, counted before the text is decoded.

A decoder holds Python's lock until it is done, so no other thread runs. Its time depends on the number of objects that
it makes, and on the digits of numbers that do not fit 64 bits. Counting takes milliseconds for 16 MB, in numpy's loops;
other threads run meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from preheat.errors import InvalidRequest

MOST_VALUES = 2**18
"""Most values in a body, or in a JSON text within it; Python's lock is held while they are made, and at times again."""

MOST_IDS = 5 * MOST_VALUES
"""Most values in a body of token ids, more than in a context of a million tokens; ids are made faster."""

MOST_CONTAINERS = 2**16
"""Most lists and objects in a body; each takes as long as several other values."""

SHORT_DIGITS = 19
"""Digits of numbers that decoders read at once; a longer number is copied, and its time grows with its length."""

MOST_DIGITS = 2**15
"""Most digits of a body behind the first :data:`SHORT_DIGITS` of their numbers, all numbers together."""

MOST_DEPTH = 256
"""Most lists and objects within each other; code that walks through a body calls itself for each."""

_CHUNK = 1 << 18
"""Bytes that are counted together, so that their masks stay in a processor's cache."""

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_ZERO, _NINE = b"09"
_OPEN, _CLOSE, _LOWER = *b"{}", 0x20
"""With the last bit, ``[`` is ``{`` and ``]`` is ``}``; no other bytes are."""


class JsonSize(NamedTuple):
    """The size of a JSON text.

    ``values``: their greatest possible number. Each value but the first follows a comma or an opening bracket.
    ``containers``: the lists and objects among them. ``members``: the values with names, in objects. ``digits``: the
    digits that follow at least :data:`SHORT_DIGITS` others in a number. ``depth``: the most lists and objects within
    each other, where there are more than :data:`MOST_DEPTH` of them.
    """

    values: int
    containers: int
    members: int
    digits: int
    depth: int


def check_size(text: bytes, what: str, most: int = MOST_VALUES, param: str | None = None) -> None:
    """Raise InvalidRequest if ``what``, the JSON in ``text``, has too many values, levels or digits to be decoded."""
    if len(text) <= MOST_CONTAINERS and text.count(b"[") + text.count(b"{") <= MOST_DEPTH:
        return
    size = json_size(text)
    if size.depth > MOST_DEPTH:
        levels = f"{MOST_DEPTH} lists and objects within each other"
        raise InvalidRequest(f"{what} is nested too deeply: at most {levels} are allowed", param=param)
    for count, limit, name in (
        (size.values, most, "values"),
        (size.members, MOST_VALUES, "values with names"),
        (size.containers, MOST_CONTAINERS, "lists and objects"),
    ):
        if count > limit:
            raise InvalidRequest(f"{what} has more than {limit:,} {name}: send less in one request", param=param)
    if size.digits > MOST_DIGITS:
        many = f"more than {MOST_DIGITS:,} digits in numbers of more than {SHORT_DIGITS} digits"
        raise InvalidRequest(f"{what} has {many}: send shorter numbers, or fewer", param=param)


def json_size(text: bytes) -> JsonSize:
    """Return the size of a JSON ``text``; of any other text, some number."""
    values, containers, members, digits, inside, escape = 1, 0, 0, 0, False, False
    level = depth = 0  # lists and objects that are open, now and at most
    before = np.zeros(SHORT_DIGITS, bool)  # whether the last bytes of the chunk before are digits
    for start in range(0, len(text), _CHUNK):
        chunk = np.frombuffer(text, np.uint8, min(_CHUNK, len(text) - start), start)
        quotes = chunk == _QUOTE
        backslashes = chunk == _BACKSLASH
        escaped, escape = _escaped(backslashes, escape)
        if escaped is not None:
            quotes &= ~escaped
        outside = np.logical_xor.accumulate(quotes) == inside
        inside = bool(outside[-1]) is False
        brackets = chunk | _LOWER
        opens, closes = (brackets == _OPEN) & outside, (brackets == _CLOSE) & outside
        opened = int(np.count_nonzero(opens))
        containers += opened
        if containers > MOST_DEPTH:
            depth = max(depth, level + int(np.cumsum(opens.view(np.int8) - closes, dtype=np.int32).max()))
        level += opened - int(np.count_nonzero(closes))
        values += opened + int(np.count_nonzero((chunk == _COMMA) & outside))
        members += int(np.count_nonzero((chunk == _COLON) & outside))
        numeric = np.concatenate((before, (chunk - _ZERO <= _NINE - _ZERO) & outside))
        before = numeric[-SHORT_DIGITS:]
        digits += int(np.count_nonzero(_after_others(numeric)))
    return JsonSize(values, containers, members, digits, depth)


def _after_others(numeric: np.ndarray) -> np.ndarray:
    """Return where :data:`SHORT_DIGITS` bytes and the next one are ``numeric``."""
    length = 1
    while length <= SHORT_DIGITS:
        further = min(length, SHORT_DIGITS + 1 - length)
        numeric = numeric[:-further] & numeric[further:]
        length += further
    return numeric


def _escaped(backslashes: np.ndarray, first: bool) -> tuple[np.ndarray | None, bool]:
    """Return a mask of the escaped bytes, and the next byte's state.

    The state is whether the byte behind them is escaped. A byte is escaped if the run of backslashes before it has odd
    length. ``first``: the first byte is escaped. The mask is None if no byte is escaped.
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
