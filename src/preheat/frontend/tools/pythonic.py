"""The parsers of models that write calls in Python: ``f(a=1)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser
from preheat.frontend.tools.json_object import dumped

_NAME = re.compile(r"[\w.]*")
_DEEPEST = 100
"""Most open brackets of arguments, as of JSON: to read each block to the end of the text would take too long."""
_CONSTANTS = {"true": True, "false": False, "null": None}
_BLOCKS: Mapping[str, str] = MappingProxyType(
    {"<|python_start|>": "<|python_end|>", "<function_calls>": "</function_calls>"}
)


class PythonicParser(ToolParser):
    """Calls in a list, ``[f(a=1), g(b="x")]``, or in one of the `_BLOCKS`.

    The list is at the beginning of the answer; blocks are anywhere. Llama 4 writes a list, also in a block of its own.
    Olmo 3 writes a block with a call in each line. The values of arguments are literals.
    """

    MARKS = (*_BLOCKS, *_BLOCKS.values())

    def parse(self) -> Reading[None]:
        start = self._at
        yield from self.space()
        if not ((yield from self.take("[")) and (yield from self._calls_here("]"))):
            self._at = start
        yield from self._blocks(*_BLOCKS)

    def _blocks(self, *begins: str) -> Reading[None]:
        """Read content, and the calls in blocks."""
        while begin := (yield from self.content_until(*begins)):
            start, end = self._at, _BLOCKS[begin]
            yield from self.space()
            if (yield from self.take("[")):
                found = yield from self._calls_here("]")
                yield from self.space()
                yield from self.take(end)
            else:
                found = yield from self._calls_here(end)
            if not found:
                self.not_a_call(start)

    def _calls_here(self, end: str) -> Reading[bool]:
        """Read calls up to ``end``; return False if there is no call.

        White space or commas are between them.
        """
        before = self._calls
        yield from self.space()
        while (yield from self._call()):
            yield from self.space()
            if (yield from self.take(",")):
                yield from self.space()
        yield from self.take(end)
        return self._calls > before

    def _call(self) -> Reading[bool]:
        """Read a call; return False, with nothing read, if there is none."""
        start = self._at
        name = yield from self.matching(_NAME)
        if name and (yield from self.peek()) == "(":
            text = yield from self.value(quotes="'\"", deepest=_DEEPEST)
            arguments = None if text is None else _arguments(text)
            if arguments is not None:
                self.start_call(name, arguments)
                return True
        self._at = start
        return False


class Olmo3Parser(PythonicParser):
    """``<function_calls>``, a call in each line, ``</function_calls>``: Olmo 3. A list is content."""

    def parse(self) -> Reading[None]:
        yield from self._blocks("<function_calls>")


def _arguments(text: str) -> str | None:
    """Return the JSON object for the arguments ``text``, ``(a=1, b="x")``; None unless all are keywords."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(word.arg for word in call.keywords):
            return None
        return dumped({str(word.arg): _literal(word.value) for word in call.keywords})
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; JSON's constants are literals too. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    """Return the key of a dictionary, as text. Raises ValueError for a key that JSON cannot have."""
    key = None if node is None else _literal(node)
    if node is None or isinstance(key, list | dict):
        raise ValueError("a key of JSON is a text")
    return key if isinstance(key, str) else dumped(key)
