"""Messages of the package: errors, refusals, warnings and log lines. ``python -m tests.meta.messages`` lists them."""

from __future__ import annotations

import ast
import inspect
import re
from typing import NamedTuple

from preheat import errors
from tests.meta.source import MODULES, ROOT

ERRORS = {name for name, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, errors.PreheatError)}
RAISED = re.compile(r"\w*Error|Refused|NothingToRun|TooComplex|BadExpression|_error|_wrong|no|refused|warn")
LOGGED = re.compile(r"logger\.(debug|info|warning|error|critical|exception)")
HOLE = "{}"
_PROSE = re.compile(r"[A-Za-z].* ")  # anything else is a name


class Message(NamedTuple):
    """A message: its file, its line, its ``maker`` (a class or function), and its text with ``{}`` for each value."""

    file: str
    line: int
    maker: str
    text: str

    @property
    def logged(self) -> bool:
        return LOGGED.fullmatch(self.maker) is not None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.maker}: {self.text}"


def messages() -> list[Message]:
    """Return all messages in the order of files and lines. A maker's last prose argument is the message."""
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _makes(maker := ast.unparse(node.func)):
                file = str(path.relative_to(ROOT))
                texts = list(filter(None, map(_texts, node.args[:1] if LOGGED.fullmatch(maker) else node.args)))
                found += [Message(file, node.lineno, maker, text) for last in texts[-1:] for text in last]
    return sorted(found)


def _makes(maker: str) -> bool:
    name = maker.rpartition(".")[2]
    return name in ERRORS or RAISED.fullmatch(name) is not None or LOGGED.fullmatch(maker) is not None


def _texts(argument: ast.expr) -> list[str]:
    """Return the texts of ``argument``: none unless it is prose, two if it is a conditional."""
    branches = (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,)
    return [text for text in map(template, branches) if text is not None and _PROSE.search(text)]


def template(node: ast.expr) -> str | None:
    """Return the text of a string or an f-string, with ``{}`` for each value; None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(each.value) if isinstance(each, ast.Constant) else HOLE for each in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{template(left) or HOLE}{template(right) or HOLE}"
    return None


if __name__ == "__main__":
    print(*messages(), sep="\n")
