"""JSON schemas for xgrammar, which takes more of them than it keeps to.

What it ignores or widens is refused, with its place; what can be said in words that it keeps to is said so. The rules
were found by validating answers of random weights (tests/cpu/test_xgrammar.py), with version 0.2.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from preheat.errors import InvalidRequest
from preheat.grammar.source import refused

REFUSED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip

ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Each says all of its schema: xgrammar reads one of them and ignores what else is there."""

_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "string": ("minLength", "maxLength", "pattern", "format"),
        "number": _NUMBER,
        "integer": _NUMBER,
        "array": ("items", "prefixItems", "minItems", "maxItems"),
        "object": (
            "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        ),
        "boolean": (),
        "null": (),
    }
)  # fmt: skip
"""The keywords that are about values of a type."""

FORMATS = ("time", "duration", "email", "hostname", "ipv6", "uri", "uuid")
"""Formats that xgrammar keeps to."""

_DATE = (
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|[1-9][0-9](0[48]|[2468][048]|[13579][26])-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"

PATTERNS: Mapping[str, str] = MappingProxyType(
    {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$", "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$"}
)
"""Formats of which it knows the form alone: its months have 31 days, its bytes zeros in front."""

CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
"""Of a string whose length is bounded: none that has to be escaped. With its own rule xgrammar 0.2.8 lets control
characters into such strings, which are no JSON then."""

_TOKEN = re.compile(r"\\(?:x..|u....|.|$)|\(\?.?|\[\^?|.", re.DOTALL)
"""The parts of a regular expression that are looked at."""

_NOT_KEPT = frozenset("nrtfv0123456789cbBkpP")
"""What follows a backslash where xgrammar ignores it, or writes a character into JSON that has to be escaped."""


def exact(schema: Any, part: str, path: str = "$") -> Any:
    """A schema that xgrammar keeps to, and whose values are valid for ``schema``. Raises InvalidRequest, naming the
    ``part`` and the keyword with its place.
    """
    if not isinstance(schema, dict):
        return schema
    for key in REFUSED:
        if key in schema and (key, schema[key]) != ("uniqueItems", False):
            raise _no(part, path, key)
    kept = {key: exact_all(schema[key], part, f"{path}.{key}") for key in ("$defs", "definitions") if key in schema}
    alone = [key for key in ALONE if key in schema]
    if not alone:
        return kept | _typed(schema, part, path)
    about = {key for keys in KEYWORDS.values() for key in keys}
    if alone[0] not in ("enum", "const"):
        about.add("type")
    if beside := [*alone[1:], *(key for key in schema if key in about)]:
        raise _no(part, path, beside[0], f" beside {alone[0]}")
    return kept | _whole(schema, alone[0], part, path)


def exact_all(schemas: Any, part: str, path: str) -> Any:
    """The same of the schemas in an object or a list."""
    if isinstance(schemas, dict):
        return {name: exact(each, part, f"{path}.{name}") for name, each in schemas.items()}
    if isinstance(schemas, list):
        return [exact(each, part, f"{path}[{place}]") for place, each in enumerate(schemas)]
    return schemas


def _whole(schema: dict[str, Any], key: str, part: str, path: str) -> dict[str, Any]:
    """A schema that is one of `ALONE`."""
    value = schema[key]
    if key == "$ref":
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise _no(part, path, key, f" to {value!r}: only to what is within the schema")
        return {key: value}
    if key in ("enum", "const"):
        types = schema.get("type")
        asked = [types] if isinstance(types, str) else types
        values = value if key == "enum" else [value]
        fit = [each for each in values if asked is None or any(_is(each, kind) for kind in asked)]
        if not fit:
            raise _no(part, path, key, " without a value of its type")
        return {"enum": fit}
    inner = exact_all(value, part, f"{path}.{key}")
    if key == "allOf":
        if len(value) != 1:
            raise _no(part, path, key, " of several schemas")
        found: dict[str, Any] = inner[0]
        return found
    if key == "oneOf" and not _disjoint(value):
        raise _no(part, path, key, " of schemas that may overlap")
    return {"anyOf": inner}


def _typed(schema: dict[str, Any], part: str, path: str) -> dict[str, Any]:
    """A schema of values of a type, which its keywords say where it has none."""
    types = schema.get("type")
    if types is None:
        types = [kind for kind, keys in KEYWORDS.items() if kind != "integer" and any(key in schema for key in keys)]
        if len(types) > 1:
            raise _no(part, path, "type", " missing, and keywords of several types")
        types = types[0] if types else None
    if isinstance(types, list):
        return {"anyOf": [_typed({**schema, "type": kind}, part, path) for kind in types]}
    if types is None:
        return {}
    found = {key: schema[key] for key in KEYWORDS.get(types, ()) if key in schema}
    if types == "string":
        found = _string(found, part, path)
    elif types == "object":
        found = _object(found, part, path)
    elif types == "array":
        found |= {key: exact_all(found[key], part, f"{path}.{key}") for key in ("prefixItems",) if key in found}
        found["items"] = exact(found.get("items", True), part, f"{path}.items")
    elif types == "number" and "multipleOf" in found:
        raise _no(part, path, "multipleOf", " of a number that is no integer")
    return {"type": types, **found}


def _string(found: dict[str, Any], part: str, path: str) -> dict[str, Any]:
    bounded = "minLength" in found or "maxLength" in found
    if (said := bounded + ("pattern" in found) + ("format" in found)) > 1:
        key = "minLength" if "minLength" in found else "maxLength" if bounded else "format"
        raise _no(part, path, key, " beside a pattern or a format")
    if not said:
        return found
    if bounded:
        return {"pattern": f"^{CHARACTER}{{{found.get('minLength', 0)},{found.get('maxLength', '')}}}$"}
    if "format" in found and found["format"] in PATTERNS:
        return {"pattern": _optional(PATTERNS[found["format"]])}
    if "format" in found and found["format"] not in FORMATS:
        raise _no(part, path, "format", f" {found['format']!r}")
    if "pattern" in found:
        found["pattern"] = _pattern(found["pattern"], part, f"{path}.pattern")
    return found


def _pattern(pattern: Any, part: str, path: str) -> Any:
    """A pattern that xgrammar keeps to. Raises InvalidRequest for what it ignores, or writes into JSON as it is."""
    if not isinstance(pattern, str):
        return pattern
    if bad := unkept(pattern, in_json=True):
        raise refused(part, f"xgrammar does not keep to {bad} in a pattern (at {path})")
    return _optional(pattern)


def _optional(pattern: str) -> str:
    """``pattern`` with ``(a|)`` for ``(a)?``: xgrammar 0.2.8 takes ``(ab+)?`` for ``a?b*`` in JSON."""
    parts, opened = list[str](), False
    for found in _TOKEN.finditer(pattern):
        token = found[0]
        if token == "?" and not opened and parts and parts[-1] in (")", "|)"):
            parts[-1] = "|)"
            continue
        opened = token != "]" if opened else token[0] == "["
        parts.append(token)
    return "".join(parts)


def unkept(pattern: str, *, in_json: bool) -> str:
    """The first part of a regular expression that xgrammar ignores, or with ``in_json`` writes as it is where it has to
    be escaped; "" if there is none.
    """
    opened = ""  # a class of characters: one that says what it is not leaves out what has to be escaped
    for found in _TOKEN.finditer(pattern):
        token = found[0]
        if not opened and token[0] == "[":
            opened = token
        elif opened and token == "]":
            opened = ""
        elif (in_json and opened != "[^" and _escaped(token)) or (
            not opened and _ignored(token, first=not found.start(), last=found.end() == len(pattern))
        ):
            return token
    return ""


def _ignored(token: str, *, first: bool, last: bool) -> bool:
    """Whether a part of a pattern is about its place, or is a group with a question mark that is not ``(?:``."""
    return (token == "^" and not first) or (token == "$" and not last) or (token[:2] == "(?" and token != "(?:")


def _escaped(token: str) -> bool:
    """Whether a part of a pattern stands for a character that JSON must escape, or may."""
    if token[0] != "\\":
        return token == '"' or token < " "
    if token[1:2] in ("x", "u"):
        try:
            return chr(int(token[2:], 16)) in '"\\' or int(token[2:], 16) < ord(" ")
        except ValueError:
            return True
    return token[1:] in ('"', "\\") or token[1:] in _NOT_KEPT


def _object(found: dict[str, Any], part: str, path: str) -> dict[str, Any]:
    properties, patterns = found.get("properties", {}), found.get("patternProperties", {})
    more, required = found.get("additionalProperties", True), found.get("required", [])
    if not isinstance(properties, dict) or not isinstance(patterns, dict) or not isinstance(required, list):
        return found  # which the library refuses
    if patterns and (len(patterns) > 1 or properties or more is not False or found.get("minProperties", 0) > 1):
        raise _no(part, path, "patternProperties", " but as the only rule of an object without additionalProperties")
    if more is not False and found.get("minProperties", 0) > len(required) + 1:
        raise _no(part, path, "minProperties", " of an object with additionalProperties")
    missing = [name for name in required if name not in properties]
    if missing and (patterns or more is False):
        raise _no(part, path, "required", f" {missing[0]!r}, which is not among the properties")
    if properties or missing:
        properties = exact_all(properties, part, f"{path}.properties")
        own = exact(more, part, f"{path}.additionalProperties")
        found["properties"] = properties | {name: {} if own is True else own for name in missing}
    found["additionalProperties"] = exact(more, part, f"{path}.additionalProperties")
    if patterns:
        inner = exact_all(patterns, part, f"{path}.patternProperties")
        found["patternProperties"] = {_pattern(key, part, f"{path}.patternProperties"): inner[key] for key in inner}
    return found


def _disjoint(schemas: Any) -> bool:
    """Whether no value is valid for two of the ``schemas``, as far as their types and a common tag say."""
    if not isinstance(schemas, list) or not all(isinstance(each, dict) for each in schemas):
        return False
    kinds = [_kinds(each) for each in schemas]
    if _apart(kinds):
        return True
    tags = [_tags(each) for each in schemas]
    names = set(tags[0]).intersection(*tags[1:])
    return any(_apart([tag[name] for tag in tags]) for name in names)


def _apart(sets: Sequence[set[str]]) -> bool:
    return all(sets) and sum(map(len, sets)) == len(set().union(*sets))


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types of its values, numbers as one; none if it does not say."""
    types = schema.get("type", [])
    return {"number" if kind == "integer" else kind for kind in ([types] if isinstance(types, str) else types)}


def _tags(schema: dict[str, Any]) -> dict[str, set[str]]:
    """The values, as text, of each property that is required and has a few."""
    found = {}
    for name in schema.get("required", []):
        own = schema.get("properties", {}).get(name, {})
        if isinstance(own, dict) and ("const" in own or "enum" in own):
            found[name] = {repr(value) for value in ([own["const"]] if "const" in own else own["enum"])}
    return found if schema.get("type") == "object" else {}


def _is(value: Any, kind: str) -> bool:
    """Whether ``value`` is of the JSON type ``kind``."""
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON.get(kind, ()))


_PYTHON: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "array": (list,),
        "object": (dict,),
        "null": (type(None),),
    }
)


def _no(part: str, path: str, key: str, what: str = "") -> InvalidRequest:
    return refused(part, f"xgrammar does not keep to {key}{what} (at {path}.{key})")
