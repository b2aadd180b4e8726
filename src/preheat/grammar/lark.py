"""Rules in llguidance's notation, a dialect of Lark's."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction

from preheat.grammar.characters import Ranges
from preheat.grammar.nodes import Alt, Both, Chars, Multiple, Node, Not, Quoted, Ref, Repeat, Rules, Seq, Token, within
from preheat.grammar.quote import quoted
from preheat.grammar.source import Inexact

EXACT = 2**53
"""The library reads numbers as doubles; up to this bound, each integer is a double."""


class LarkWriter:
    """Writer of rules in llguidance's notation; names begin with ``prefix``."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix, self._lines = prefix, list[str]()
        self._terminals = dict[Node, str]()

    def rules(self, rules: Rules) -> list[str]:
        """Return the lines of ``rules``."""
        for name, node in rules.items():
            self._lines.append(f"{self._prefix}{name}: {self._rule(node)}")
        return self._lines

    def _rule(self, node: Node) -> str:
        match node:
            case Ref(name):
                return self._prefix + name
            case Seq(parts):
                return " ".join(map(self._rule, parts)) or '""'
            case Alt(parts):
                return f"({' | '.join(map(self._rule, parts))})"
            case Repeat(inner, least, most):
                return f"({self._rule(inner)}){times(least, most)}"
            case Multiple():
                return f"%json {json.dumps(_multiple(node))}"
            case _:
                return self._terminal(node)

    def _terminal(self, node: Node) -> str:
        if (name := self._terminals.get(node)) is None:
            name = self._terminals[node] = f"{self._prefix.upper()}T{len(self._terminals)}"
            inner = node.inner if isinstance(node, Token) else quoted(node.inner) if isinstance(node, Quoted) else node
            self._lines.append(f"{name}: {terminal(inner)}")
        return name


def terminal(node: Node) -> str:
    """Return the regular expression ``node`` in the notation of terminals."""
    if not any(isinstance(each, Both | Not) for each in within(node)):
        found = expression(node)
        return f"/{found}/" if found else '""'
    return _compound(node, terminal)


def _compound(node: Node, write: Callable[[Node], str]) -> str:
    match node:
        case Both(parts):
            return f"({' & '.join(map(write, parts))})"
        case Not(inner):
            return f"~({write(inner)})"
        case Seq(parts):
            return " ".join(map(write, parts))
        case Alt(parts):
            return f"({' | '.join(map(write, parts))})"
        case Repeat(inner, least, most):
            return f"({write(inner)}){times(least, most)}"
    raise TypeError(f"no regular expression: {node!r}")


def expression(node: Node) -> str:
    """Return the regular expression ``node`` in Rust's syntax."""
    match node:
        case Chars(ranges):
            return characters(ranges)
        case Seq(parts):
            return "".join(map(expression, parts))
        case Alt(parts):
            return f"(?:{'|'.join(map(expression, parts))})"
        case Repeat(inner, least, most):
            return f"(?:{expression(inner)}){times(least, most)}"
    raise TypeError(f"no regular expression: {node!r}")


def characters(ranges: Ranges) -> str:
    """Return a class of characters; a single character without need of an escape stays as it is."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and _plain(ranges[0][0]):
        return chr(ranges[0][0])
    spans = (_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
    return f"[{''.join(spans)}]"


def _plain(code: int) -> bool:
    return chr(code).isascii() and chr(code).isalnum()


def _code(code: int) -> str:
    return chr(code) if _plain(code) else f"\\x{{{code:x}}}"


def times(least: int, most: int | None) -> str:
    """Return the quantifier of a repetition."""
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    count = str(least) if least == most else f"{least},{'' if most is None else most}"
    return known.get((least, most), f"{{{count}}}")


def _multiple(node: Multiple) -> dict[str, object]:
    """Return the library's own schema of multiples. Raises Inexact for numbers that the library would round."""
    for each in (node.of, node.least, node.most):
        if each is not None and (abs(each) > EXACT or (each != Fraction(repr(float(each))))):
            raise Inexact(f"multipleOf with numbers of more digits than a double has: {each}")
    if node.of.numerator >= 2**32:
        raise Inexact(f"multipleOf {node.of}: it is too large")
    found: dict[str, object] = {"type": "integer" if node.whole else "number", "multipleOf": _plain_number(node.of)}
    found |= {} if node.least is None else {"minimum": _plain_number(node.least)}
    found |= {} if node.most is None else {"maximum": _plain_number(node.most)}
    return {**found, "x-guidance": {"whitespace_flexible": False}}


def _plain_number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
