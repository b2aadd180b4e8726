"""Parsers of growing text: each is written as if the whole text lay before it, and runs as the text arrives.

A parser is a generator that yields where it needs more text. What it has recognized are parts, in order. They depend on
the text alone, not on how it was cut into pieces: whatever may still become a marker is held back.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
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


class StreamParser(ABC):
    """Splits one text into parts: :meth:`push` takes more of it, :meth:`finish` says that it has ended."""

    def __init__(self) -> None:
        self._text, self._at = "", 0  # what is not forgotten yet, and where we read it
        self._ended = False
        self._parts: list[Part] = []
        self._run = self.parse()

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read the text up to its end, and add parts."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain, given ``text`` more."""
        self._text += text
        return self._resume()

    def finish(self) -> list[Part]:
        """The parts that were held back, at the end of the text."""
        self._ended = True
        return self._resume()

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
        """Drop the text behind us: nobody will go back to it. Positions that were kept are no longer valid."""
        self._text, self._at = self._text[self._at :], 0

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and (yield from self.more()):
            pass
        return self._text[self._at : self._at + 1]

    def take(self, literal: str) -> Reading[bool]:
        """Read ``literal``; False, with nothing read, if something else follows."""
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

    def until(self, end: str) -> Reading[str | None]:
        """Read up to ``end`` and over it: the text before it. None, with nothing read, if it does not come."""
        looked = self._at
        while (found := self._text.find(end, looked)) < 0:
            looked = max(self._at, len(self._text) - len(end) + 1)
            if not (yield from self.more()):
                return None
        text, self._at = self._text[self._at : found], found + len(end)
        return text

    def until_any(self, markers: tuple[str, ...]) -> Reading[tuple[str, str | None]]:
        """Read the text before the first of ``markers``, as far as it is certain, and the marker if it follows.

        The marker is "" if it is not known yet what follows, and None at the end of the text.
        """
        while True:
            found = [(place, marker) for marker in markers if (place := self._text.find(marker, self._at)) >= 0]
            place, marker = min(found, default=(len(self._text) - self._held(markers), ""))
            text, self._at = self._text[self._at : place], place + len(marker)
            self.forget()
            if text or marker:
                return text, marker
            if not (yield from self.more()):
                text, self._at = self._text, len(self._text)
                return text, None

    def _held(self, markers: tuple[str, ...]) -> int:
        """How many of the last characters may begin a marker."""
        ends = (self._text[-length:] for length in range(min(self._unread, max(map(len, markers)) - 1), 0, -1))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)

    @property
    def _unread(self) -> int:
        return len(self._text) - self._at

    def value(self, quotes: str = '"') -> Reading[str | None]:
        """Read a JSON value, or with other ``quotes`` one of Python, and return its text. Brackets and strings alone
        say where it ends. None if the text ends within it.
        """
        start, end = self._at, ValueEnd(quotes)
        while True:
            self._at = end.find(self._text, self._at)
            if end.found:
                return self._text[start : self._at]
            if not (yield from self.more()):
                return self._text[start : self._at] if end.scalar else None

    def string(self) -> Reading[str | None]:
        """Read a JSON string: its value. None if it is none, or does not end."""
        text = (yield from self.value()) if (yield from self.peek()) == '"' else None
        try:
            return None if text is None else str(json.loads(text))
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
        """The place behind the value in ``text`` from ``at`` on; its length if the value goes on."""
        while at < len(text) and not self.found:
            at += self._takes(text[at])
        return at

    def _takes(self, char: str) -> bool:
        """Whether ``char`` belongs to the value."""
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


def _matched(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
