"""JSON objects of a model: passed on as they arrive, valid in the end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from preheat.frontend.stream_parser import Content, Reading, StreamParser

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NAMES: Mapping[str, str] = MappingProxyType(
    {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
)
_ODD_SPACE = re.compile(r"[^ \t\n\r]")
DEEPEST = 100
"""Most levels of objects and arrays in one another."""


class JsonObject(StreamParser):
    """Reader of one object that makes it valid.

    :meth:`text` takes more of it and returns the certain part, :meth:`rest` closes it. Text that was passed on stays.
    So a name that comes again in one object is left out, with its value. Nothing is read behind the first error; open
    brackets and strings are closed. Missing parts that are certain are put right: commas, the escape of a character,
    constants by their names in Python, white space.
    """

    def __init__(self) -> None:
        super().__init__()
        self._silent, self._depth = 0, 0

    def text(self, text: str) -> str:
        """Return the JSON that is certain with ``text`` more."""
        return "".join(part.text for part in self.push(text) if isinstance(part, Content))

    def rest(self) -> str:
        """Return the JSON that closes the object."""
        return "".join(part.text for part in self.finish() if isinstance(part, Content))

    def parse(self) -> Reading[None]:
        yield from self._value("")
        while (yield from self.peek()):
            self._at = len(self._text)
            self.forget()

    def _emit(self, text: str) -> None:
        if not self._silent:
            self.add(Content(text))

    def _value(self, before: str) -> Reading[bool]:
        """Read a value and pass it on behind ``before``.

        Return False if the value is broken; its brackets and strings are then closed.
        """
        char = yield from self.peek()
        if char == '"':
            return (yield from self._string(before))
        if char not in ("{", "["):
            return (yield from self._scalar(before))
        if self._depth == DEEPEST:
            return False
        self._depth += 1
        whole = yield from self._members(before) if char == "{" else self._items(before)
        self._depth -= 1
        return whole

    def _members(self, before: str) -> Reading[bool]:
        """Read an object."""
        self._open(before)
        names = set[str]()
        while True:
            gap = yield from self._next("}", first=not names)
            if gap is None:
                return True
            start = self._at
            name = yield from self.string()
            key = self._text[start : self._at]
            between = yield from self._space()
            if name is None or not (yield from self.take(":")):
                break
            between += ":" + (yield from self._space())
            again = name in names
            names.add(name)
            self._silent += again
            whole = yield from self._value(gap + key + between)
            self._silent -= again
            if not whole:
                break
        self._emit("}")
        return False

    def _items(self, before: str) -> Reading[bool]:
        """Read an array."""
        self._open(before)
        first = True
        while True:
            gap = yield from self._next("]", first)
            if gap is None:
                return True
            if not (yield from self._value(gap)):
                break
            first = False
        self._emit("]")
        return False

    def _open(self, before: str) -> None:
        self._emit(before + self._text[self._at])
        self._at += 1
        self.forget()

    def _space(self) -> Reading[str]:
        """Read white space. Return it as JSON's, which has four characters of the many."""
        return _ODD_SPACE.sub(" ", (yield from self.space()))

    def _next(self, end: str, first: bool) -> Reading[str | None]:
        """Read up to the next member or item. Return the text before it; None if ``end`` came and was passed on."""
        gap = yield from self._space()
        comma = "" if first else ","
        if comma and (yield from self.take(comma)):
            gap, comma = gap + comma + (yield from self._space()), ""
        if not (yield from self.take(end)):
            return comma + gap
        self._emit(gap.replace(",", "") + end)
        return None

    def _string(self, before: str) -> Reading[bool]:
        """Read a string, and pass it on as it arrives."""
        self._emit(before + '"')
        self._at += 1
        while char := (yield from self.peek()):
            if char == '"':
                self._at += 1
                self._emit('"')
                return True
            if char == "\\":
                if not (text := (yield from self._escape())):
                    break
            elif char < " ":
                text = json.dumps(char)[1:-1]
                self._at += 1
            else:
                plain = _PLAIN.match(self._text, self._at)
                assert plain is not None
                text, self._at = plain[0], plain.end()
            self._emit(text)
            self.forget()
        self._emit('"')
        return False

    def _escape(self) -> Reading[str]:
        """Read an escape; a backslash without an escape stands for itself. Return "" if the text ends within it."""
        while True:
            length = 6 if self._text[self._at + 1 : self._at + 2] == "u" else 2
            if len(self._text) - self._at >= length or not (yield from self.more()):
                break
        if found := _ESCAPE.match(self._text, self._at):
            self._at = found.end()
            return found[0]
        if len(self._text) - self._at < length:
            return ""
        self._at += 1
        return "\\\\"

    def _scalar(self, before: str) -> Reading[bool]:
        """Read a number or a name. Leave it out if the end of the text may have cut it."""
        text = yield from self.matching(_SCALAR)
        if not (yield from self.peek()) or not (value := scalar(text)):
            return False
        self._emit(before + value)
        return True


def scalar(text: str) -> str:
    """Return the JSON of a number or a constant; "" if ``text`` is neither."""
    return _NAMES.get(text) or (text if _NUMBER.fullmatch(text) else "")


def whole_object(text: str) -> str:
    """Return the JSON object ``text``, made valid as in a stream."""
    read = JsonObject()
    return read.text(text) + read.rest()


def joined(values: Mapping[str, str]) -> str:
    """Return the JSON object of ``values``; the values are JSON."""
    return "{" + ", ".join(f"{dumped(key)}: {value}" for key, value in values.items()) + "}"


def dumped(value: Any) -> str:
    """Return ``value`` as JSON. Raises ValueError if JSON cannot express it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)
