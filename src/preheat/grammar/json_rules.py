"""Rules for the JSON texts of a schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Any

from preheat.grammar import numbers
from preheat.grammar.derive import TooComplex, is_empty
from preheat.grammar.document import Alternative, Document, Place, Together, bounds
from preheat.grammar.keywords import count, number
from preheat.grammar.nodes import (
    EMPTY,
    EVERYTHING,
    NOTHING,
    Multiple,
    Node,
    Quoted,
    Ref,
    alt,
    both,
    productive,
    pruned,
    repeat,
    seq,
    text,
    token,
    within,
    without,
)
from preheat.grammar.source import refused
from preheat.utils.exact_json import dumps

MOST_RULES, MOST_DIGITS, MOST_CELLS, MOST_ITEMS = 100_000, 400, 32, 4096
"""Bounds: rules of a schema, digits of a number, kinds of further properties, required items or properties."""

MOST_PARTS = 2**31 - 1
"""Parts that no text has; a library counts no further."""

ROOT = "start"


@dataclass(frozen=True)
class Layout:
    """White space between the parts of JSON.

    Each is a regular expression that may hold the empty text. ``open``: behind an opening bracket or a comma.
    ``close``: before a closing bracket. ``colon``: behind a colon. ``before``: before a comma or a colon.
    """

    open: Node = EMPTY
    close: Node = EMPTY
    colon: Node = EMPTY
    before: Node = EMPTY


class JsonRules:
    """The ``rules`` of the JSON texts of ``document``; the first rule is `ROOT`."""

    def __init__(self, document: Document, layout: Layout) -> None:
        self._document, self._layout = document, layout
        self.rules: dict[str, Node] = {}
        self._names = dict[Together, str]()
        self._open, self._made = list[Together](), 0
        root = self._value((document.root,))
        self._build()
        self._check_overlaps()
        self.rules = _reachable(self.rules, root, document.part, {name: at for at, name in self._names.items()})
        self.rules[ROOT] = Ref(root.name)

    def _value(self, places: Together) -> Ref:
        """Return the rule of the values that fit ``places``."""
        places = tuple(place for place in places if place.schema is not True)
        if (name := self._names.get(places)) is None:
            name = self._names[places] = f"v{len(self._names)}"
            self._open.append(places)
        return Ref(name)

    def _build(self) -> None:
        while self._open:
            places = self._open.pop()
            try:
                self.rules[self._names[places]] = alt(
                    *(self._alternative(leaves, self._names[places]) for leaves in self._document.together(places))
                )
            except TooComplex as error:
                raise refused(self._document.part, f"it is too complex: {error} (at {_paths(places)})") from None
            if len(self.rules) + len(self._open) > MOST_RULES:
                raise refused(self._document.part, f"it has too many rules (at {_paths(places)})")

    def _check_overlaps(self) -> None:
        """Refuse a oneOf if two of its schemas have a value in common."""
        checked = dict[Ref, Place]()
        while pairs := {pair: at for pair, at in self._document.overlaps.items() if self._ref(pair) not in checked}:
            checked |= {self._value(pair): at for pair, at in pairs.items()}
            self._build()
        if checked:
            alive = productive(self.rules)
            for ref, at in checked.items():
                if ref.name in alive:
                    self._document.no(at, "oneOf", "of schemas that may overlap is not supported")

    def _ref(self, places: Together) -> Ref | None:
        places = tuple(place for place in places if place.schema is not True)
        return Ref(self._names[places]) if places in self._names else None

    def _alternative(self, leaves: Alternative, name: str) -> Node:
        """Return the texts of the values that fit all of ``leaves``."""
        known = [leaf for leaf in leaves if "const" in leaf.schema or "enum" in leaf.schema]
        if known:
            schema = known[0].schema
            values = [schema["const"]] if "const" in schema else schema["enum"]
            fit = [each for each in values if all(self._document.leaf_admits(leaf, each) for leaf in leaves)]
            return self._constants(fit)
        types = {"null", "boolean", "object", "array", "number", "string"}
        whole = False
        for leaf in leaves:
            own = self._document.types(leaf)
            whole |= "integer" in own and "number" not in own
            types &= own | ({"number"} if "integer" in own else set())
        found = [token(text("null"))] if "null" in types else []
        found += [token(alt(text("true"), text("false")))] if "boolean" in types else []
        found += [self._number(leaves, whole)] if "number" in types else []
        found += [self._string(leaves)] if "string" in types else []
        found += [self._array(leaves, name)] if "array" in types else []
        return alt(*found, self._object(leaves, name) if "object" in types else NOTHING)

    def _constants(self, values: Sequence[Any]) -> Node:
        """Return the texts of ``values``; each is written in one way, apart from white space."""
        simple = [each for each in values if not isinstance(each, list | dict)]
        found = [token(alt(*(text(written(each)) for each in simple)))] if simple else []
        return alt(*found, *(self._constant(each) for each in values if isinstance(each, list | dict)))

    def _constant(self, value: Any) -> Node:
        if isinstance(value, dict):
            inner = [
                seq(token(seq(text(written(name)), self._colon())), self._constant(each))
                for name, each in value.items()
            ]
            return self._bracketed("{", inner, "}")
        if isinstance(value, list):
            return self._bracketed("[", [self._constant(each) for each in value], "]")
        return token(text(written(value)))

    def _bracketed(self, first: str, inner: Sequence[Node], last: str) -> Node:
        parts = [part for each in inner for part in (self._comma(), each)][1:]
        return seq(self._opened(first), *parts, self._closed(last) if inner else token(text(last)))

    def _opened(self, bracket: str) -> Node:
        return token(seq(text(bracket), self._layout.open))

    def _closed(self, bracket: str) -> Node:
        return token(seq(self._layout.close, text(bracket)))

    def _comma(self) -> Node:
        return token(seq(self._layout.before, text(","), self._layout.open))

    def _key(self, name: str) -> Node:
        return token(seq(text(written(name)), self._colon()))

    def _colon(self) -> Node:
        return seq(self._layout.before, text(":"), self._layout.colon)

    def _string(self, leaves: Alternative) -> Node:
        node = both(*(each for leaf in leaves for each in self._document.strings(leaf)))
        least, most = _span(leaves, "Length")
        self._bound(least, "characters", leaves, MOST_PARTS)
        if least or most is not None:
            sized = NOTHING if most is not None and least > most else _any(least, most)
            node = both(node, sized)
        return NOTHING if is_empty(node) else Quoted(node)

    def _number(self, leaves: Alternative, whole: bool) -> Node:
        low, high, of = None, None, None
        for leaf in leaves:
            for key, bound, itself in bounds(leaf.schema):
                if abs(bound.adjusted()) > MOST_DIGITS or len(bound.as_tuple().digits) > MOST_DIGITS:
                    self._document.no(leaf, key, f"has more than {MOST_DIGITS} digits")
                if key == "minimum" and (low is None or (bound, not itself) > (low[0], not low[1])):
                    low = bound, itself
                elif key == "maximum" and (high is None or (bound, itself) < high):
                    high = bound, itself
            if "multipleOf" in leaf.schema:
                own = Fraction(*Decimal(number(leaf.schema["multipleOf"]) or 1).as_integer_ratio())
                of = own if of is None else _common(of, own)
        if of is not None and whole:
            of = Fraction(of.numerator)
        if of is not None and not (whole and of == 1):
            return _multiples(of, low, high, whole)
        if not whole:
            return token(numbers.decimals(low, high))
        least = None if low is None else ceil(low[0]) + (not low[1] and low[0] == ceil(low[0]))
        most = None if high is None else floor(high[0]) - (not high[1] and high[0] == floor(high[0]))
        return token(numbers.integers(least, most))

    def _array(self, leaves: Alternative, name: str) -> Node:
        document = self._document
        least, most = _span(leaves, "Items")
        listed = max((len(leaf.schema.get(document.listed(leaf)[0], ())) for leaf in leaves), default=0)
        if most is not None and least > most:
            return NOTHING
        self._bound(least, "items", leaves, MOST_ITEMS)
        behind = self._items(self._value(document.item(leaves, None)), listed, least, most)
        for at in reversed(range(listed)):
            close = self._closed("]") if at else token(text("]"))
            item = seq(self._comma() if at else EMPTY, self._value(document.item(leaves, at)))
            more = seq(item, behind) if most is None or at < most else NOTHING
            rule = self._rule(name, alt(close if at >= least else NOTHING, more))
            behind = rule
        return seq(self._opened("["), behind)

    def _items(self, item: Node, before: int, least: int, most: int | None) -> Node:
        """Return the rest of an array behind ``before`` items: more items, and its end."""
        least, most = max(least - before, 0), None if most is None else most - before
        more, close = seq(self._comma(), item), self._closed("]")
        if most is not None and most <= 0:
            return close if before else token(text("]"))
        if before:
            return seq(repeat(more, least, most), close)
        some = seq(item, repeat(more, max(least - 1, 0), None if most is None else most - 1), close)
        return some if least else alt(token(text("]")), some)

    def _object(self, leaves: Alternative, name: str) -> Node:
        document = self._document
        least, most = _span(leaves, "Properties")
        required = dict.fromkeys(each for leaf in leaves for each in leaf.schema.get("required", ()))
        names = dict.fromkeys(each for leaf in leaves for each in leaf.schema.get("properties", {})) | required
        if most is not None and (least > most or len(required) > most):
            return NOTHING
        least = 0 if least <= len(required) else least
        self._bound(least, "properties", leaves, MOST_ITEMS)
        members = list[Member]()
        for each in names:
            members.append((seq(self._key(each), self._value(document.property(leaves, each))), each in required))
        further = self._further(leaves, list(names))
        if further != NOTHING and least > len(names) + 1:
            raise refused(
                document.part,
                f"it asks for {least:,} properties and names {len(names):,}: the names of others may be equal, so name "
                f"{least - 1:,} in properties (at {_paths(leaves)})",
            )
        rest = _Members(self, name, members, further, (least, most))
        return seq(self._opened("{"), rest.first())

    def _further(self, leaves: Alternative, names: list[str]) -> Node:
        """Return the properties beside ``names``, by the patterns that their names fit."""
        document = self._document
        cells: list[tuple[Node, frozenset[str]]] = [(without(alt(*map(text, names))), frozenset())]
        for leaf in leaves:
            for pattern in leaf.schema.get("patternProperties", {}):
                node = document.pattern(leaf, "patternProperties", pattern)
                split = [(both(own, node), fit | {pattern}) for own, fit in cells if pattern not in fit]
                split += [(both(own, without(node)), fit) for own, fit in cells if pattern not in fit]
                cells = [*(cell for cell in cells if pattern in cell[1]), *split]
                cells = [cell for cell in cells if not is_empty(cell[0])]
                if len(cells) > MOST_CELLS:
                    document.no(leaf, "patternProperties", "has too many patterns")
        found = list[Node]()
        for node, fit in cells:
            places = dict[Place, None]()
            for leaf in leaves:
                own = [
                    leaf.at("patternProperties", each)
                    for each in leaf.schema.get("patternProperties", {})
                    if each in fit
                ]
                places |= dict.fromkeys(own or document.others(leaf))
            if not any(place.schema is False for place in places):
                found.append(seq(Quoted(node), token(self._colon()), self._value(tuple(places))))
        return alt(*found)

    def _bound(self, least: int, what: str, leaves: Alternative, bound: int) -> None:
        if least > bound:
            raise refused(self._document.part, f"it asks for more than {bound:,} {what} (at {_paths(leaves)})")

    def _rule(self, name: str, node: Node) -> Node:
        """Return ``node`` as a rule of its own; `NOTHING` stays."""
        if node == NOTHING:
            return node
        self._made += 1
        self.rules[f"{name}_{self._made}"] = node
        return Ref(f"{name}_{self._made}")


Member = tuple[Node, bool]
"""A named property, and whether it is required."""


class _Members:
    """The rest of an object behind some members.

    State (``at``, ``seen``) has decided on the first ``at`` named members and has ``seen`` members. ``seen`` stops at a
    cap, where the number no longer matters. The names of further members may be equal, so only one of them counts
    towards the least number.
    """

    def __init__(
        self, rules: JsonRules, name: str, named: Sequence[Member], further: Node, span: tuple[int, int | None]
    ) -> None:
        least, most = span
        self._rules, self._name, self._named, self._further = rules, name, named, further
        self._least, self._most, self._cap = least, most, max(1, least, min(most or 0, len(named)))
        if most is not None and (further == NOTHING and most >= len(named)):
            self._most, self._cap = None, max(1, least)
        if self._cap * len(named) > MOST_RULES:
            raise TooComplex("too many numbers of properties")
        self._known = dict[tuple[int, int], Node]()

    def first(self) -> Node:
        """Return the first state; the states are made from the last one on."""
        for at in reversed(range(len(self._named) + 1)):
            for seen in reversed(range(min(at, self._cap) + 1)):
                self._known[at, seen] = self._state(at, seen)
        return self._known[0, 0]

    def _state(self, at: int, seen: int) -> Node:
        if at == len(self._named):
            return self._end(seen)
        member, required = self._named[at]
        comma = self._rules._comma() if seen else EMPTY
        full = self._most is not None and seen >= self._most
        taken = NOTHING if full else seq(comma, member, self._known[at + 1, min(seen + 1, self._cap)])
        skipped = NOTHING if required else self._known[at + 1, seen]
        return self._rules._rule(self._name, alt(taken, skipped))

    def _end(self, seen: int) -> Node:
        """Return further members, and the end of the object."""
        close = self._rules._closed("}") if seen else token(text("}"))
        ends = close if seen >= self._least else NOTHING
        left = None if self._most is None else self._most - seen
        if self._further == NOTHING or left == 0 or seen + 1 < self._least:
            return ends
        further = seq(self._rules._comma(), self._further)
        if seen >= self._least and seen:
            return seq(repeat(further, 0, left), close)
        more = repeat(further, 0, None if left is None else left - 1)
        return alt(ends, seq(further if seen else self._further, more, self._rules._closed("}")))


def _any(least: int, most: int | None) -> Node:
    return repeat(EVERYTHING.inner, least, most)


def _span(leaves: Alternative, of: str) -> tuple[int, int | None]:
    """Return the least and the greatest number ``of`` parts; None: no greatest number that a text could reach."""
    least = max((count(leaf.schema.get(f"min{of}", 0)) or 0 for leaf in leaves), default=0)
    most = min((count(leaf.schema[f"max{of}"]) or 0 for leaf in leaves if f"max{of}" in leaf.schema), default=None)
    return least, None if most is None or most > MOST_PARTS else most


def _common(one: Fraction, other: Fraction) -> Fraction:
    """Return the least common multiple."""
    both = lcm(one.denominator, other.denominator)
    return Fraction(lcm(int(one * both), int(other * both)), both)


def _multiples(of: Fraction, low: numbers.Bound | None, high: numbers.Bound | None, whole: bool) -> Node:
    """Return the multiples of ``of`` within bounds, or `NOTHING` if there is none."""
    least = most = None
    if low is not None:
        times = ceil(Fraction(low[0]) / of)
        least = of * (times + (times * of == Fraction(low[0]) and not low[1]))
    if high is not None:
        times = floor(Fraction(high[0]) / of)
        most = of * (times - (times * of == Fraction(high[0]) and not high[1]))
    if least is not None and most is not None and least > most:
        return NOTHING
    return Multiple(of, least, most, whole)


def written(value: Any) -> str:
    """Return the text of a JSON value without parts. Raises UnicodeEncodeError for a lone surrogate."""
    found = dumps(value)
    found.encode()
    return found


def _paths(places: Sequence[Place]) -> str:
    return " and ".join(place.path for place in places[:3]) or "$"


def _reachable(rules: dict[str, Node], root: Ref, part: str, names: dict[str, Together]) -> dict[str, Node]:
    """Return the rules that can be used.

    Branches that no finite text satisfies are left out. Raises InvalidRequest if no finite text satisfies the ``root``.
    """
    alive = productive(rules)
    if root.name not in alive:
        raise refused(part, f"no finite text satisfies it (at {_paths(names[_cause(rules, root.name, alive, names)])})")
    found, todo = dict[str, Node](), [root.name]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = pruned(rules[name], alive)
            todo += _refs(found[name])
    return found


def _cause(rules: dict[str, Node], name: str, alive: set[str], names: dict[str, Together]) -> str:
    """Return the name of a schema that keeps all texts from satisfying the rule ``name``."""
    found, seen = name, set[str]()
    while name not in seen:
        seen.add(name)
        found = name if name in names else found
        dead = [each for each in _refs(rules[name]) if each not in alive]
        if not dead:
            break
        name = dead[0]
    return found


def _refs(node: Node) -> list[str]:
    return [each.name for each in within(node) if isinstance(each, Ref)]
