"""The parser of Gemma 4, with its own notation of arguments."""

from __future__ import annotations

import re

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser
from preheat.frontend.tools.json_object import DEEPEST, dumped, joined, scalar

_CALL, _END_CALL, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^:,{}\[\]<>\ud800-\udfff]*")
_BARE = re.compile(r"[^,{}\[\]<>\ud800-\udfff]*")


class Gemma4Parser(ToolParser):
    """``<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>``: Gemma 4, with quotes of its own.

    A broken part ends the arguments. The last of several values with one name counts, so arguments are passed on when
    the call is over.
    """

    MARKS = (_CALL, _END_CALL, _QUOTE)

    def parse(self) -> Reading[None]:
        while (yield from self.content_until(_CALL)):
            start = self._at
            yield from self.space()
            yield from self.take("call:")
            name = yield from self.matching(_NAME)
            if not name or not (yield from self.take("{")):
                self.not_a_call(start)
                continue
            call = self.start_call(name)
            self.arguments(call, (yield from self._members(1)))
            self.forget()
            yield from self.space()
            yield from self.take(_END_CALL)

    def _members(self, depth: int) -> Reading[str]:
        """Read an object behind its brace. Return its JSON."""
        values: dict[str, str] = {}
        while True:
            yield from self.space()
            key = yield from self._key()
            yield from self.space()
            if not key or not (yield from self.take(":")):
                break
            values[key] = yield from self._value(depth)
            yield from self.space()
            if not (yield from self.take(",")):
                break
        yield from self.take("}")
        return joined(values)

    def _items(self, depth: int) -> Reading[str]:
        """Read an array behind its bracket. Return its JSON."""
        values: list[str] = []
        yield from self.space()
        while (yield from self.peek()) not in ("", "]", "}"):
            start = self._at
            values.append((yield from self._value(depth)))
            yield from self.space()
            if not (yield from self.take(",")) or self._at == start:
                break
            yield from self.space()
        yield from self.take("]")
        return f"[{', '.join(values)}]"

    def _value(self, depth: int) -> Reading[str]:
        """Read a value. Return its JSON."""
        yield from self.space()
        if depth < DEEPEST and (yield from self.take("{")):
            return (yield from self._members(depth + 1))
        if depth < DEEPEST and (yield from self.take("[")):
            return (yield from self._items(depth + 1))
        if (yield from self.take(_QUOTE)):
            return dumped((yield from self._string()))
        text = (yield from self.matching(_BARE)).strip()
        return scalar(text) or dumped(text)

    def _key(self) -> Reading[str]:
        """Read a key, in quotes or bare."""
        if (yield from self.take(_QUOTE)):
            return (yield from self._string())
        return (yield from self.matching(_KEY)).strip()

    def _string(self) -> Reading[str]:
        """Read a string behind its quote, and the quote that ends it."""
        text = yield from self.before_any((_QUOTE, _END_CALL))
        yield from self.take(_QUOTE)
        return text
