"""Derivatives of regular expressions: match a text, find any text, build the automaton.

The derivative of an expression by a character holds the texts that may follow this character. Work is bounded: an
expression that needs more raises :class:`TooComplex`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from preheat.grammar.characters import ANY_CHARACTER, Ranges, common, holds, others, union
from preheat.grammar.nodes import (
    EMPTY,
    NOTHING,
    Alt,
    Both,
    Chars,
    Node,
    Not,
    Repeat,
    Seq,
    alt,
    both,
    counted,
    nullable,
    repeat,
    seq,
    within,
    without,
)

State = TypeVar("State", bound=Hashable)

MOST_STATES, MOST_WORK = 4000, 60_000
"""Most states of an automaton, and most nodes that are visited to find them."""


class TooComplex(ValueError):
    """An expression with an automaton that is too large."""


@dataclass
class _Work:
    left: int = MOST_WORK
    seen: dict[tuple[Node, int], Node] = field(default_factory=dict)

    def derivative(self, node: Node, code: int) -> Node:
        """Return the texts that may follow the character ``code``."""
        if (found := self.seen.get((node, code))) is None:
            self.left -= 1
            if self.left < 0:
                raise TooComplex("its automaton is too large")
            found = self.seen[node, code] = self._derivative(node, code)
        return found

    def _derivative(self, node: Node, code: int) -> Node:
        match node:
            case Chars(ranges):
                return EMPTY if holds(ranges, code) else NOTHING
            case Alt(parts):
                self.left -= len(parts)
                return alt(*(self.derivative(part, code) for part in parts))
            case Both(parts):
                return both(*(self.derivative(part, code) for part in parts))
            case Not(inner):
                return without(self.derivative(inner, code))
            case Repeat(inner, least, most):
                rest = repeat(inner, max(least - 1, 0), None if most is None else most - 1)
                return seq(self.derivative(inner, code), rest)
            case Seq(parts):
                found = list[Node]()
                for at, part in enumerate(parts):
                    found.append(seq(self.derivative(part, code), *parts[at + 1 :]))
                    if not nullable(part):
                        break
                return alt(*found)
        raise TypeError(f"no regular expression: {node!r}")


def classes(node: Node) -> list[Ranges]:
    """Return the sets of characters that ``node`` tells apart at its beginning; their union is all characters."""
    found = [ANY_CHARACTER]
    for each in dict.fromkeys(_beginnings(node)):
        rest = others(each)
        found = [part for one in found for part in (common(one, each), common(one, rest)) if part]
        if len(found) > MOST_STATES:
            raise TooComplex("it distinguishes too many characters")
    return found


def _beginnings(node: Node) -> Iterable[Ranges]:
    match node:
        case Chars(ranges):
            yield ranges
        case Alt(parts) | Both(parts):
            for part in parts:
                yield from _beginnings(part)
        case Not(inner) | Repeat(inner):
            yield from _beginnings(inner)
        case Seq(parts):
            for part in parts:
                yield from _beginnings(part)
                if not nullable(part):
                    return


class Matcher:
    """Match texts; texts that begin alike share the work."""

    def __init__(self) -> None:
        self._seen = dict[tuple[Node, int], Node]()

    def fits(self, node: Node, text: str) -> bool:
        """Return whether ``node`` holds ``text``. Raises TooComplex."""
        work = _Work(seen=self._seen)
        for character in text:
            node = work.derivative(node, ord(character))
            if len(self._seen) > MOST_WORK:
                self._seen.clear()
        return nullable(node)


def fits(node: Node, text: str) -> bool:
    """Return whether ``node`` holds ``text``. Raises TooComplex."""
    return Matcher().fits(node, text)


def is_empty(node: Node) -> bool:
    """Return whether ``node`` holds no text. Raises TooComplex."""
    if not any(isinstance(each, Both | Not) for each in within(node)):
        return node == NOTHING
    return not any(map(nullable, _explore(node, {})))


Edges = list[tuple[Ranges, Node]]


def _explore(node: Node, edges: dict[Node, Edges]) -> Iterable[Node]:
    """Yield the states of the automaton of ``node``, the nearest first; write their transitions into ``edges``."""
    work, todo, seen = _Work(), deque([node]), {node}
    while todo:
        state = todo.popleft()
        yield state
        merged = dict[Node, Ranges]()
        for each in classes(state):
            work.left -= 1
            if (found := work.derivative(state, each[0][0])) != NOTHING:
                merged[found] = union(merged.get(found, ()), each)
        edges[state] = [(ranges, found) for found, ranges in merged.items()]
        for found in merged:
            if found not in seen:
                seen.add(found)
                todo.append(found)
        if len(seen) > MOST_STATES:
            raise TooComplex(f"its automaton has more than {MOST_STATES:,} states")


def automaton(node: Node) -> dict[Node, Edges]:
    """Return the deterministic automaton of ``node``, its first state first.

    States without a way to the end of a text are left out. A text may end in a nullable state. Raises TooComplex.
    """
    edges = dict[Node, Edges]()
    states = list(_explore(node, edges))
    alive = ending(edges, [state for state in states if nullable(state)])
    return {state: [edge for edge in edges[state] if edge[1] in alive] for state in states if state in alive}


MOST_COUNTED = 1000
"""Bound on nested counts: up to it, they are cheap even where a text may be counted in many ways."""


def check_counts(node: Node) -> None:
    """Raise TooComplex if a text can be counted in too many ways by nested repetitions."""
    if counted(node) > MOST_COUNTED:
        try:
            automaton(node)
        except TooComplex as error:
            raise TooComplex(f"repetitions within repetitions have too large counts ({error})") from None


def ending(edges: Mapping[State, list[tuple[Ranges, State]]], ends: Iterable[State]) -> set[State]:
    """Return the states of an automaton that lead to the states ``ends``, the ends of texts."""
    before = dict[State, list[State]]()
    for state, ways in edges.items():
        for _, target in ways:
            before.setdefault(target, []).append(state)
    alive, todo = set[State](), list(ends)
    while todo:
        state = todo.pop()
        if state not in alive:
            alive.add(state)
            todo += before.get(state, [])
    return alive
