"""The parser of models that write calls as a list in Python: ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from preheat.frontend.stream_parser import Reading
from preheat.frontend.tools.base import ToolParser

_NAME = re.compile(r"[\w.]*")
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """The answer begins with such a list: Llama 4, Olmo 3 and others. The values of arguments are literals."""

    SPECIAL = ("<|python_start|>", "<|python_end|>")

    def parse(self) -> Reading[None]:
        start = self._at
        yield from self.space()
        yield from self.take("<|python_start|>")
        yield from self.space()
        if not ((yield from self.take("[")) and (yield from self._calls_here())):
            self._at = start
        yield from self.content_until()

    def _calls_here(self) -> Reading[bool]:
        """Read calls up to the end of the list; False if not even the first is one."""
        separated = True
        while separated:
            start = self._at
            yield from self.space()
            if not (yield from self._call()):
                self._at = start
                return self._calls > 0
            yield from self.space()
            separated = yield from self.take(",")
        yield from self.take("]")
        yield from self.take("<|python_end|>")
        return True

    def _call(self) -> Reading[bool]:
        name = yield from self.matching(_NAME)
        if not name or (yield from self.peek()) != "(":
            return False
        text = yield from self.value(quotes="'\"")
        arguments = None if text is None else _arguments(text)
        if arguments is None:
            return False
        self.start_call(name, arguments)
        return True


def _arguments(text: str) -> str | None:
    """The JSON object for the arguments ``text``, ``(a=1, b="x")``; None if they are anything but keywords."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return json.dumps({str(word.arg): _literal(word.value) for word in call.keywords}, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal, in which JSON's constants count too. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(key) if key else "": _literal(v) for key, v in zip(keys, values, strict=True)}
    return ast.literal_eval(node)
