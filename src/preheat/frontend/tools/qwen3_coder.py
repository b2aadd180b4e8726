"""The parser of Qwen3-Coder, which writes calls as tags."""

from __future__ import annotations

import re

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser
from preheat.frontend.tools.json_object import dumped

_CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_END_CALL, _END_FUNCTION, _END_PARAMETER = "</tool_call>", "</function>", "</parameter>"
_BEHIND_VALUE = (_END_PARAMETER, _PARAMETER, _END_FUNCTION, _END_CALL, _FUNCTION)
_NAME = re.compile(r"[^<>\n]*")
_NEXT_CALL = re.compile(r"\s*<tool_call>\s*\Z")


class Qwen3CoderParser(ToolParser):
    """``<tool_call><function=f><parameter=a>1</parameter></function></tool_call>``, with line breaks between the tags.

    A value ends with the next tag, as Qwen's own parser has it, so an end that is missing takes nothing else along. Of
    values with one name the last counts, so arguments are passed on when the call is over.
    """

    MARKS = (_CALL, _END_CALL)

    def parse(self) -> Reading[None]:
        while marker := (yield from self.content_until(_CALL, _FUNCTION)):
            start = self._at
            if marker == _CALL:
                yield from self.space()
                if not (yield from self.take(_FUNCTION)):
                    self.not_a_call(start)
                    continue
            name = yield from self._name()
            if not name:
                self.not_a_call(start)
                continue
            call = self.start_call(name)
            values = yield from self._values(name)
            self.arguments(call, "{" + ", ".join(f"{dumped(key)}: {value}" for key, value in values.items()) + "}")
            self.forget()
            yield from self.space()
            yield from self.take(_END_CALL)

    def _name(self) -> Reading[str]:
        """Read the name in a tag, and the end of the tag; "" if that is missing."""
        name = yield from self.matching(_NAME)
        return name.strip() if (yield from self.take(">")) else ""

    def _values(self, tool: str) -> Reading[dict[str, str]]:
        """Read the parameters, by name and as JSON, and the end of the function."""
        values: dict[str, str] = {}
        while True:
            yield from self.space()
            if (yield from self.take(_PARAMETER)):
                key = yield from self._name()
                text = yield from self.before_any(_BEHIND_VALUE)
                if key:
                    values[key] = self.value_of(tool, key, _NEXT_CALL.sub("", text))
            elif not (yield from self.take(_END_PARAMETER)):
                yield from self.take(_END_FUNCTION)
                return values
