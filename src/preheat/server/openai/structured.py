"""Constraints on text: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and older ``guided_*``.

All become one :class:`~preheat.core.StructuredOutputsParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from preheat.core import StructuredOutputsParams
from preheat.errors import InvalidRequest
from preheat.server.openai.schema import ResponseFormat, Sampling

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""The present names of vLLM's older fields."""


def structured_outputs(body: Sampling) -> StructuredOutputsParams | None:
    """Return the constraint on the answer's text, or None. Raises InvalidRequest if several fields differ."""
    if body.guided_whitespace_pattern is not None and all(getattr(body, name) is None for name in GUIDED):
        raise InvalidRequest(
            "guided_whitespace_pattern belongs to guided_json; with structured_outputs it is whitespace_pattern",
            param="guided_whitespace_pattern",
        )
    given: dict[str, StructuredOutputsParams | None] = {
        "response_format": response_format(body.response_format) if body.response_format is not None else None,
        "structured_outputs": body.structured_outputs,  # type: ignore[attr-defined]
    }
    for name, meant in GUIDED.items():
        if (value := getattr(body, name)) is not None:
            given[name] = converted({meant: value, "whitespace_pattern": body.guided_whitespace_pattern}, name)
    return the_one(given)


def the_one(given: Mapping[str, StructuredOutputsParams | None]) -> StructuredOutputsParams | None:
    """Return the constraint that the named fields share; some clients state one twice.

    Raises InvalidRequest if the fields differ.
    """
    said = {name: value for name, value in given.items() if value is not None}
    first = next(iter(said.values()), None)
    if any(value != first for value in said.values()):
        names = list(said)
        raise InvalidRequest(f"{' and '.join(names)} both constrain the text; give one of them", param=names[1])
    return first


def response_format(asked: ResponseFormat) -> StructuredOutputsParams | None:
    """Convert OpenAI's ``response_format``, with vLLM's structural tags. Raises InvalidRequest, naming the part."""
    own = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers", "format")}
    fields = [name for name in ("json_schema", "structures", "triggers", "format") if getattr(asked, name) is not None]
    for name in fields:
        if name not in own.get(asked.type, ()):
            param = f"response_format.{name}"
            raise InvalidRequest(f"{param} has no meaning for type {asked.type}", param=param)
    match asked.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            if asked.json_schema is None or asked.json_schema.schema is None:
                param = "response_format.json_schema"
                raise InvalidRequest(f"{param} is missing: give it with its schema", param=param)
            return converted({"json": asked.json_schema.schema}, "response_format.json_schema.schema")
        case "structural_tag":
            tag = {name: msgspec.to_builtins(getattr(asked, name), builtin_types=(Decimal,)) for name in fields}
            return converted({"structural_tag": {"type": asked.type, **tag}}, "response_format")


def converted(values: dict[str, Any], param: str) -> StructuredOutputsParams:
    """Convert ``values`` to parameters. Raises InvalidRequest, naming ``param``."""
    try:
        return msgspec.convert(
            {k: v for k, v in values.items() if v is not None}, StructuredOutputsParams, builtin_types=(Decimal,)
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
