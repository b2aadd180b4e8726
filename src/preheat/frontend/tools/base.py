"""The base of all parsers of tool calls."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from preheat.frontend.stream_parser import CallArguments, CallStart, Content, Part, Reading, StreamParser, ValueEnd
from preheat.frontend.tools.json_object import JsonObject, dumped, whole_object

NAMES, ARGUMENTS, OTHERS = ("name",), ("arguments", "parameters"), ("type", "id")
"""The keys of a call that is a JSON object."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


class ToolParser(StreamParser):
    """Search for calls of ``tools`` in the text of an answer.

    Only the first call counts unless calls may be ``parallel``. ``MARKS``: markers that are tokens of some tokenizers.
    ``TRIGGER`` and ``STRUCTURE``: empty unless a grammar can hold the calls' arguments to a schema. Every call begins
    with ``TRIGGER``. ``STRUCTURE``: the texts before and behind the JSON of the arguments, with %s for the name
    as JSON. ``REASONING``: for a parser of whole answers, the value of ``--reasoning-parser`` for the reasoning in
    them.
    """

    MARKS: ClassVar[tuple[str, ...]] = ()
    TRIGGER: ClassVar[str] = ""
    STRUCTURE: ClassVar[tuple[str, str]] = ("", "")
    REASONING: ClassVar[str] = ""

    def __init__(
        self, tools: Sequence[Tool] = (), parallel: bool = True, stands: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(stands)
        self.tools = {tool.name: tool for tool in tools}
        self._parallel = parallel
        self._calls = 0
        self._dropped = ""

    def add(self, part: Part) -> None:
        if self._parallel or not isinstance(part, CallStart | CallArguments) or part.index == 0:
            super().add(part)

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def start_call(self, name: str, arguments: str = "", id: str = "") -> int:
        """Begin a call of the tool ``name``, and return its number.

        ``arguments``: the JSON object of its arguments, if known. ``id``: the model's own id of the call.
        """
        index, self._calls = self._calls, self._calls + 1
        self.add(CallStart(index, id or self.new_id(), name))
        self.arguments(index, arguments)
        self.forget()
        return index

    def arguments(self, call: int, text: str) -> None:
        """Add more of the arguments of ``call``."""
        if text:
            self.add(CallArguments(call, text))

    def read_arguments(self, call: int) -> Reading[None]:
        """Read a JSON object, the arguments of ``call``, and pass it on as it arrives."""
        end, read = ValueEnd(), JsonObject()
        while True:
            start, self._at = self._at, end.find(self._text, self._at)
            text = read.text(self.bare(self._text[start : self._at]))
            self.forget()
            if end.found:
                self.arguments(call, text + read.rest())
                return
            self.arguments(call, text)
            if not (yield from self.more()):
                self.arguments(call, read.rest())
                return

    def value_of(self, tool: str, name: str, text: str) -> str:
        """Return the JSON of an argument that the model wrote as bare ``text``.

        The argument is text if its schema says so. Others are read as JSON, else as Python, else as text.
        """
        known = self.tools[tool].parameters.get("properties") if tool in self.tools else None
        kinds = _kinds(known.get(name, {"type": "string"})) if isinstance(known, dict) else {"string"}
        if kinds != {"string"} and (kinds != {"string", "null"} or text.strip() == "null"):
            for read in (json.loads, ast.literal_eval):
                try:
                    return dumped(read(text.strip()))
                except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
                    continue
        return dumped(text)

    def content_until(self, *markers: str) -> Reading[str | None]:
        """Read content and the marker behind it. Return the marker; None at the end of the text.

        White space alone before a marker is no content, nor is white space after the last call.
        """
        space = yield from self.space()
        while True:
            text, marker = yield from self.until_any(markers) if markers else self._rest()
            if text:
                self.add(Content(space + text))
                space = ""
            if marker:
                self._dropped = space + self._read_last
                return marker
            if marker is None:
                if space and not self._calls:
                    self.add(Content(space))
                return None

    def _rest(self) -> Reading[tuple[str, str | None]]:
        """Read the text that is there; all of it is content."""
        yield from self.peek()
        text, self._at = self._text[self._at :], len(self._text)
        self.forget()
        return text, "" if text else None

    def not_a_call(self, start: int) -> None:
        """Add the last marker as content: no call follows. Go on reading at ``start``."""
        self.add(Content(self._dropped))
        self._at = start

    def call_object(self, bare: bool = False) -> Reading[bool]:
        """Read a call that is a JSON object with this module's keys.

        Return False, with nothing read, if there is none. The call starts when its name is known; from then on it is a
        call. The arguments are an object, or a string that holds an object. ``bare``: the call may have no arguments.
        """
        start, name, arguments = self._at, None, ""
        if not (yield from self.take("{")):
            return False
        while True:
            yield from self.space()
            key = yield from self._key()
            if key in NAMES:
                name = yield from self.string()
            elif key in ARGUMENTS and (yield from self.peek()) == "{":
                if name is not None:
                    yield from self.read_arguments(self.start_call(name))
                    yield from self._rest_of_object()
                    return True
                arguments = (yield from self.value()) or ""
            elif key in ARGUMENTS:
                text = yield from self.string()
                if text is None or not text.lstrip().startswith("{"):
                    break
                arguments = text.lstrip()
            elif key in OTHERS:
                yield from self.value()
            else:
                break
            yield from self.space()
            if (yield from self.take("}")):
                if name is not None and (arguments or bare):
                    self.start_call(name, whole_object(arguments or "{}"))
                    return True
                break
            if not (yield from self.take(",")):
                break
        self._at = start
        return False

    def call_objects(self, bare: bool = True) -> Reading[bool]:
        """Read calls that are JSON objects, with commas between them; return False if there is no call."""
        before = self._calls
        while (yield from self.call_object(bare)):
            yield from self.space()
            yield from self.take(",")
            yield from self.space()
        return self._calls > before

    def _key(self) -> Reading[str | None]:
        """Read a key and its colon."""
        key = yield from self.string()
        yield from self.space()
        if not (yield from self.take(":")):
            return None
        yield from self.space()
        return key

    def _rest_of_object(self) -> Reading[None]:
        """Read the rest of the call behind its arguments."""
        yield from self.space()
        while (yield from self.take(",")):
            yield from self.space()
            yield from self._key()
            yield from self.value()
            yield from self.space()
        yield from self.take("}")


def _kinds(schema: Any) -> set[str]:
    """Return the types that ``schema`` names, itself or in a choice; none if it names no types."""
    if not isinstance(schema, dict):
        return set()
    choices = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    named = [each.get("type") for each in (schema, *choices) if isinstance(each, dict)]
    return {
        kind for kinds in named for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)
    }
