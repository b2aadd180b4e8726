"""Marks in an answer's text: the marks of the reasoning, and the frames around reasoning and content."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence

from preheat.utils.reasoning import SPACE, Phase, Sign


class TokenMarks:
    """Search for characters that stand for marks; ``signs`` are the marks' meanings."""

    def __init__(self, signs: Mapping[str, Sign]) -> None:
        self._signs = signs
        self._split = re.compile(f"([{''.join(signs)}])") if signs else None
        self._pieces = deque[str]()

    def add(self, text: str) -> None:
        """Take more text."""
        self._pieces += filter(None, self._split.split(text) if self._split else (text,))

    def end(self) -> None:
        """Take the end of the text."""

    def next(self, phase: Phase) -> tuple[str, Sign] | None:
        """Return the next piece of text and its meaning in ``phase``; None without enough text."""
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        return piece, self._signs.get(piece, Sign.TEXT)


class TextMarks:
    """Search for marks that are spelled out, with the interface of :class:`TokenMarks`.

    ``starts`` and ``ends`` are the marks' texts. A start counts only as the first text of an answer. A possible
    beginning of a mark is held back.
    """

    def __init__(self, starts: Sequence[str], ends: Sequence[str]) -> None:
        self._starts, self._ends = tuple(starts), tuple(ends)
        self._start, self._end = (
            re.compile("|".join(map(re.escape, starts))),
            re.compile("|".join(map(re.escape, ends))),
        )
        self._text, self._ended, self._begun = "", False, False

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._ended = True

    def next(self, phase: Phase) -> tuple[str, Sign] | None:
        if not self._text:
            return None
        if phase.is_content:
            return self._take(len(self._text), Sign.TEXT)
        if not self._begun:
            return self._first()
        if found := self._end.match(self._text):
            return self._take(found.end(), Sign.END)
        found = self._end.search(self._text)
        length = found.start() if found else len(self._text) - self._held(self._ends)
        return self._take(length, Sign.TEXT) if length else None

    def _first(self) -> tuple[str, Sign] | None:
        """Return the first piece: white space, a mark, or text."""
        space = len(self._text) - len(self._text.lstrip(SPACE))
        if space:
            return self._take(space, Sign.TEXT)
        for mark, sign in ((self._start, Sign.START), (self._end, Sign.END)):
            if found := mark.match(self._text):
                self._begun = True
                return self._take(found.end(), sign)
        if self._held((*self._starts, *self._ends)) == len(self._text):
            return None
        self._begun = True
        return self.next(Phase.WITHIN)

    def _take(self, length: int, sign: Sign) -> tuple[str, Sign]:
        piece, self._text = self._text[:length], self._text[length:]
        return piece, sign

    def _held(self, marks: Sequence[str]) -> int:
        """Return the number of last characters that may begin one of ``marks``."""
        if self._ended:
            return 0
        lengths = range(min(len(self._text), max(map(len, marks)) - 1), 0, -1)
        return next((n for n in lengths if any(mark.startswith(self._text[-n:]) for mark in marks)), 0)


class Frame:
    """Filter that drops ``begin`` and ``end`` at the ends of a text.

    White space before ``begin`` and behind ``end`` is dropped too. ``end`` stays unless ``begin`` was there.
    """

    def __init__(self, begin: str, end: str = "") -> None:
        self._begin, self._end, self._text = begin, end, ""
        self._decided, self._inside = not begin, False
        beginnings = "|".join(re.escape(end[:length]) for length in range(len(end), 0, -1))
        self._last = re.compile(rf"(?:{re.escape(end)}\s*|{beginnings})\Z")

    def push(self, text: str) -> str:
        """Return the text that is certain with ``text`` more."""
        self._text += text
        if not self._decided:
            seen = self._text.lstrip()
            if len(seen) < len(self._begin) and self._begin.startswith(seen):
                return ""
            self._decided, self._inside = True, seen.startswith(self._begin)
            if self._inside:
                self._text = seen.removeprefix(self._begin)
        found = self._last.search(self._text) if self._inside and self._end else None
        length = found.start() if found else len(self._text)
        text, self._text = self._text[:length], self._text[length:]
        return text

    def finish(self) -> str:
        """Return the text that was held back, without the end of the frame."""
        text, self._text = self._text, ""
        return "" if self._inside and text.rstrip() == self._end else text
