"""Parsers of growing text.

A parser is written as if the whole text were there, and runs as the text arrives. It is a generator that yields where
it needs more text. Its results are parts, in order. The parts depend on the text alone, not on how it was cut into
pieces: text that may still become a marker is held back.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""Reads text, with ``yield from``, and gives a result."""

_SPACE = re.compile(r"\s*")
_BETWEEN_BRACKETS = re.compile(r"""[^()\[\]{}"'\\,;\s]+""")
_WITHIN_STRING = re.compile(r"""[^"'\\]+""")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of call number ``index`` of a tool."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call ``index``: a piece of the text of a JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


_NOTHING: Mapping[str, str] = MappingProxyType({})


class StreamParser(ABC):
    """Parser of one text: :meth:`push` takes more of it, :meth:`finish` ends it.

    ``stands``: the characters that stand for some literals in the text, see :mod:`preheat.frontend.marks`. A parser is
    written as if the literals were there. Such a character is never part of other text that it reads.
    """

    def __init__(self, stands: Mapping[str, str] = _NOTHING) -> None:
        self._text, self._at = "", 0  # the text that is not forgotten yet, and the reading position in it
        self._stands, self._bare = stands, {ord(char): "" for char in stands.values()}
        self._ended = False
        self._parts: list[Part] = []
        self._read_last = ""  # the last marker, as written in the text
        self._run = self.parse()

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read the text up to its end, and add parts."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain with ``text`` more."""
        self._text += text
        return self._resume()

    def finish(self) -> list[Part]:
        """Return the parts that were held back; the text has ended."""
        self._ended = True
        return self._resume()

    def flush(self) -> list[Part]:
        """Return the parts that were held back; later text is read from the beginning."""
        parts = self.finish()
        self._text, self._at, self._ended = "", 0, False
        self._run = self.parse()
        return parts

    def _resume(self) -> list[Part]:
        next(self._run, None)
        parts, self._parts = self._parts, []
        return parts

    def add(self, part: Part) -> None:
        """Add a part to the result."""
        self._parts.append(part)

    def more(self) -> Reading[bool]:
        """Wait for more text. Return False if the text has ended."""
        if self._ended:
            return False
        yield
        return True

    def forget(self) -> None:
        """Drop the text that was read: nobody will go back to it. Positions that were kept are no longer valid.

        Nothing is dropped before half of the text was read, so that dropping costs no more than reading.
        """
        if self._at > len(self._text) // 2:
            self._text, self._at = self._text[self._at :], 0

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end."""
        while self._at == len(self._text) and (yield from self.more()):
            pass
        return self._text[self._at : self._at + 1]

    def take(self, literal: str) -> Reading[bool]:
        """Read ``literal``; return False, with nothing read, if something else follows."""
        if literal in self._stands and (yield from self.peek()) == self._stands[literal]:
            self._at += 1
            return True
        while True:
            seen = self._text[self._at : self._at + len(literal)]
            if seen == literal:
                self._at += len(literal)
                return True
            if not literal.startswith(seen) or not (yield from self.more()):
                return False

    def space(self) -> Reading[str]:
        """Read white space."""
        start = self._at
        while True:
            self._at = _matched(_SPACE, self._text, self._at)
            if self._at < len(self._text) or not (yield from self.more()):
                return self._text[start : self._at]

    def matching(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest text that matches ``pattern``, a repeated set of characters."""
        start = self._at
        while True:
            self._at = _matched(pattern, self._text, self._at)
            if self._at < len(self._text) or not (yield from self.more()):
                return self._text[start : self._at]

    def until_any(self, markers: tuple[str, ...]) -> Reading[tuple[str, str | None]]:
        """Read the text before the first of ``markers``, and the marker.

        Only text that is certain is read. The marker is "" if the following text is still unknown, and None at the end
        of the text. No marker may begin another one: the shorter one would be found where the text is cut behind it.
        """
        while True:
            place, marker, length = self._find(markers, self._at)
            place = len(self._text) - self._held(markers) if not marker else place
            text, self._read_last = self._text[self._at : place], self._text[place : place + length]
            self._at = place + length
            self.forget()
            if text or marker:
                return text, marker
            if not (yield from self.more()):
                text, self._at = self._text[self._at :], len(self._text)
                return text, None

    def before_any(self, markers: tuple[str, ...]) -> Reading[str]:
        """Read the text before the first of ``markers``.

        If none comes, read all text, and leave a possible beginning of a marker at the end out of the result.
        """
        start = looked = self._at
        longest = max(map(len, markers))
        while True:
            place, marker, _ = self._find(markers, looked)
            if not marker:
                looked = max(start, len(self._text) - longest + 1)
                if (yield from self.more()):
                    continue
                place = len(self._text) - self._held(markers)
            self._at = place if marker else len(self._text)
            return self.bare(self._text[start:place])

    def _find(self, markers: tuple[str, ...], start: int) -> tuple[int, str, int]:
        """Return position, marker and length of the first of ``markers``.

        The marker is "" if there is none. The search begins at ``start``.
        """
        stands = {char: each for each in markers if (char := self._stands.get(each))}
        match = _any_of((*markers, *stands)).search(self._text, start)
        return (match.start(), stands.get(match[0], match[0]), len(match[0])) if match else (len(self._text), "", 0)

    def _held(self, markers: tuple[str, ...]) -> int:
        """Return how many of the last characters may begin a marker."""
        ends = (self._text[-length:] for length in range(min(self._unread, max(map(len, markers)) - 1), 0, -1))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)

    @property
    def _unread(self) -> int:
        return len(self._text) - self._at

    def bare(self, text: str) -> str:
        """Return ``text`` without the characters that stand for literals."""
        return text.translate(self._bare) if self._bare else text

    def value(self, quotes: str = '"', deepest: int | None = None) -> Reading[str | None]:
        """Read a JSON value and return its text.

        With other ``quotes``, it is a Python value. Brackets and strings alone decide where the value ends. None if the
        text ends within it, or more than ``deepest`` brackets are open.
        """
        start, end = self._at, ValueEnd(quotes, deepest)
        while True:
            self._at = end.find(self._text, self._at)
            if end.found:
                return None if end.too_deep else self.bare(self._text[start : self._at])
            if not (yield from self.more()):
                return self.bare(self._text[start : self._at]) if end.scalar else None

    def string(self) -> Reading[str | None]:
        """Read a JSON string and return its value. None if it is no string, or does not end."""
        text = (yield from self.value()) if (yield from self.peek()) == '"' else None
        try:
            return None if text is None else without_surrogates(json.loads(text))
        except ValueError:
            return None


class ValueEnd:
    """Search for the end of a JSON or Python value in text that arrives in pieces."""

    def __init__(self, quotes: str = '"', deepest: int | None = None) -> None:
        self._quotes, self._deepest = quotes, deepest
        self._depth, self._quote, self._escaped = 0, "", False
        self.found = self._begun = self.too_deep = False

    @property
    def scalar(self) -> bool:
        """Whether the value is a number or a name, without an end of its own."""
        return self._begun and not self._depth and not self._quote

    def find(self, text: str, at: int) -> int:
        """Return the position behind the value.

        It is the length of ``text`` if the value does not end. ``at`` is the position in ``text`` where the value
        begins or goes on.
        """
        while at < len(text) and not self.found:
            run = (_WITHIN_STRING if self._quote else _BETWEEN_BRACKETS).match(text, at)
            if run is None or self._escaped:
                at += self._takes(text[at])
            else:
                at, self._begun = run.end(), True
        return at

    def _takes(self, char: str) -> bool:
        """Return whether ``char`` belongs to the value."""
        if self._quote:
            self._in_string(char)
        elif char in _OPENING:
            self._depth += 1
            self.found = self.too_deep = self._deepest is not None and self._depth > self._deepest
        elif char in _CLOSING:
            self._depth -= 1
            self.found = self._depth <= 0
            if self._depth < 0:
                return False  # the bracket belongs to the surrounding value
        elif char in self._quotes:
            self._quote = char
        elif not self._depth and (char in ",;" or char.isspace()):
            self.found = True
            return False
        self._begun = True
        return True

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""
            self.found = not self._depth


@cache
def _any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)))


def without_surrogates(text: str) -> str:
    """Return ``text`` with U+FFFD for halves of characters: JSON and Python can write them, UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _matched(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
