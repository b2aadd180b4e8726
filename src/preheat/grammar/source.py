"""The parts of a request's constraint, checked for any library. Nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from preheat.core import StructuredOutputsParams
from preheat.errors import InvalidRequest
from preheat.utils import json_size
from preheat.utils.exact_json import decimal

MAX_CHOICES = 10_000
MAX_OBJECTS = 20_000
"""Most objects in a schema. The library follows references by recursion, on a stack of `STACK` bytes (service.py)."""

MAX_TEXT = 2**17
"""Most characters of a grammar, of a regular expression, of all texts of a choice, or of a schema's names, patterns and
values. The reason is the same."""

MOST_EXPONENT = 4_096
"""Greatest exponent of a number in a schema: other numbers are compared with it digit by digit."""

OPTIONS = "x-guidance"
"""The key of schemas for options of llguidance elsewhere. Here the options would be ignored."""


class Inexact(ValueError):
    """A constraint that a library cannot express exactly."""


def check_sizes(params: StructuredOutputsParams) -> None:
    """Raise InvalidRequest if a text is too long for a library to recurse through."""
    for part in ("regex", "grammar", "choice", "whitespace_pattern"):
        check_size(part, sum(map(len, getattr(params, part) or "")))


def check_size(part: str, size: int, what: str = "it has") -> None:
    """Raise InvalidRequest if ``size`` is more characters than a library can recurse through."""
    if size > MAX_TEXT:
        raise refused(part, f"{what} {size:,} characters, at most {MAX_TEXT:,} are allowed")


def refused(part: str, why: str) -> InvalidRequest:
    """Return the error for a ``part`` of ``structured_outputs`` that cannot be served."""
    param = f"structured_outputs.{part}"
    return InvalidRequest(f"{param}: {why}", param=param)


def loaded_schema(params: StructuredOutputsParams, given: object, part: str) -> dict[str, Any]:
    """Return the JSON schema ``given``, closed to other properties if ``params`` say so."""
    schema = loaded(given, part)
    for count, (path, inner) in enumerate(objects(schema, "$")):
        if count == MAX_OBJECTS:
            raise refused(part, f"it has more than {MAX_OBJECTS:,} objects")
        if OPTIONS in inner:
            raise refused(part, f"{OPTIONS} at {path} is not supported")
    closed: dict[str, Any] = _closed(schema) if params.disable_additional_properties else schema
    return closed


def loaded(given: object, part: str) -> dict[str, Any]:
    """Return the object ``given``, or the object in its text. Raises InvalidRequest if it is neither."""
    if isinstance(given, str):
        param = f"structured_outputs.{part}"
        json_size.check_size(given.encode(errors="replace"), f"{param}: the JSON", param=param)
        try:
            given = json.loads(given, parse_float=_decimal, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise refused(part, f"it is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise refused(part, "it must be a JSON object")
    return given


def _decimal(text: str) -> Decimal:
    number = decimal(text)
    if abs(number.adjusted()) > MOST_EXPONENT:
        raise ValueError(f"{text[:40]} has an exponent beyond {MOST_EXPONENT:,}")
    return number


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def objects(value: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects in ``value``, with their JSON paths."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from objects(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from objects(inner, f"{path}[{place}]")


HOLD_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
LIST_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
ARE_SCHEMAS = ("additionalProperties", "items", "additionalItems")
"""The keywords that hold schemas: by name, in a list, and one each."""


def _closed(schema: Any) -> Any:
    """Return ``schema`` with objects closed to properties that they do not name, unless they say otherwise."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in HOLD_SCHEMAS and isinstance(value, dict):
            found[key] = {name: _closed(inner) for name, inner in value.items()}
        else:
            found[key] = _closed(value) if key in (*LIST_SCHEMAS, *ARE_SCHEMAS) else value
    if "properties" in schema and not {"additionalProperties", "patternProperties"} & schema.keys():
        found["additionalProperties"] = False
    return found


def choices_of(params: StructuredOutputsParams) -> list[str]:
    """Return the texts of ``choice`` as literals, for a choice in Lark's notation and in EBNF."""
    texts = params.choice or []
    if not texts:
        raise refused("choice", "it has no texts")
    if len(texts) > MAX_CHOICES:
        raise refused("choice", f"it has {len(texts):,} texts, at most {MAX_CHOICES:,} are allowed")
    return [literal(each) for each in texts]


def literal(text: str) -> str:
    """Return a literal of ``text`` in Lark's notation and in EBNF."""
    return json.dumps(text, ensure_ascii=False)
