"""Grammars as trees of nodes, before any library sees them.

A tree without a :class:`Ref` is a regular expression over characters. The functions of this module build trees and keep
them small: `NOTHING` is never part of another tree, unless a :class:`Both`, a :class:`Not` or a rule hides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from preheat.grammar.characters import ANY_CHARACTER, Ranges, union


class Node:
    """A set of texts. The hash is computed once: trees are deep."""

    _hash: int
    __match_args__: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((type(self), self._values())))

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or self._hash != other._hash:
            return False
        return self._values() == other._values()


@dataclass(frozen=True, eq=False)
class Chars(Node):
    """One character of ``ranges``."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Seq(Node):
    """``parts`` one behind the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Alt(Node):
    """One of ``parts``."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat(Node):
    """``inner`` at least ``least`` times and at most ``most``; None: without end."""

    inner: Node
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Both(Node):
    """The texts that all of ``parts`` hold."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Not(Node):
    """Every text that ``inner`` does not hold."""

    inner: Node


@dataclass(frozen=True, eq=False)
class Ref(Node):
    """The rule called ``name``."""

    name: str


@dataclass(frozen=True, eq=False)
class Token(Node):
    """``inner``, a regular expression, as one unit; a text is cut into units without lookahead."""

    inner: Node


@dataclass(frozen=True, eq=False)
class Quoted(Node):
    """The JSON strings with a value in ``inner``, a regular expression; one unit."""

    inner: Node


@dataclass(frozen=True, eq=False)
class Multiple(Node):
    """The multiples of ``of`` from ``least`` to ``most``, as JSON numbers; one unit. ``whole``: only integers."""

    of: Fraction
    least: Fraction | None
    most: Fraction | None
    whole: bool


EMPTY, NOTHING = Seq(()), Alt(())
"""The empty text alone; no text at all."""


def chars(ranges: Ranges) -> Node:
    """Return one character of ``ranges``."""
    return Chars(ranges) if ranges else NOTHING


def text(value: str) -> Node:
    """Return the text ``value``."""
    return seq(*map(_character, value))


@lru_cache(maxsize=1024)  # equal nodes are compared quickly where they are one object
def _character(value: str) -> Node:
    return Chars(((ord(value), ord(value)),))


def seq(*nodes: Node) -> Node:
    """Return ``nodes`` one behind the other."""
    parts = list[Node]()
    for node in nodes:
        if node == NOTHING:
            return NOTHING
        parts += node.parts if isinstance(node, Seq) else (node,)
    return parts[0] if len(parts) == 1 else Seq(tuple(parts))


def alt(*nodes: Node) -> Node:
    """Return one of ``nodes``."""
    single, parts = Ranges(), dict[Node, None]()
    for node in nodes:
        for part in node.parts if isinstance(node, Alt) else (node,):
            if isinstance(part, Chars):
                single = union(single, part.ranges)
            else:
                parts[part] = None
    if single:
        parts[Chars(single)] = None
    return next(iter(parts)) if len(parts) == 1 else Alt(tuple(parts))


def repeat(inner: Node, least: int = 0, most: int | None = None) -> Node:
    """Return ``inner`` at least ``least`` times and at most ``most``."""
    if most == 0 or inner == EMPTY:
        return EMPTY
    if inner == NOTHING:
        return NOTHING if least else EMPTY
    if least == most == 1:
        return inner
    if isinstance(inner, Repeat) and inner.most is None and inner.least <= 1:
        return Repeat(inner.inner, min(inner.least, least) if inner.least else 0, None) if least <= 1 else Repeat(
            inner.inner, least * inner.least, None
        )  # fmt: skip
    return Repeat(inner, 0 if nullable(inner) else least, most)


def token(inner: Node) -> Node:
    """Return ``inner`` as one unit."""
    return inner if inner == NOTHING else Token(inner)


def optional(inner: Node) -> Node:
    """Return ``inner``, or nothing."""
    return repeat(inner, 0, 1)


def both(*nodes: Node) -> Node:
    """Return the texts that all of ``nodes`` hold."""
    parts = dict[Node, None]()
    for node in nodes:
        if node == NOTHING:
            return NOTHING
        if node != EVERYTHING:
            parts |= dict.fromkeys(node.parts if isinstance(node, Both) else (node,))
    if not parts:
        return EVERYTHING
    return next(iter(parts)) if len(parts) == 1 else Both(tuple(parts))


def without(node: Node) -> Node:
    """Return every text that ``node`` does not hold."""
    return node.inner if isinstance(node, Not) else EVERYTHING if node == NOTHING else Not(node)


EVERYTHING = Repeat(Chars(ANY_CHARACTER), 0, None)


def nullable(node: Node) -> bool:
    """Return whether a regular expression holds the empty text; False for a :class:`Ref`."""
    match node:
        case Seq(parts) | Both(parts):
            return all(map(nullable, parts))
        case Alt(parts):
            return any(map(nullable, parts))
        case Repeat(inner, least, _):
            return not least or nullable(inner)
        case Not(inner):
            return not nullable(inner)
        case Token(inner):
            return nullable(inner)
    return False


def counted(node: Node) -> int:
    """Return the product of nested counts; 1 if no count is within another."""
    return _counted(node)[0]


def _counted(node: Node) -> tuple[int, int]:
    """Return the product of nested counts, and the product of all counts from ``node`` down."""
    found = [_counted(each) for each in children(node)]
    nested, inner = max((each[0] for each in found), default=1), max((each[1] for each in found), default=1)
    if not isinstance(node, Repeat) or (times := max(node.least, node.most or 1)) == 1:
        return nested, inner
    return max(nested, inner * times if inner > 1 else 1), inner * times


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes right below ``node``."""
    match node:
        case Seq(parts) | Alt(parts) | Both(parts):
            return parts
        case Repeat(inner) | Not(inner) | Token(inner) | Quoted(inner):
            return (inner,)
    return ()


def within(node: Node) -> Iterable[Node]:
    """Yield ``node`` and all nodes below it, each once."""
    seen, todo = set[Node](), [node]
    while todo:
        each = todo.pop()
        if each not in seen:
            seen.add(each)
            yield each
            todo += children(each)


Rules = Mapping[str, Node]


def productive(rules: Rules) -> set[str]:
    """Return the names of the rules that a finite text satisfies."""
    found, waiting = set[str](), dict[str, list[str]]()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        missing = _missing(rules[name], found)
        if missing is None:
            found.add(name)
            todo += waiting.pop(name, [])
        else:
            for each in missing:
                waiting.setdefault(each, []).append(name)
    return found


def _missing(node: Node, found: set[str]) -> list[str] | None:
    """Return None if ``node`` holds a finite text.

    The rules ``found`` are known to hold one. Otherwise return the names of rules that might change this.
    """
    match node:
        case Ref(name):
            return None if name in found else [name]
        case Seq(parts):
            return next((each for part in parts if (each := _missing(part, found)) is not None), None)
        case Alt(parts):
            missing = [each for part in parts if (each := _missing(part, found)) is not None]
            return None if len(missing) < len(parts) else [each for one in missing for each in one]
        case Repeat(inner, least, _):
            return _missing(inner, found) if least else None
    return None


def pruned(node: Node, alive: set[str]) -> Node:
    """Return ``node`` without branches into rules that are not ``alive``."""
    match node:
        case Ref(name):
            return node if name in alive else NOTHING
        case Seq(parts):
            return seq(*(pruned(part, alive) for part in parts))
        case Alt(parts):
            return alt(*(pruned(part, alive) for part in parts))
        case Repeat(inner, least, most):
            return repeat(pruned(inner, alive), least, most)
    return node
