"""The parser of Qwen3-Coder, which writes calls as tags."""

from __future__ import annotations

import ast
import json
from typing import Any

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser


class Qwen3CoderParser(ToolParser):
    """``<tool_call><function=f><parameter=a>1</parameter></function></tool_call>``, with line breaks between the tags.

    The schemas of the tools say which values are text; the others are read as JSON, or else as Python.
    """

    SPECIAL = ("<tool_call>", "</tool_call>")

    def parse(self) -> Reading[None]:
        while marker := (yield from self.content_until("<tool_call>", "<function=")):
            start = self._at
            if marker == "<tool_call>":
                yield from self.space()
                if not (yield from self.take("<function=")):
                    self.not_a_call(start)
                    continue
            name = yield from self.until(">")
            if name is None:
                self.not_a_call(start)
                continue
            yield from self._parameters(self.start_call(name), name)
            yield from self.space()
            yield from self.take("</tool_call>")

    def _parameters(self, call: int, name: str) -> Reading[None]:
        """Read the parameters and the end of the function. What the end of the text cuts off is left out."""
        before = "{"
        while True:
            yield from self.space()
            if not (yield from self.take("<parameter=")):
                break
            key = yield from self.until(">")
            value = None if key is None else (yield from self.until("</parameter>"))
            if key is None or value is None:
                self._at = len(self._text)
                return
            self.arguments(call, f"{before}{json.dumps(key)}: {self._json(name, key, value)}")
            before = ", "
        if (yield from self.take("</function>")):
            self.arguments(call, "{}" if before == "{" else "}")

    def _json(self, tool: str, key: str, text: str) -> str:
        """The value ``text`` of a parameter as JSON."""
        text = text.removeprefix("\n").removesuffix("\n")
        known = self.tools[tool].parameters.get("properties", {}) if tool in self.tools else {}
        schema = known.get(key, {"type": "string"}) if isinstance(known, dict) else {}
        if not isinstance(schema, dict) or schema.get("type") != "string":
            for read in (json.loads, ast.literal_eval):
                try:
                    return _dumped(read(text.strip()))
                except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
                    continue
        return _dumped(text)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
