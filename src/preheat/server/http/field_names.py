"""The engine's names of fields, in the errors of requests, become the names that the client sent.

The ``spelled`` of a body lists for each such field the names that the body has for it, as paths. In ``tools[].name``
the brackets stand for an item of the list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from starlette.types import Scope

from preheat.errors import PreheatError
from preheat.server.openai.schema import ForModel

_SCOPE = "preheat.field_names"

_ITEM = "[]."
_CONSTRAINT = "structured_outputs"
_CALL = re.compile(r"\$\.items\.anyOf\[(\d+)\]\.properties\.parameters")
_OWN_REF = re.compile(r"#/items/anyOf/\d+/properties/parameters")
"""Places in the schema of forced calls: of a tool's parameters, and of a reference within them."""

Names = Mapping[str, str]
"""The client's names, by the engine's."""


def note_names(scope: Scope, body: ForModel) -> None:
    """Keep the names that ``body`` has for the engine's fields, for the errors of its request."""
    scope[_SCOPE] = names_in(body)


def names_of(scope: Scope) -> Names:
    """Return the names of a request whose body may not have been read."""
    names: Names = scope.get(_SCOPE, {})
    return names


def names_in(body: ForModel) -> Names:
    """Return the names in ``body``: of several for one field the first that was given, or else the first."""
    found = {}
    for field, paths in body.spelled.items():
        name = next((path for path in paths if _given(body, path)), paths[0])
        if name != field:
            found[field] = name
    return found


def respelled(error: PreheatError, names: Names) -> PreheatError:
    """Return ``error`` in the client's ``names``.

    An error that has the client's name already is about the body, and stays.
    """
    field, rest = _split(error.param)
    name = names.get(field)
    if name is not None and _word(name).search(error.message):
        return error
    message = error.message
    for engine, own in names.items():
        if engine == _CONSTRAINT and own == "tools":
            message = _CALL.sub(r"tools[\1].function.parameters", _OWN_REF.sub("#", message))
        message = _pattern(engine).sub(_last(own), message)
    if name is not None and rest.startswith(".") and name.rpartition(".")[2] != field:
        rest = ""  # the client's value has parts of its own
    param = error.param if name is None else f"{name}{rest}"
    for engine, own in names.items():
        if param is not None and _ITEM in engine:
            param = _pattern(engine).sub(_last(own), param)
    return error if (message, param) == (error.message, error.param) else type(error)(message, param=param)


def _pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of the engine's ``name`` in messages."""
    if name == _CONSTRAINT:
        return re.compile(rf"{_word(name).pattern}(?:\.(?:json_object|json|regex|choice|grammar|structural_tag)\b)?")
    if _ITEM in name:
        return re.compile(rf"(?<=\]\.){re.escape(_last(name))}(?!\w)")
    # A plain word, such as stop, is a name only where a message begins with it.
    return _word(name) if "_" in name else re.compile(rf"\A{name}(?![\w'])")


def _last(name: str) -> str:
    """Return the part of ``name`` within an item of a list; a name of no list stays."""
    return name.rpartition(_ITEM)[2]


def _split(param: str | None) -> tuple[str, str]:
    """Return the field of ``param``, and the part of it."""
    found = re.match(r"\w+", param or "")
    return (found[0], (param or "")[found.end() :]) if found else ("", "")


def _word(name: str) -> re.Pattern[str]:
    """Return the pattern of ``name`` outside of quotes and of longer names."""
    return re.compile(rf"(?<![\w.'\"`-]){re.escape(name)}(?![\w'\"`-])")


def _given(body: object, path: str) -> bool:
    """Return whether ``body`` has a value at ``path``."""
    value: Any = body
    for name in path.split("."):
        value = getattr(value, name, None) if isinstance(value, Struct) else dict(value or {}).get(name)
    return value is not None
