"""Parsers of models that write a call, or the arguments of a call, as a JSON object."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser

_NAME = re.compile(r"[\w.-]*")
_ALPHANUMERIC = string.ascii_letters + string.digits


class MarkedJsonParser(ToolParser):
    """JSON objects behind a marker; each object is a call.

    ``ENDS``: the end of the calls by the marker that begins them, "" if there is none. ``INNER``: a second marker,
    before the JSON. ``ARRAY``: the objects are in an array. ``BARE``: the answer may begin with calls without a marker;
    these calls must have arguments.
    """

    ENDS: ClassVar[Mapping[str, str]]
    INNER: ClassVar[str] = ""
    ARRAY: ClassVar[bool] = False
    BARE: ClassVar[bool] = False

    def parse(self) -> Reading[None]:
        if self.BARE:
            start = self._at
            yield from self.space()
            if not (yield from self._calls_here(bare=False)):
                self._at = start
        while begin := (yield from self.content_until(*self.ENDS)):
            start, end = self._at, self.ENDS[begin]
            yield from self.space()
            inner = yield from self.take(self.INNER)
            yield from self.space()
            if not (inner and (yield from self._calls_here(bare=True))):
                self.not_a_call(start)
            elif end:
                yield from self.space()
                yield from self.take(end)

    def _calls_here(self, bare: bool) -> Reading[bool]:
        """Read calls; return False if there are none."""
        if not self.ARRAY:
            return (yield from self.call_object(bare))
        if not (yield from self.take("[")):
            return False
        yield from self.space()
        found = yield from self.call_objects(bare)
        yield from self.take("]")
        return found


class HermesParser(MarkedJsonParser):
    """``<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>``: Hermes, Qwen2.5, Qwen3, Granite 4, ERNIE 4.5."""

    ENDS = MappingProxyType({"<tool_call>": "</tool_call>"})
    MARKS = ("<tool_call>", "</tool_call>")
    TRIGGER = "<tool_call>"
    STRUCTURE = ('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>")


class GraniteParser(MarkedJsonParser):
    """``<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]``: Granite 3.0, and 3.1 with ``<tool_call>``."""

    ENDS = MappingProxyType({"<|tool_call|>": "", "<tool_call>": ""})
    MARKS = ("<|tool_call|>", "<tool_call>")
    ARRAY = BARE = True


class GraniteFunctionParser(MarkedJsonParser):
    """``<function_call> {"name": "f", "arguments": {"a": 1}}``, once for each call: Granite 20B FunctionCalling."""

    ENDS = MappingProxyType({"<function_call>": ""})
    MARKS = ("<function_call>",)


class Phi4MiniParser(MarkedJsonParser):
    """``functools[{"name": "f", "arguments": {"a": 1}}]``: Phi-4-mini."""

    ENDS = MappingProxyType({"functools": ""})
    ARRAY = True


class ToolCallsParser(MarkedJsonParser):
    """``<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>``: Jamba, Hunyuan A13B."""

    ENDS = MappingProxyType({"<tool_calls>": "</tool_calls>"})
    MARKS = ("<tool_calls>", "</tool_calls>")
    ARRAY = True


class InternlmParser(MarkedJsonParser):
    """``<|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>``: InternLM 2.5."""

    ENDS = MappingProxyType({"<|action_start|>": "<|action_end|>"})
    MARKS = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    INNER = "<|plugin|>"


class XlamParser(MarkedJsonParser):
    """``[{"name": "f", "arguments": {"a": 1}}]`` as the beginning, in a block of code or in tags: xLAM."""

    ENDS = MappingProxyType({"[TOOL_CALLS]": "", "<tool_call>": "</tool_call>", "```": "```"})
    MARKS = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")
    ARRAY = BARE = True

    def _calls_here(self, bare: bool) -> Reading[bool]:
        if bare:  # behind a marker; the marker may begin a block of code in a language
            yield from self.take("json")
            yield from self.space()
        return (yield from super()._calls_here(bare))


class Llama3JsonParser(ToolParser):
    """``{"name": "f", "parameters": {"a": 1}}``, several with semicolons or line breaks between them: Llama 3.1 to 4.

    The answer begins so, or ``<|python_tag|>`` comes first.
    """

    MARKS = ("<|python_tag|>",)

    def parse(self) -> Reading[None]:
        start = self._at
        yield from self.space()
        expected = (yield from self.peek()) == "{"
        if not expected or not (yield from self._calls_here()):
            self._at = start
        while (yield from self.content_until("<|python_tag|>")):
            start = self._at
            yield from self.space()
            if not (yield from self._calls_here()):
                self.not_a_call(start)

    def _calls_here(self) -> Reading[bool]:
        """Read calls; return False, with nothing read, if there are none."""
        before = self._calls
        while (yield from self.call_object()):
            yield from self.space()
            yield from self.take(";")
            yield from self.space()
        return self._calls > before


class MistralParser(ToolParser):
    """``[TOOL_CALLS]`` and a JSON array of calls, or since the eleventh tokenizer ``[TOOL_CALLS]f[ARGS]{"a": 1}``."""

    MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def new_id(self) -> str:
        """Return nine letters and digits: the templates of these models accept no other id."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def parse(self) -> Reading[None]:
        while (yield from self.content_until("[TOOL_CALLS]")):
            start = self._at
            yield from self.space()
            if (yield from self.take("[")):
                yield from self.space()
                if (yield from self.call_objects()):
                    yield from self.take("]")
                    continue
            elif (yield from self._named_call()):
                continue
            self.not_a_call(start)

    def _named_call(self) -> Reading[bool]:
        name = yield from self.matching(_NAME)
        if (yield from self.take("[CALL_ID]")):
            yield from self.matching(_NAME)
        yield from self.take("[ARGS]")
        yield from self.space()
        if not name or (yield from self.peek()) != "{":
            return False
        yield from self.read_arguments(self.start_call(name))
        return True


class RequiredParser(ToolParser):
    """A JSON array of calls and nothing else, as the grammar of ``tool_choice`` "required" has it."""

    def parse(self) -> Reading[None]:
        start = self._at
        yield from self.space()
        yield from self.take("[")
        yield from self.space()
        if not (yield from self.call_objects()):
            self._at = start
        else:
            yield from self.take("]")
        yield from self.content_until()


class NamedParser(ToolParser):
    """A text that is the arguments of the first tool, for a named ``tool_choice``."""

    def parse(self) -> Reading[None]:
        start = self._at
        yield from self.space()
        if (yield from self.peek()) == "{":
            yield from self.read_arguments(self.start_call(next(iter(self.tools))))
        else:
            self._at = start
        yield from self.content_until()
