"""Derivatives of regular expressions: whether a text fits, whether any does, and the automaton of an expression.

The derivative of an expression by a character holds what may follow that character. Work is bounded: what needs more is
:class:`TooComplex`.
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
"""States of an automaton, and nodes that are looked at to find them."""


class TooComplex(ValueError):
    """An expression whose automaton is too large."""


@dataclass
class _Work:
    left: int = MOST_WORK
    seen: dict[tuple[Node, int], Node] = field(default_factory=dict)

    def derivative(self, node: Node, code: int) -> Node:
        """What may follow the character ``code``."""
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
    """The sets of characters that ``node`` tells apart at its beginning; together they hold all characters."""
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


def fits(node: Node, text: str) -> bool:
    """Whether ``text`` is one of ``node``'s."""
    work = _Work()
    for character in text:
        node = work.derivative(node, ord(character))
        work.seen.clear()
    return nullable(node)


def is_empty(node: Node) -> bool:
    """Whether no text fits. Raises TooComplex."""
    if not any(isinstance(each, Both | Not) for each in within(node)):
        return node == NOTHING
    return not any(map(nullable, _explore(node, {})))


Edges = list[tuple[Ranges, Node]]


def _explore(node: Node, edges: dict[Node, Edges]) -> Iterable[Node]:
    """The states of the automaton of ``node``, the nearest first; ``edges`` gets what leads from each to others."""
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
    """The deterministic automaton of ``node``, its first state first, without states that no text ends from; a state
    ends a text if it is nullable. Raises TooComplex.
    """
    edges = dict[Node, Edges]()
    states = list(_explore(node, edges))
    alive = ending(edges, [state for state in states if nullable(state)])
    return {state: [edge for edge in edges[state] if edge[1] in alive] for state in states if state in alive}


MOST_COUNTED = 1000
"""Up to here repetitions within repetitions are cheap even where a text may be counted in many ways."""


def check_counts(node: Node) -> None:
    """Raises TooComplex for repetitions within repetitions that a text can be counted by in too many ways."""
    if counted(node) > MOST_COUNTED:
        try:
            automaton(node)
        except TooComplex as error:
            raise TooComplex(f"repetitions within repetitions have too large counts ({error})") from None


def ending(edges: Mapping[State, list[tuple[Ranges, State]]], ends: Iterable[State]) -> set[State]:
    """The states from which a text can end, of an automaton that does so in the states ``ends``."""
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
