"""Parsers of growing text: each is written as if the whole text lay before it, and runs as the text arrives.

A parser is a generator that yields where it needs more text. What it has recognized are parts, in order. They depend on
the text alone, not on how it was cut into pieces: whatever may still become a marker is held back.
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
    """Call number ``index`` of a tool begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call ``index``; joined, they are the text of a JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


_NOTHING: Mapping[str, str] = MappingProxyType({})


class StreamParser(ABC):
    """Splits one text into parts: :meth:`push` takes more of it, :meth:`finish` says that it has ended.

    ``stands``: the characters that stand for some literals in the text, see :mod:`preheat.frontend.marks`. A parser is
    written as if the literals were there, and reads no other text with such a character.
    """

    def __init__(self, stands: Mapping[str, str] = _NOTHING) -> None:
        self._text, self._at = "", 0  # what is not forgotten yet, and where we read it
        self._stands, self._bare = stands, {ord(char): "" for char in stands.values()}
        self._ended = False
        self._parts: list[Part] = []
        self._read_last = ""  # the last marker, as it was in the text
        self._run = self.parse()

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read the text up to its end, and add parts."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain, given ``text`` more."""
        self._text += text
        return self._resume()

    def finish(self) -> list[Part]:
        """Return the parts that were held back, at the end of the text."""
        self._ended = True
        return self._resume()

    def flush(self) -> list[Part]:
        """Return the parts that were held back; text that follows is read from the beginning."""
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
        """Wait for more text. False if the text has ended."""
        if self._ended:
            return False
        yield
        return True

    def forget(self) -> None:
        """Drop the text behind us: nobody will go back to it. Positions that were kept are no longer valid.

        While less than half of the text is behind us it stays, so that dropping costs no more than reading did.
        """
        if self._at > len(self._text) // 2:
            self._text, self._at = self._text[self._at :], 0

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end."""
        while self._at == len(self._text) and (yield from self.more()):
            pass
        return self._text[self._at : self._at + 1]

    def take(self, literal: str) -> Reading[bool]:
        """Read ``literal``; False, with nothing read, if something else follows."""
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
        """Read the longest text of which every beginning matches ``pattern``, a repeated set of characters."""
        start = self._at
        while True:
            self._at = _matched(pattern, self._text, self._at)
            if self._at < len(self._text) or not (yield from self.more()):
                return self._text[start : self._at]

    def until_any(self, markers: tuple[str, ...]) -> Reading[tuple[str, str | None]]:
        """Read the text before the first of ``markers``, as far as it is certain, and the marker if it follows.

        The marker is "" if it is not known yet what follows, and None at the end of the text. No marker may begin
        another one: the shorter one would be found where the text is cut behind it.
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
        """Read the text before the first of ``markers``. If none comes, read all but what may begin one at the end."""
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
        """The place of the first of ``markers`` from ``start`` on, the marker, "" if there is none, and its length."""
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

    def value(self, quotes: str = '"') -> Reading[str | None]:
        """Read a JSON value, or with other ``quotes`` one of Python, and return its text. Brackets and strings alone
        say where it ends. None if the text ends within it.
        """
        start, end = self._at, ValueEnd(quotes)
        while True:
            self._at = end.find(self._text, self._at)
            if end.found:
                return self.bare(self._text[start : self._at])
            if not (yield from self.more()):
                return self.bare(self._text[start : self._at]) if end.scalar else None

    def string(self) -> Reading[str | None]:
        """Read a JSON string: its value. None if it is none, or does not end."""
        text = (yield from self.value()) if (yield from self.peek()) == '"' else None
        try:
            return None if text is None else without_surrogates(json.loads(text))
        except ValueError:
            return None


class ValueEnd:
    """Finds the end of a JSON value, or of one of Python, in text that arrives in pieces."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._depth, self._quote, self._escaped = 0, "", False
        self.found = self._begun = False

    @property
    def scalar(self) -> bool:
        """The value has no end of its own: a number or a name."""
        return self._begun and not self._depth and not self._quote

    def find(self, text: str, at: int) -> int:
        """Return the place behind the value in ``text`` from ``at`` on; its length if the value goes on."""
        while at < len(text) and not self.found:
            at += self._takes(text[at])
        return at

    def _takes(self, char: str) -> bool:
        """Return whether ``char`` belongs to the value."""
        if self._quote:
            self._in_string(char)
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
            self.found = self._depth <= 0
            if self._depth < 0:
                return False  # the bracket of what the value is in
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
    """Return ``text`` with U+FFFD for the halves of characters, which JSON and Python can write and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _matched(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
