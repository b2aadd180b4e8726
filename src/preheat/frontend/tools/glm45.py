"""The parser of GLM-4.5 to 4.7, with the arguments of a call as pairs of tags."""

from __future__ import annotations

import re

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser
from preheat.frontend.tools.json_object import joined

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<>\s\ud800-\udfff]*")


class Glm45Parser(ToolParser):
    """``<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``, with line breaks: GLM-4.5 to 4.7.

    A value ends with the next tag. The last of several values with one name counts, so arguments are passed on when the
    call is over.
    """

    MARKS = (_CALL, _END_CALL, _KEY, _END_KEY, _VALUE, _END_VALUE)

    def parse(self) -> Reading[None]:
        while (yield from self.content_until(_CALL)):
            start = self._at
            yield from self.space()
            name = yield from self.matching(_NAME)
            yield from self.space()
            if name and (yield from self.take(_END_CALL)):
                self.start_call(name, "{}")
            elif name and (yield from self.take(_KEY)):
                call = self.start_call(name)
                values = yield from self._values(name)
                self.arguments(call, joined(values))
                self.forget()
            else:
                self.not_a_call(start)

    def _values(self, tool: str) -> Reading[dict[str, str]]:
        """Read the arguments behind the first key's tag, and the call's end.

        Return the arguments as JSON, by name.
        """
        values: dict[str, str] = {}
        while True:
            key = (yield from self.before_any((_END_KEY, _VALUE, _KEY, _END_CALL))).strip()
            yield from self.take(_END_KEY)
            yield from self.space()
            if (yield from self.take(_VALUE)):
                text = yield from self.before_any((_END_VALUE, _KEY, _END_CALL))
                yield from self.take(_END_VALUE)
                if key:
                    values[key] = self.value_of(tool, key, text)
            yield from self.space()
            if not (yield from self.take(_KEY)):
                yield from self.take(_END_CALL)
                return values
