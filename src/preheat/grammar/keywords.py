"""The keywords of JSON Schema: their allowed values, and the schemas within schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from preheat.grammar.source import ARE_SCHEMAS, HOLD_SCHEMAS, LIST_SCHEMAS, check_size, refused

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

UNSUPPORTED = frozenset((
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
))  # fmt: skip
"""Keywords of JSON Schema that are not supported."""

Number = int | Decimal


def number(value: Any) -> Number | None:
    """Return ``value`` if it is a JSON number, exactly; None otherwise."""
    if isinstance(value, float):
        return Decimal(repr(value)) if value - value == 0 else None
    return value if isinstance(value, int | Decimal) and not isinstance(value, bool) else None


def count(value: Any) -> int | None:
    """Return ``value`` as an integer if it is a JSON integer of at least 0; None otherwise."""
    found = number(value)
    return None if found is None or found < 0 or found != int(found) else int(found)


def _is_types(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list) and bool(listed) and all(isinstance(each, str) and each in TYPES for each in listed)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_bound(value: Any) -> bool:
    return number(value) is not None


def _is_count(value: Any) -> bool:
    return count(value) is not None


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "type": (_is_types, f"must be one of {', '.join(TYPES)}, or a list of at least one"),
        "enum": (lambda value: isinstance(value, list) and bool(value), "must be a list of at least one value"),
        "$ref": (lambda value: isinstance(value, str), "must be a text"),
        "pattern": (lambda value: isinstance(value, str), "must be a text"),
        "format": (lambda value: isinstance(value, str), "must be a text"),
        "required": (
            lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
            "must be a list of texts",
        ),
        "multipleOf": (lambda value: (number(value) or 0) > 0, "must be a number above 0"),
        "uniqueItems": (lambda value: isinstance(value, bool), "must be true or false"),
        "items": (
            lambda value: _is_schema(value) or (isinstance(value, list) and all(map(_is_schema, value))),
            "must be a schema",
        ),
        **dict.fromkeys(HOLD_SCHEMAS, (_are_schemas, "must be an object of schemas")),
        **dict.fromkeys(("additionalProperties", "additionalItems"), (_is_schema, "must be a schema")),
        **dict.fromkeys(
            LIST_SCHEMAS,
            (lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value)),
             "must be a list of at least one schema"),
        ),
        **dict.fromkeys(("minimum", "maximum"), (_is_bound, "must be a number")),
        **dict.fromkeys(
            ("exclusiveMinimum", "exclusiveMaximum"),
            (lambda value: isinstance(value, bool) or _is_bound(value), "must be a number"),
        ),
        **dict.fromkeys(
            ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
            (_is_count, "must be an integer that is not negative"),
        ),
    }
)  # fmt: skip

_KNOWN = {key.lower(): key for key in (*_CHECKS, *UNSUPPORTED, "const")}


def check(schema: Any, part: str) -> None:
    """Raise InvalidRequest, with the place, if a schema has a malformed or misspelled keyword."""
    todo, size = [("$", schema)], 0
    while todo:
        path, each = todo.pop()
        if not isinstance(each, dict):
            continue
        for key, value in each.items():
            test, must = _CHECKS.get(key, (None, ""))
            if test is not None and not test(value):
                raise refused(part, f"{key} {must} (at {path}.{key})")
            size += _said(key, value)
            meant = _KNOWN.get(key.replace("_", "").replace("-", "").lower())
            if meant not in (None, key):
                raise refused(part, f"{key} is not a keyword of JSON Schema, {meant} is (at {path}.{key})")
        todo += inner_schemas(path, each)
        check_size(part, size, "its names, patterns and values have")


def _said(key: str, value: Any) -> int:
    """Return the number of characters in the names, patterns and values of ``key``."""
    if key in ("enum", "const", "pattern"):
        return len(json.dumps(value, default=str))
    return sum(map(len, value)) if key in ("properties", "patternProperties", "required") else 0


def inner_schemas(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly within ``schema``, with their paths."""
    for key in HOLD_SCHEMAS:
        for name, each in schema.get(key, {}).items():
            yield f"{path}.{key}.{name}", each
    for key in (*LIST_SCHEMAS, *ARE_SCHEMAS):
        if key not in schema:
            continue
        value = schema[key]
        if isinstance(value, list):
            for place, each in enumerate(value):
                yield f"{path}.{key}[{place}]", each
        else:
            yield f"{path}.{key}", value
