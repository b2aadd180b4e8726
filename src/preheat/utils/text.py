"""Words for messages: numbers in plain digits, and the name that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_NAMES_SHOWN = 8
_TEXT_SHOWN = 200
_TYPO = 2


def plain_number(value: float) -> str:
    """Return ``value`` in digits; a whole number has no exponent: 2147483647, 0.01."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def some(names: Sequence[str]) -> str:
    """Return the first ``names``, and the number of the others."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def brief(value: object) -> str:
    """Return ``value`` as Python writes it, cut off if it is long."""
    text = repr(value[:_TEXT_SHOWN] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with the known name closest to ``name``; empty if none is close.

    A name of abbreviated words is close to the shortest one that has these words in this order, as ``max-len`` is to
    ``max-model-len``.
    """
    names = list(known)
    words = _words(str(name))
    close = sorted((known for known in names if words and _abbreviates(words, _words(known))), key=len)
    close = close or difflib.get_close_matches(str(name), names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def misspelled(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with a known name that differs by a typo; else empty.

    A typo is one or two letters.
    """
    nearest = min(((_edits(name, each), each) for each in known), default=(_TYPO + 1, ""))
    return f"; did you mean {nearest[1]}?" if nearest[0] <= min(_TYPO, len(name) // 4) else ""


def _edits(name: str, other: str) -> int:
    """Return how many letters to change to make ``other`` of ``name``.

    A change adds, drops or replaces a letter. Any number above a typo's stands for many.
    """
    if abs(len(name) - len(other)) > _TYPO:
        return _TYPO + 1
    row = list(range(len(other) + 1))
    for place, letter in enumerate(name, 1):
        before, row[0] = row[0], place
        for at, there in enumerate(other, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (letter != there))
    return row[-1]


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.]", name.lower()) if word]


def _abbreviates(short: list[str], words: list[str]) -> bool:
    """Return whether each of the ``short`` words begins one of ``words``, in their order."""
    rest = iter(words)
    return all(any(word.startswith(start) for word in rest) for start in short)
