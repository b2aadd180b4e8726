"""Parsers of models that write a call as a marked name and a JSON object behind it."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser

_KIND = re.compile(r"\w*")
_NAME = re.compile(r"[^\s<>{`\ud800-\udfff]*")


class NamedJsonParser(ToolParser):
    """Calls with a name and a JSON object between two markers, in a section or without one."""

    SECTION: ClassVar[tuple[str, str]]
    CALL: ClassVar[tuple[str, str]]

    def parse(self) -> Reading[None]:
        (section, end_section), (call, end_call) = self.SECTION, self.CALL
        while marker := (yield from self.content_until(section, call)):
            start = self._at
            if marker == section:
                yield from self.space()
            if (marker == call or (yield from self.take(call))) and (yield from self._call()):
                for end in (end_call, end_section):
                    yield from self.space()
                    yield from self.take(end)
            else:
                self.not_a_call(start)

    def _call(self) -> Reading[bool]:
        """Read a call behind its marker; return False if there is none."""
        name, id = yield from self._head()
        yield from self.space()
        if not name or (yield from self.peek()) != "{":
            return False
        yield from self.read_arguments(self.start_call(name, id=id))
        yield from self._tail()
        return True

    @abstractmethod
    def _head(self) -> Reading[tuple[str, str]]:
        """Read the name and the model's own id of a call; "" for a missing one."""

    def _tail(self) -> Reading[None]:
        """Read the text between the arguments and the end of the call."""
        yield from ()


class DeepseekV31Parser(NamedJsonParser):
    """``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`` in a section: DeepSeek V3.1."""

    SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    MARKS = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def _head(self) -> Reading[tuple[str, str]]:
        name = yield from self.matching(_NAME)
        return (name if (yield from self.take("<｜tool▁sep｜>")) else ""), ""


class DeepseekV3Parser(DeepseekV31Parser):
    """Like V3.1, but ``function<｜tool▁sep｜>f`` and the arguments in a block of code: DeepSeek V3 and R1."""

    def _head(self) -> Reading[tuple[str, str]]:
        yield from self.matching(_KIND)
        if not (yield from self.take("<｜tool▁sep｜>")):
            return "", ""
        name = yield from self.matching(_NAME)
        yield from self.space()
        yield from self.take("```json")
        return name, ""

    def _tail(self) -> Reading[None]:
        yield from self.space()
        yield from self.take("```")


class KimiK2Parser(NamedJsonParser):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`` in a section: Kimi K2.

    The text before the arguments is the id of the call: the model's template wants it back.
    """

    SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
    MARKS = (*SECTION, *CALL, "<|tool_call_argument_begin|>")

    def _head(self) -> Reading[tuple[str, str]]:
        yield from self.space()
        id = yield from self.matching(_NAME)
        yield from self.space()
        name, _, number = id.rpartition(":")
        if not number.isdecimal() or not (yield from self.take("<|tool_call_argument_begin|>")):
            return "", ""
        return name.removeprefix("functions."), id
