"""Decoding of JSON bodies into their structs.

A field that the struct lacks is ignored and reported, or refused if the caller takes no names. A null field counts as
absent, known or not, since clients send fields of other servers with null.
"""

from __future__ import annotations

import codecs
import functools
import re
import typing
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from preheat.errors import InvalidRequest
from preheat.server.openai.schema import IDLE, ForModel
from preheat.utils.exact_json import exact_number
from preheat.utils.json_size import check_size

Body = TypeVar("Body", bound=ForModel)
Kind = TypeVar("Kind")
Names = dict[str, None]
"""Names of ignored fields, each once, in order. Indices of lists are left out, as in ``messages[].name``."""

_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
"""The first half of a surrogate pair; near the end of a body msgspec says only that the body is cut off."""

_PATH = re.compile(r"`\$([^`]*)`")
_NO_CHOICE = re.compile(r"Invalid (?:enum )?value ('.*')", re.DOTALL)
_INTEGER_AS_FLOAT = re.compile(r"`[^`]*\bint\b[^`]*`, got `float`")
"""Some clients, such as those with Gson, write an integer as 16.0."""

_MOST_EXACT = 2**53
_UNKNOWN = "unknown field `"
_FIELD_PROBLEMS = {
    _UNKNOWN: "Unrecognized request argument supplied",
    "required field `": "Missing required parameter",
}


def decode(data: bytes, kind: type[Body], ignored: Names | None = None) -> Body:
    """Decode the body of a request. Raises InvalidRequest, naming the field, for anything unsupported.

    The names of fields that ``kind`` lacks are added to ``ignored``; if it is None, such fields are refused.
    """
    check_size(data, "The body", kind.most_values)
    if not data:
        raise InvalidRequest("The body is empty: send a JSON object")
    try:
        body = _decoded(data.removeprefix(codecs.BOM_UTF8), kind, ignored)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(error, data) from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply") from error
    _check_only(body, "", "", ignored)
    return body


def _malformed(error: Exception, data: bytes) -> InvalidRequest:
    said = str(error)
    if "surrogate" in said or ("truncated" in said and _HALF.search(data, max(len(data) - 16, 0))):
        said += "; half of a surrogate pair (\\ud800 to \\udfff) is no character: send both halves, or none"
    return InvalidRequest(f"The body is not valid JSON: {said}")


def prepare(kind: type[Struct]) -> None:
    """Build the decoder and the tables that :func:`decode` uses for ``kind``."""
    _decoder(kind)
    pending, seen = [_described(kind)], set[type]()
    while pending:
        match pending.pop():
            case inspect.StructType(cls=own, fields=fields) if own not in seen:
                seen.add(own)
                _only_fields(own)
                for field in fields:
                    _may_hold_structs(own, field.name)
                    pending.append(field.type)
            case inspect.ListType(item_type=item):
                pending.append(item)
            case inspect.UnionType(types=types):
                pending += types
            case inspect.Metadata(type=inner):
                pending.append(inner)


def converted(value: Any, kind: type[Kind], ignored: Names | None, at: str, param: str) -> Kind:
    """Convert a part of a body, decoded as plain JSON, as :func:`decode` would.

    ``at`` is its name in ``ignored``, ``param`` its name in errors. Raises InvalidRequest.
    """
    try:
        known = _known(value, _described(kind), ignored, at)  # type: ignore[arg-type]  # a class is hashable
        return msgspec.convert(known, kind, str_keys=True, builtin_types=(Decimal,))
    except msgspec.ValidationError as error:
        raise invalid(error, kind, param) from error


def with_integers(values: dict[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Return ``values`` of fields of ``kind``; a float without a fraction is an integer where the field is one."""
    found: dict[str, Any] = _known_fields(values, _struct(kind), None, "")
    return found


def _struct(kind: type[Struct]) -> inspect.StructType:
    described = _described(kind)
    assert isinstance(described, inspect.StructType)
    return described


def _decoded(data: bytes, kind: type[Body], ignored: Names | None) -> Body:
    body: Body
    try:
        body = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        if _UNKNOWN not in str(error) and not _INTEGER_AS_FLOAT.search(str(error)):
            raise
        known = _known(_ANYTHING.decode(data), _described(kind), ignored, "")
        body = msgspec.convert(known, kind, str_keys=True)
    return body


_described = functools.cache(inspect.type_info)
_ANYTHING = msgspec.json.Decoder(float_hook=exact_number)


def _known(value: Any, kind: inspect.Type, ignored: Names | None, at: str) -> Any:
    """Return ``value`` (decoded JSON) without the fields that the structs in ``kind`` lack.

    Null fields are dropped; other unknown fields are dropped if ``ignored`` can take their names. A float without a
    fraction is an integer where ``kind`` is one.
    """
    match kind:
        case inspect.IntType() if isinstance(value, float) and value.is_integer() and abs(value) <= _MOST_EXACT:
            return int(value)
        case inspect.StructType() if isinstance(value, dict) and _is_of(value, kind):
            return _known_fields(value, kind, ignored, at)
        case inspect.ListType() if isinstance(value, list):
            return [_known(item, kind.item_type, ignored, f"{at}[]") for item in value]
        case inspect.UnionType():
            is_number = isinstance(value, float) and any(isinstance(each, inspect.FloatType) for each in kind.types)
            for each in () if is_number else kind.types:
                value = _known(value, each, ignored, at)
        case inspect.Metadata():
            return _known(value, kind.type, ignored, at)
    return value


def _is_of(value: dict[str, Any], kind: inspect.StructType) -> bool:
    return kind.tag_field is None or value.get(kind.tag_field) == kind.tag


def _known_fields(value: dict[str, Any], kind: inspect.StructType, ignored: Names | None, at: str) -> dict[str, Any]:
    fields = {field.encode_name: field.type for field in kind.fields}
    found = {}
    for name, item in value.items():
        here = f"{at}.{name}" if at else name
        if name in fields:
            found[name] = _known(item, fields[name], ignored, here)
        elif name == kind.tag_field or (item is not None and ignored is None):
            found[name] = item
        elif item is not None and ignored is not None:
            ignored[here] = None
    return found


@functools.cache
def _decoder(kind: type[Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, float_hook=exact_number)


def invalid(error: msgspec.ValidationError, kind: type, within: str = "") -> InvalidRequest:
    """Put msgspec's error about a value of ``kind`` in OpenAI's words, with its ``param``.

    ``within``: the name of the value, if it is a part of the body.
    """
    problem = str(error).partition(" - at `")[0]
    inner = next(iter(_PATH.findall(str(error))), "")
    path = f"{within}{inner}".lstrip(".")
    for start, said in _FIELD_PROBLEMS.items():
        if name := problem.partition(start)[2].rstrip("`"):
            field = f"{path}.{name}" if path else name
            return InvalidRequest(f"{said}: {field}", param=field)
    if (found := _NO_CHOICE.fullmatch(problem)) and (choices := _choices(_described(kind), inner)):
        problem = f"{found[1]} is not one of {', '.join(choices)}"
    return InvalidRequest(f"Invalid value for {path or 'the body'}: {problem}", param=path or None)


def _choices(kind: inspect.Type, path: str) -> list[str]:
    """Return the values that the field at ``path`` may have, where they are listed."""
    kinds = _alternatives(kind)
    for step in re.findall(r"[^.\[\]]+(?![^\[]*\])|\[", path):
        kinds = [each for one in kinds for inner in _inner(one, step) for each in _alternatives(inner)]
    return list(
        dict.fromkeys(str(value) for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values)
    )


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    match kind:
        case inspect.UnionType(types=types):
            return [each for one in types for each in _alternatives(one)]
        case inspect.Metadata(type=inner):
            return _alternatives(inner)
    return [kind]


def _inner(kind: inspect.Type, step: str) -> list[inspect.Type]:
    """Return the kinds of the part of ``kind`` that a ``step`` of a path leads to."""
    match kind:
        case inspect.ListType(item_type=item) if step == "[":
            return [item]
        case inspect.StructType(tag_field=tag, fields=fields):
            own: list[inspect.Type] = [inspect.LiteralType((kind.tag,))] if step == tag else []
            return own + [field.type for field in fields if field.encode_name == step]
    return []


@functools.cache
def _only_fields(kind: type[Struct]) -> list[tuple[str, list[object], bool]]:
    """Return the fields of ``kind`` that work only at some values.

    Each has its name, these values, and whether it is ignored at others.
    """
    found = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for meta in typing.get_args(hint)[1:]:
            if isinstance(meta, Meta) and meta.extra and IDLE in meta.extra:
                found.append((name, list(meta.extra[IDLE]), True))
            elif isinstance(meta, Meta) and meta.extra_json_schema:
                found.append((name, meta.extra_json_schema["enum"], False))
    return found


def _check_only(body: Struct, path: str, at: str, ignored: Names | None) -> None:
    """Reject unsupported values in ``body`` and its nested structs; add ignored fields to ``ignored``."""
    for name, values, is_hint in _only_fields(type(body)):
        value = getattr(body, name)
        if value is None or any(value == known and type(value) is type(known) for known in values):
            continue
        if is_hint and ignored is not None:
            ignored[f"{at}{name}"] = None
            continue
        raise InvalidRequest(f"{path}{name} is not supported: leave it out", param=f"{path}{name}")
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            _check_only(value, f"{path}{name}.", f"{at}{name}.", ignored)
        elif isinstance(value, list) and _may_hold_structs(type(body), name):
            _check_items(value, f"{path}{name}", f"{at}{name}", ignored)


def _check_items(items: list[Any], path: str, at: str, ignored: Names | None) -> None:
    """Apply :func:`_check_only` to the structs in a list and its nested lists."""
    for position, item in enumerate(items):
        if isinstance(item, Struct):
            _check_only(item, f"{path}[{position}].", f"{at}[].", ignored)
        elif isinstance(item, list):
            _check_items(item, f"{path}[{position}]", f"{at}[]", ignored)


@functools.cache
def _may_hold_structs(kind: type[Struct], name: str) -> bool:
    """Return whether the field ``name`` may be a list of structs.

    Other lists are skipped: a list of ids may have millions of items.
    """
    return _has_structs(next(field.type for field in _fields(kind) if field.name == name), listed=False)


def _has_structs(kind: inspect.Type, *, listed: bool = True) -> bool:
    """Return whether a struct is among the items of ``kind``.

    With ``listed``, ``kind`` is an item itself and may be the struct.
    """
    if isinstance(kind, inspect.UnionType):
        return any(_has_structs(each, listed=listed) for each in kind.types)
    if isinstance(kind, inspect.ListType):
        return _has_structs(kind.item_type)
    return listed and isinstance(kind, inspect.StructType)


def _fields(kind: type[Struct]) -> tuple[inspect.Field, ...]:
    described = _described(kind)
    return described.fields if isinstance(described, inspect.StructType) else ()
