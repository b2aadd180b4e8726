"""Parsers of models that write calls as tags: one tag for the function, one for each argument."""

from __future__ import annotations

import re
from typing import ClassVar

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser
from preheat.frontend.tools.json_object import joined

_KIND, _NAME = re.compile(r"\w*"), re.compile(r"[^<>\n]*")


class TagParser(ToolParser):
    """Functions in a block, with their parameters as tags.

    ``BLOCK``, ``FUNCTION``, ``PARAMETER``: the beginning and the end of each. The beginning of a function and of a
    parameter is a tag that ends with the name, in quotes if the beginning ends with a quote. ``BARE``: a function may
    be without its block. ``LINES``: a line break on either side of a value is not part of it.

    A value ends with the next tag, so a missing end costs no other value. The last of several values with one name
    counts, so arguments are passed on when the call is over.
    """

    BLOCK: ClassVar[tuple[str, str]]
    FUNCTION: ClassVar[tuple[str, str]]
    PARAMETER: ClassVar[tuple[str, str]]
    BARE: ClassVar[bool] = False
    LINES: ClassVar[bool] = False

    def parse(self) -> Reading[None]:
        while marker := (yield from self.content_until(*self._begins())):
            start = self._at
            entered = marker == self.FUNCTION[0] or (yield from self._enter(marker))
            if not (entered and (yield from self._function())):
                self.not_a_call(start)
                continue
            while (yield from self._next_function()):
                pass
            yield from self._leave()

    def _begins(self) -> tuple[str, ...]:
        """Return the markers that may begin calls."""
        return (self.BLOCK[0], self.FUNCTION[0]) if self.BARE else (self.BLOCK[0],)

    def _enter(self, marker: str) -> Reading[bool]:
        """Read from ``marker`` to the name of the function; return False if there is no function."""
        yield from self.space()
        return (yield from self.take(self.FUNCTION[0]))

    def _leave(self) -> Reading[None]:
        """Read the end of the block."""
        yield from self.space()
        yield from self.take(self.BLOCK[1])

    def _next_function(self) -> Reading[bool]:
        """Read another function of the block; return False, with only white space read, if there is none."""
        yield from self.space()
        start = self._at
        if (yield from self.take(self.FUNCTION[0])) and (yield from self._function()):
            return True
        self._at = start
        return False

    def _function(self) -> Reading[bool]:
        """Read a function from its name on; return False if it has no name."""
        name = yield from self._name(self.FUNCTION[0])
        if not name:
            return False
        call = self.start_call(name)
        values = yield from self._values(name)
        self.arguments(call, joined(values))
        self.forget()
        return True

    def _name(self, tag: str) -> Reading[str]:
        """Read the rest of the open ``tag``. Return its name; "" without a name or an end."""
        name = (yield from self.matching(_NAME)).strip()
        if not (yield from self.take(">")):
            return ""
        if tag.endswith('"'):
            return name[:-1] if name.endswith('"') else ""
        return name

    def _values(self, tool: str) -> Reading[dict[str, str]]:
        """Read the parameters, by name and as JSON, and the end of the function."""
        (begin, end), (function, end_function) = self.PARAMETER, self.FUNCTION
        values: dict[str, str] = {}
        while True:
            yield from self.space()
            if (yield from self.take(begin)):
                key = yield from self._name(begin)
                text = yield from self.before_any((end, begin, end_function, self.BLOCK[1], function))
                if key:
                    values[key] = self.value_of(tool, key, self._value(text))
            elif not (yield from self.take(end)):
                yield from self.take(end_function)
                return values

    def _value(self, text: str) -> str:
        """Return the value in ``text``, without the beginning of the next block at its end."""
        before = text.rstrip()
        if before.endswith(self.BLOCK[0]):
            text = before.removesuffix(self.BLOCK[0]).rstrip()
        return text.removeprefix("\n").removesuffix("\n") if self.LINES else text


class Qwen3CoderParser(TagParser):
    """``<tool_call><function=f><parameter=a>1</parameter></function></tool_call>``, with line breaks: Qwen3-Coder."""

    BLOCK = ("<tool_call>", "</tool_call>")
    FUNCTION = ("<function=", "</function>")
    PARAMETER = ("<parameter=", "</parameter>")
    BARE = LINES = True
    MARKS = BLOCK


class SeedOssParser(Qwen3CoderParser):
    """Like Qwen3-Coder, but in ``<seed:tool_call>``: Seed-OSS."""

    BLOCK = ("<seed:tool_call>", "</seed:tool_call>")
    MARKS = BLOCK


class MinimaxM2Parser(TagParser):
    """``<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>``."""

    BLOCK = ("<minimax:tool_call>", "</minimax:tool_call>")
    FUNCTION = ('<invoke name="', "</invoke>")
    PARAMETER = ('<parameter name="', "</parameter>")
    MARKS = BLOCK


class Step3Parser(TagParser):
    """``<steptml:invoke name="f"><steptml:parameter name="a">1</steptml:parameter></steptml:invoke>`` in blocks: Step3.

    The blocks are in a section, and before a function may stand its kind: ``function<｜tool_sep｜>``.
    """

    SECTION = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
    BLOCK = ("<｜tool_call_begin｜>", "<｜tool_call_end｜>")
    FUNCTION = ('<steptml:invoke name="', "</steptml:invoke>")
    PARAMETER = ('<steptml:parameter name="', "</steptml:parameter>")
    MARKS = (*SECTION, *BLOCK, "<｜tool_sep｜>")

    def _begins(self) -> tuple[str, ...]:
        return (self.SECTION[0], self.BLOCK[0])

    def _enter(self, marker: str) -> Reading[bool]:
        yield from self.space()
        if marker == self.SECTION[0] and not (yield from self.take(self.BLOCK[0])):
            return False
        yield from self.matching(_KIND)
        if (yield from self.take("<｜tool_sep｜>")):
            yield from self.matching(_NAME)
        return (yield from super()._enter(marker))

    def _leave(self) -> Reading[None]:
        for end in (self.BLOCK[1], "<｜tool_sep｜>", self.SECTION[1]):
            yield from self.space()
            yield from self.take(end)
