"""JSON schemas of our own, and random ones.

Our own are written by hand, keyword for keyword. Every text of a schema is short.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,6}$"}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 999}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    """Return an object schema of these properties and no others, all required unless ``required`` names some."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


NAMED: Schema = {"type": "object", "patternProperties": {"^[a-c]{1,3}$": {"type": "boolean"}},
                 "additionalProperties": False}  # fmt: skip
"""Names of bounded length: any others may go on for ever."""

SERVED: dict[str, Schema] = {
    "type: string": {"type": "string", "maxLength": 8},
    "type: integer": {"type": "integer", "minimum": -9, "maximum": 9},
    "type: number": {"type": "number", "minimum": 0, "maximum": 10},
    "type: boolean": {"type": "boolean"},
    "type: null": {"type": "null"},
    "type: array": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    "type: object": closed({"a": SMALL}),
    "type: several": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    "enum": {"enum": ["a", 1, None, True, {"b": [2]}]},
    "const": {"const": {"a": [1, "x"]}},
    "const: text": {"const": 'with "quotes" and \\ and ü'},
    "minLength": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^(ab|cd){1,3}[0-9]?$"},
    "pattern: not anchored": {"type": "string", "pattern": "x[0-9]{2}", "maxLength": 8},
    "pattern: classes": {"type": "string", "pattern": r"^\d{2}-\w{1,3}$"},
    "minimum": {"type": "integer", "minimum": 17, "maximum": 123},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 8},
    "exclusiveMinimum: number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "items: schema": {"type": "array", "items": closed({"x": SMALL}), "minItems": 1, "maxItems": 2},
    "items: false": {"type": "array", "prefixItems": [SMALL, WORD], "items": False, "minItems": 2},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, WORD], "items": SMALL, "maxItems": 4},
    "minItems": {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 4},
    "properties: optional": closed({"a": SMALL, "b": WORD, "c": {"type": "null"}}, ["b"]),
    "properties: none": closed({}),
    "properties: odd names": closed({"": SMALL, "a b": WORD, 'q"q': {"type": "null"}, "ü": {"type": "boolean"}}),
    "additionalProperties: schema": {"type": "object", "properties": {"a": SMALL}, "required": ["a"],
                                     "additionalProperties": SMALL, "maxProperties": 2},
    "maxProperties": {**NAMED, "maxProperties": 2},
    "minProperties": {**NAMED, "minProperties": 1, "maxProperties": 2},
    "patternProperties": {
        "type": "object", "patternProperties": {"^[ab]$": SMALL}, "additionalProperties": False, "maxProperties": 2,
    },
    "anyOf": {"anyOf": [WORD, SMALL, {"type": "null"}]},
    "anyOf: objects": {"anyOf": [closed({"kind": {"const": "a"}, "n": SMALL}), closed({"kind": {"const": "b"}})]},
    "oneOf: disjoint": {"oneOf": [WORD, SMALL]},
    "oneOf: tagged": {"oneOf": [closed({"t": {"const": 1}, "a": SMALL}), closed({"t": {"const": 2}, "b": WORD})]},
    "allOf": {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 50}]},
    "allOf: objects": {"allOf": [{"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
                                 {"properties": {"b": WORD}, "required": ["b"]}, {"maxProperties": 2}]},
    "$ref": {"$defs": {"n": SMALL}, **closed({"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}})},
    "$ref: definitions": {"definitions": {"w": WORD}, "type": "array", "items": {"$ref": "#/definitions/w"},
                          "maxItems": 2},
    "$ref: recursive": {
        "$defs": {"tree": closed({"v": SMALL, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}}),
                  "leaf": closed({"v": {"type": "null"}})},
        "$ref": "#/$defs/tree",
    },
    "format: date": {"type": "string", "format": "date"},
    "format: time": {"type": "string", "format": "time"},
    "format: date-time": {"type": "string", "format": "date-time"},
    "format: uuid": {"type": "string", "format": "uuid"},
    "format: ipv4": {"type": "string", "format": "ipv4"},
    "annotations": {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x",
                    "title": "T", "description": "D", "default": 1, "examples": [1, 2], "$comment": "c",
                    "deprecated": False, "readOnly": True, "writeOnly": False, **SMALL},
    "nested": closed({"user": closed({"name": WORD, "tags": {"type": "array", "items": WORD, "maxItems": 2}}),
                      "ok": {"type": "boolean"}}),
    "pydantic: optional": closed({"name": {**WORD, "title": "Name"},
                                  "age": {"anyOf": [SMALL, {"type": "null"}], "default": None}}, ["name"]),
    "unicode": {"enum": ["grün", "你好", "😀", "a\tb", "\\", '"']},
}  # fmt: skip
"""Schemas by the keyword that each is about."""

REFUSED: dict[str, Schema] = {
    "not": {"not": {"type": "string"}},
    "if": {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}, "else": {"multipleOf": 3}},
    "uniqueItems": {"type": "array", "items": SMALL, "uniqueItems": True, "maxItems": 2},
    "contains": {"type": "array", "items": SMALL, "contains": {"const": 1}, "maxItems": 2},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}, "maxProperties": 1},
    "dependentRequired": {**closed({"a": SMALL, "b": SMALL}, []), "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**closed({"a": SMALL, "b": SMALL}, []), "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "properties": {"a": SMALL}, "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [SMALL], "unevaluatedItems": False},
    "format: unknown": {"type": "string", "format": "no-such-format"},
    "$ref: elsewhere": {"$ref": "https://example.com/other.json"},
    "$ref: nowhere": {"$ref": "#/$defs/missing"},
    "type: unknown": {"type": "text"},
    "pattern: look-ahead": {"type": "string", "pattern": "^(?=a)b$"},
    "oneOf: overlapping": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]},
    "false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "impossible": {"type": "integer", "minimum": 5, "maximum": 3},
    "x-guidance": {"type": "object", "x-guidance": {"lenient": True}},
    "keywords: misspelt": {"type": "string", "minlength": 3, "not": {}},
}
"""Refused schemas, by keyword."""


def drawn(seed: int) -> Schema:
    """Return a schema at random."""
    return _drawn(random.Random(seed), 3)


def _drawn(draw: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _simple, _enum]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return draw.choice(kinds)(draw, depth)


def _string(draw: random.Random, _: int) -> Schema:
    least = draw.randrange(3)
    return draw.choice([
        {"type": "string", "minLength": least, "maxLength": least + draw.randrange(1, 6)},
        {"type": "string", "pattern": f"^[a-{draw.choice('cfx')}]{{{least},{least + 4}}}$"},
        {"type": "string", "pattern": f"^({draw.choice(['on', 'off'])}|[A-Z][0-9]{{1,{least + 1}}})$"},
        {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "time"])},
    ])  # fmt: skip


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randrange(-200, 200)
    found: Schema = {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1, 3000)}
    if draw.random() < 0.3:
        found = {"type": "integer", "multipleOf": draw.choice([2, 5, 10]), "minimum": 0, "maximum": 5000}
    return found


def _number(draw: random.Random, _: int) -> Schema:
    low = draw.randrange(-5, 5)
    return {"type": "number", "minimum": low, "maximum": low + draw.choice([0.5, 1, 17.25])}


def _simple(draw: random.Random, _: int) -> Schema:
    return draw.choice([{"type": "boolean"}, {"type": "null"}, {"const": draw.choice(["x", 7, [1, 2]])}])


def _enum(draw: random.Random, _: int) -> Schema:
    return {"enum": draw.sample(["red", "green", "blue", 1, 2, 3, None, False, "ü", "a b"], draw.randrange(1, 6))}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["id", "name", "value", "tags", "x", "y", "a b", "größe"], draw.randrange(1, 5))
    required = [name for name in names if draw.random() < 0.6]
    return closed({name: _drawn(draw, depth - 1) for name in names}, required)


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randrange(2)
    return {
        "type": "array", "items": _drawn(draw, depth - 1), "minItems": least,
        "maxItems": least + draw.randrange(1, 3),
    }  # fmt: skip


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_drawn(draw, depth - 1) for _ in range(draw.randrange(2, 4))]}


DRAWN = 200 - len(SERVED)


def corpus() -> dict[str, Schema]:
    """Return 200 schemas by name: the served ones, then random ones."""
    return {**SERVED, **{f"drawn {seed}": drawn(seed) for seed in range(DRAWN)}}
