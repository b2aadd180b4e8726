"""A JSON schema with its references and combinations resolved into alternatives.

A value fits the schema if it fits one of the alternatives. A :class:`Place` is a schema within the document. A
:class:`Leaf` is the place's own keywords, without its combinations of other schemas. An alternative is a list of
leaves, and a value must fit all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote

from preheat.grammar.derive import Matcher, TooComplex, check_counts
from preheat.grammar.formats import FORMATS, format_node
from preheat.grammar.keywords import TYPES, UNSUPPORTED, check, count, number
from preheat.grammar.nodes import Node
from preheat.grammar.pattern import ECMA, PatternError, parsed
from preheat.grammar.source import refused

MOST_ALTERNATIVES = 2000

_OWN = frozenset((
    "type", "enum", "const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "properties",
    "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
))  # fmt: skip
"""The keywords of a leaf."""

_OLD = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts of JSON Schema where nothing beside a reference counts."""


@dataclass(frozen=True)
class Place:
    """A schema of the document; its ``path`` identifies it."""

    path: str
    schema: Any = field(compare=False, repr=False)

    def at(self, *keys: str | int) -> Place:
        """Return the schema below this one, by ``keys``."""
        path, schema = self.path, self.schema
        for key in keys:
            path, schema = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}", schema[key]
        return Place(path, schema)


Leaf = Place
Alternative = tuple[Leaf, ...]
Together = tuple[Place, ...]
"""Schemas that a value must fit at once."""


class Document:
    """The schema ``root`` of the request's ``part``. Raises InvalidRequest if it is malformed."""

    def __init__(self, root: dict[str, Any], part: str) -> None:
        check(root, part)
        self.part, self.root = part, Place("$", root)
        self.overlaps = dict[Together, Place]()
        """Pairs of schemas that must have no value in common, and the place of their ``oneOf``."""
        self._ignores_beside = any(draft in str(root.get("$schema", "")) for draft in _OLD)
        self._alternatives = dict[Place, list[Alternative]]()
        self._patterns = dict[str, Node]()
        self._enums = dict[Leaf, frozenset[Hashable]]()
        self._matcher = Matcher()

    def no(self, place: Place, key: str, why: str) -> NoReturn:
        """Refuse the keyword ``key`` at ``place``."""
        raise refused(self.part, f"{key} {why} (at {place.path}.{key})")

    def together(self, places: Together) -> list[Alternative]:
        """Return the alternatives of a value that fits all of ``places``."""
        found: list[Alternative] = [()]
        for place in places:
            found = self._product(found, self.alternatives(place, ()), place)
        return found

    def alternatives(self, place: Place, above: tuple[Place, ...]) -> list[Alternative]:
        """Return the alternatives of a value that fits ``place``. ``above``: the schemas that are being resolved."""
        if place in above:
            raise refused(self.part, f"the schema refers to itself, so that no value ends (at {place.path})")
        if (known := self._alternatives.get(place)) is None:
            known = self._alternatives[place] = self._resolved(place, (*above, place))
        return known

    def _resolved(self, place: Place, above: tuple[Place, ...]) -> list[Alternative]:
        schema = place.schema
        if isinstance(schema, bool):
            return [()] if schema else []
        if "$ref" in schema and self._ignores_beside:
            return self.alternatives(self._target(place), above)
        for key in sorted(UNSUPPORTED & schema.keys()):
            if (key, schema[key]) != ("uniqueItems", False):
                self._unsupported(place, key)
        if "$id" in schema and place.path != "$":
            self._unsupported(place, "$id")
        own = not _OWN.isdisjoint(schema)
        found: list[Alternative] = [(place,)] if own else [()]
        if "$ref" in schema:
            found = self._product(found, self.alternatives(self._target(place), above), place)
        for each in range(len(schema.get("allOf", ()))):
            found = self._product(found, self.alternatives(place.at("allOf", each), above), place)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                inner = [place.at(key, each) for each in range(len(schema[key]))]
                options = [each for one in inner for each in self.alternatives(one, above)]
                found = self._product(found, list(dict.fromkeys(options)), place)
                if key == "oneOf":
                    self._must_be_apart(place, inner)
        return found

    def _unsupported(self, place: Place, key: str) -> NoReturn:
        raise refused(self.part, f'"{key}" is not supported (at {place.path}.{key})')

    def _must_be_apart(self, place: Place, inner: Sequence[Place]) -> None:
        for at, one in enumerate(inner):
            for other in inner[at + 1 :]:
                self.overlaps[one, other] = place
        if len(self.overlaps) > MOST_ALTERNATIVES:
            self.no(place, "oneOf", "has too many schemas to tell them apart: use anyOf")

    def _product(self, one: list[Alternative], other: list[Alternative], place: Place) -> list[Alternative]:
        if len(one) * len(other) > MOST_ALTERNATIVES:
            raise refused(self.part, f"it combines too many alternatives (at {place.path})")
        return [tuple(dict.fromkeys((*left, *right))) for left in one for right in other]

    def _target(self, place: Place) -> Place:
        """Return the target of the reference at ``place``."""
        ref = place.schema["$ref"]
        own = self.root.schema.get("$id")
        if isinstance(own, str) and own and ref.startswith(own):
            ref = ref[len(own) :] or "#"
        if not ref.startswith("#"):
            self.no(place, "$ref", f"to {ref!r} is not supported: it must begin with #, for a part of this schema")
        found, path = self.root.schema, "$"
        if ref not in ("#", "#/") and not ref.startswith("#/"):
            self.no(place, "$ref", f"to {ref!r} is not supported: it must begin with #/, for a path within this schema")
        for step in ref[2:].split("/") if len(ref) > 1 else ():
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found, path = found[int(key)], f"{path}[{int(key)}]"
            elif isinstance(found, dict) and key in found:
                found, path = found[key], f"{path}.{key}"
            else:
                self.no(place, "$ref", f"means {ref}, and that does not exist")
        if not isinstance(found, bool | dict):
            self.no(place, "$ref", f"means {ref}, and that is not a schema")
        if isinstance(found, dict):
            check(found, self.part)
        return Place(path, found)

    def types(self, leaf: Leaf) -> set[str]:
        """Return the types of values that a leaf allows; "number" includes integers."""
        said = leaf.schema.get("type", TYPES)
        return set([said] if isinstance(said, str) else said)

    def pattern(self, place: Place, key: str, pattern: str) -> Node:
        """Return the texts that fit the ``pattern`` of a keyword. Raises InvalidRequest if it is not supported."""
        if (found := self._patterns.get(pattern)) is None:
            try:
                found = self._patterns[pattern] = parsed(pattern, ECMA)
                check_counts(found)
            except (PatternError, TooComplex) as error:
                raise refused(self.part, f"{error} in {pattern[:80]!r} (at {place.path}.{key})") from None
        return found

    def strings(self, leaf: Leaf) -> list[Node]:
        """Return the regular expressions that a leaf's strings must fit."""
        found, schema = list[Node](), leaf.schema
        if "pattern" in schema:
            found.append(self.pattern(leaf, "pattern", schema["pattern"]))
        if "format" in schema:
            if schema["format"] not in FORMATS:
                self.no(leaf, "format", f"{schema['format']!r} is not supported; there are {', '.join(FORMATS)}")
            found.append(format_node(schema["format"]))
        return found

    def property(self, leaves: Alternative, name: str) -> Together:
        """Return the schemas of the property ``name``."""
        return _unique(each for leaf in leaves for each in self._property(leaf, name))

    def _property(self, leaf: Leaf, name: str) -> Iterator[Place]:
        found = [leaf.at("properties", name)] if name in leaf.schema.get("properties", {}) else []
        for pattern in leaf.schema.get("patternProperties", {}):
            if self._matcher.fits(self.pattern(leaf, "patternProperties", pattern), name):
                found.append(leaf.at("patternProperties", pattern))
        yield from found or self.others(leaf)

    def others(self, leaf: Leaf) -> list[Place]:
        """Return the schema of properties that a leaf does not name, if there is one."""
        return [leaf.at("additionalProperties")] if "additionalProperties" in leaf.schema else []

    def item(self, leaves: Alternative, place: int | None) -> Together:
        """Return the schemas of the item at ``place``; None: of the items behind all listed items."""
        return _unique(each for leaf in leaves for each in self._item(leaf, place))

    def listed(self, leaf: Leaf) -> tuple[str, ...]:
        """Return the keywords of a leaf's first items and of all further items."""
        return ("items", "additionalItems") if isinstance(leaf.schema.get("items"), list) else ("prefixItems", "items")

    def _item(self, leaf: Leaf, place: int | None) -> Iterator[Place]:
        first, rest = self.listed(leaf)
        if place is not None and place < len(leaf.schema.get(first, ())):
            yield leaf.at(first, place)
        elif rest in leaf.schema:
            yield leaf.at(rest)

    def admits(self, places: Together, value: Any) -> bool:
        """Return whether ``value`` fits all of ``places``."""
        return any(all(self.leaf_admits(leaf, value) for leaf in leaves) for leaves in self.together(places))

    def _enumerated(self, leaf: Leaf) -> frozenset[Hashable]:
        """Return the keys of the values that the ``enum`` of a leaf lists."""
        if (found := self._enums.get(leaf)) is None:
            found = self._enums[leaf] = frozenset(map(identity, leaf.schema["enum"]))
        return found

    def leaf_admits(self, leaf: Leaf, value: Any) -> bool:
        """Return whether ``value`` fits a leaf."""
        schema = leaf.schema
        if not any(is_of(value, kind) for kind in self.types(leaf)):
            return False
        if "const" in schema and identity(schema["const"]) != identity(value):
            return False
        if "enum" in schema and identity(value) not in self._enumerated(leaf):
            return False
        if isinstance(value, str):
            return within(schema, "Length", len(value)) and all(
                self._matcher.fits(node, value) for node in self.strings(leaf)
            )
        if isinstance(value, list):
            items = (self.admits(self.item((leaf,), at), each) for at, each in enumerate(value))
            return within(schema, "Items", len(value)) and all(items)
        if isinstance(value, dict):
            members = (self.admits(self.property((leaf,), name), each) for name, each in value.items())
            required = all(name in value for name in schema.get("required", ()))
            return required and within(schema, "Properties", len(value)) and all(members)
        exact = number(value)
        return exact is None or _number_admits(schema, Decimal(exact))


def _unique(places: Iterator[Place]) -> Together:
    return tuple(dict.fromkeys(places))


def bounds(schema: dict[str, Any]) -> Iterator[tuple[str, Decimal, bool]]:
    """Yield the bounds of numbers: "minimum" or "maximum", the bound, and whether the bound itself is allowed."""
    for key in ("minimum", "maximum"):
        exclusive = schema.get(f"exclusive{key.capitalize()}")
        if key in schema:
            yield key, Decimal(number(schema[key]) or 0), exclusive is not True
        if exclusive is not None and not isinstance(exclusive, bool):
            yield key, Decimal(number(exclusive) or 0), False


def _number_admits(schema: dict[str, Any], value: Decimal) -> bool:
    for key, bound, itself in bounds(schema):
        if (value < bound if key == "minimum" else value > bound) or (value == bound and not itself):
            return False
    return "multipleOf" not in schema or multiple(value, Decimal(number(schema["multipleOf"]) or 1))


def multiple(value: Decimal, of: Decimal) -> bool:
    """Return whether ``value`` is a multiple of ``of``."""
    (a, b), (c, d) = value.as_integer_ratio(), of.as_integer_ratio()
    return (a * d) % (b * c) == 0


def within(schema: dict[str, Any], of: str, size: int) -> bool:
    """Return whether ``size`` lies between the schema's minimum and maximum ``of`` its parts."""
    return (count(schema.get(f"min{of}", 0)) or 0) <= size <= (
        size if f"max{of}" not in schema else count(schema[f"max{of}"]) or 0
    )  # fmt: skip


def is_of(value: Any, kind: str) -> bool:
    """Return whether ``value`` is of the JSON type ``kind``."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if kind == "integer":
        exact = number(value)
        return exact is not None and exact == int(exact)
    return isinstance(value, _PYTHON.get(kind, ()))


_PYTHON: dict[str, Any] = {"string": str, "number": (int, float, Decimal), "array": list, "object": dict}


def identity(value: Any) -> Hashable:
    """Return a key of a JSON value; equal values have equal keys. Numbers are compared by value."""
    if isinstance(value, dict):
        return dict, frozenset((name, identity(each)) for name, each in value.items())
    if isinstance(value, list):
        return list, tuple(map(identity, value))
    exact = number(value)
    return (type(value), value) if exact is None else (Decimal, exact)
