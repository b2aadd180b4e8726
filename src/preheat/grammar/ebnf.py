"""Rules in xgrammar's notation, a dialect of EBNF.

xgrammar's masks are fast if each character leads from a state to one state. So an expression that counts repetitions,
or combines several expressions, is written as a deterministic automaton.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from preheat.grammar.characters import Ranges, common, of
from preheat.grammar.derive import TooComplex, automaton, ending
from preheat.grammar.lark import times
from preheat.grammar.nodes import (
    Alt,
    Both,
    Chars,
    Multiple,
    Node,
    Not,
    Quoted,
    Ref,
    Repeat,
    Rules,
    Seq,
    Token,
    nullable,
    within,
)
from preheat.grammar.numbers import integers
from preheat.grammar.quote import character, spelled
from preheat.grammar.source import Inexact

MOST_STATES = 2000

NOTHING_MORE = ('""',)


class EbnfWriter:
    """Writer of rules in xgrammar's notation."""

    def __init__(self) -> None:
        self._lines, self._units, self._states = list[str](), dict[Node, str](), 0

    def text(self, rules: Rules, start: str) -> str:
        """Return the grammar of ``rules`` with the first rule ``start``."""
        for name, node in rules.items():
            self._lines.append(f"{name} ::= {self._rule(node)}")
        return "\n".join([f"root ::= {start}", *self._lines])

    def _rule(self, node: Node) -> str:
        match node:
            case Ref(name):
                return name
            case Seq(parts):
                return " ".join(map(self._rule, parts)) or '""'
            case Alt(parts):
                return f"({' | '.join(map(self._rule, parts))})"
            case Repeat(inner, least, most) if least > 1 or (most or 1) > 1:
                return self._chain(self._rule(inner), least, most)
            case Repeat(inner, least, most):
                return f"({self._rule(inner)}){times(least, most)}"
            case Token() | Quoted() | Multiple():
                return self._unit(node)
        return self._inline(node)

    def _chain(self, inner: str, least: int, most: int | None) -> str:
        """Return ``inner`` repeated, as a chain of shared rules: one rule for each count."""
        self._count(most or least)
        name = f"c{self._states}_"
        for at in range(most or least):
            more = f"{inner} {name}{at + 1}"
            self._lines.append(f"{name}{at} ::= {more}" + ("" if at < least else ' | ""'))
        self._lines.append(f"{name}{most or least} ::= " + ('""' if most else f"({inner})*"))
        return f"{name}0"

    def _unit(self, node: Token | Quoted | Multiple) -> str:
        if isinstance(node, Token) and not _counts(node.inner):
            return self._inline(node.inner)
        if (name := self._units.get(node)) is None:
            name = self._units[node] = f"u{len(self._units)}"
            self._lines.append(f"{name} ::= {self._body(node)}")
        return name

    def _body(self, node: Token | Quoted | Multiple) -> str:
        if isinstance(node, Multiple):
            return self._multiples(node)
        if isinstance(node, Token):
            return self._automaton(node.inner, self._class, '""')
        if _counts(node.inner):
            return '"\\"" ' + self._automaton(node.inner, lambda ranges: self._inline(character(ranges)), '"\\""')
        return f'"\\"" {self._inline(spelled(node.inner))} "\\""'

    def _inline(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return self._class(ranges)
            case Seq(parts):
                return self._sequence(parts)
            case Alt(parts):
                return f"({' | '.join(map(self._inline, parts))})"
            case Repeat(inner, least, most):
                return f"({self._inline(inner)}){times(least, most)}"
        raise TypeError(f"no regular expression without counts: {node!r}")

    def _sequence(self, parts: tuple[Node, ...]) -> str:
        """Return ``parts`` one behind the other; single characters are joined."""
        found, literal = list[str](), ""
        for part in parts:
            if isinstance(part, Chars) and len(part.ranges) == 1 and part.ranges[0][0] == part.ranges[0][1] != 0:
                literal += chr(part.ranges[0][0])
                continue
            found += [_quote(literal)] if literal else []
            literal = ""
            found.append(self._inline(part))
        return " ".join([*found, _quote(literal)] if literal or not found else found)

    def _class(self, ranges: Ranges) -> str:
        spans = (_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
        return f"[{''.join(spans)}]"

    def _automaton(self, node: Node, edge: Callable[[Ranges], str], end: str) -> str:
        """Write the automaton of ``node`` as rules, and return its first state; ``end`` ends a text."""
        found = automaton(node)
        self._count(len(found))
        base = f"a{self._states}_"
        names = {state: f"{base}{number}" for number, state in enumerate(found)}
        for state, edges in found.items():
            ways = [f"{edge(ranges)} {names[target]}" for ranges, target in edges]
            self._lines.append(f"{names[state]} ::= {' | '.join([end] * nullable(state) + ways)}")
        return names[next(iter(found))]

    def _count(self, states: int) -> None:
        self._states += states
        if self._states > MOST_STATES:
            raise TooComplex(f"xgrammar would need more than {MOST_STATES:,} states for its lengths and patterns")

    def _multiples(self, node: Multiple) -> str:
        """Write an automaton of multiples, and return its first state.

        A state is the remainder of the digits so far, divided by the number.
        """
        if not node.whole:
            raise Inexact("multipleOf of numbers that are no integers")
        step = int(node.of)
        bounds = integers(*(None if each is None else int(each) for each in (node.least, node.most)))
        digits, edges = automaton(bounds), dict[tuple[Node, int], list[tuple[Ranges, tuple[Node, int]]]]()
        todo = [(next(iter(digits)), 0)]
        while todo:
            state, left = todo.pop()
            if (state, left) in edges:
                continue
            self._count(1)
            ways = edges[state, left] = []
            for ranges, target in digits[state]:
                for each in "-0123456789":
                    if common(ranges, of(each)):
                        ways.append((of(each), (target, left if each == "-" else (left * 10 + int(each)) % step)))
            todo += [target for _, target in ways]
        ends = [each for each in edges if nullable(each[0]) and not each[1]]
        alive = ending(edges, ends)
        names = {each: f"n{self._states}_{number}" for number, each in enumerate(edges) if each in alive}
        for one, its_name in names.items():
            more = [f"{self._class(ranges)} {names[target]}" for ranges, target in edges[one] if target in alive]
            self._lines.append(f"{its_name} ::= {' | '.join([*NOTHING_MORE[: one in ends], *more])}")
        return names[next(iter(edges))]


def _counts(node: Node) -> bool:
    """Return whether an expression counts repetitions, or combines several expressions."""
    return any(
        isinstance(each, Both | Not) or (isinstance(each, Repeat) and (each.least > 1 or (each.most or 1) > 1))
        for each in within(node)
    )


def _quote(value: str) -> str:
    """Return ``value`` as a literal. xgrammar reads an escaped pair of surrogates as two characters of no text."""
    return json.dumps(value, ensure_ascii=False)


def _code(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
