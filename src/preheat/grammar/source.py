"""What a request asks of its text, as a grammar of llguidance. Nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from preheat.core import StructuredOutputsParams
from preheat.errors import InvalidRequest

WHITESPACE = r"[ \t\n\r]{0,24}"
"""White space between the parts of JSON, unless a request says otherwise: bounded, because a model may write nothing
else for ever."""

MAX_CHOICES = 10_000
MAX_OBJECTS = 20_000
"""Objects in a schema. The library follows references by recursion, on a stack of `STACK` bytes (service.py)."""

MAX_TEXT = 2**17
"""Characters of a grammar or of a regular expression, for the same reason."""

OPTIONS = "x-guidance"
"""The key under which a schema carries options of llguidance. A request must not: it could switch off the refusal of
keywords that are not implemented."""


def grammar_source(params: StructuredOutputsParams) -> str:
    """The grammar of ``params``. Raises InvalidRequest, naming the part, for what cannot be one."""
    try:
        return _source(params)
    except RecursionError:
        raise refused(params.kind, "it is nested too deeply") from None


def _source(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    for part in ("regex", "grammar"):
        if (size := len(getattr(params, part) or "")) > MAX_TEXT:
            raise refused(part, f"it has {size:,} characters, at most {MAX_TEXT:,} are allowed")
    match params.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(params, params.json, "json")))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(params, {"type": "object"}, "json_object")))
        case "regex":
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(params.choice or []))
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(params.grammar or ""))
        case _:
            return _structural_tag(params)


def refused(part: str, why: str) -> InvalidRequest:
    """The error for a ``part`` of ``structured_outputs`` that cannot be served."""
    param = f"structured_outputs.{part}"
    return InvalidRequest(f"{param}: {why}", param=param)


def _schema(params: StructuredOutputsParams, given: object, part: str) -> dict[str, Any]:
    """The JSON schema ``given`` with what ``params`` say about it."""
    schema = _loaded(given, part)
    for count, (path, inner) in enumerate(_objects(schema, "$")):
        if count == MAX_OBJECTS:
            raise refused(part, f"it has more than {MAX_OBJECTS:,} objects")
        if OPTIONS in inner:
            raise refused(part, f"{OPTIONS} at {path} is not supported")
    if params.disable_additional_properties:
        schema = _closed(schema)
    if params.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern}
    return {**schema, OPTIONS: options}


def _loaded(given: object, part: str) -> dict[str, Any]:
    """An object, or the text of one."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise refused(part, f"it is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise refused(part, "it must be a JSON object")
    return given


def _objects(value: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects in ``value``, with their JSON paths."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from _objects(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _objects(inner, f"{path}[{place}]")


_HOLD_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ARE_SCHEMAS = ("additionalProperties", "items", "additionalItems", "prefixItems", "anyOf", "oneOf", "allOf", "not")


def _closed(schema: Any) -> Any:
    """``schema`` in which objects that name properties have no others, unless they say otherwise."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _HOLD_SCHEMAS and isinstance(value, dict):
            found[key] = {name: _closed(inner) for name, inner in value.items()}
        else:
            found[key] = _closed(value) if key in _ARE_SCHEMAS else value
    if "properties" in schema and not {"additionalProperties", "patternProperties"} & schema.keys():
        found["additionalProperties"] = False
    return found


def _choice(texts: Sequence[str]) -> str:
    if len(texts) > MAX_CHOICES:
        raise refused("choice", f"it has {len(texts):,} texts, at most {MAX_CHOICES:,} are allowed")
    return "start: " + " | ".join(_text(each) for each in texts)


def _text(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _lark(text: str) -> str:
    """Lark's notation, from that or from EBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    if not text.strip():
        raise refused("grammar", "it is empty")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # of many kinds
        raise refused("grammar", f"it is neither Lark's notation nor EBNF: {error}") from None


def _structural_tag(params: StructuredOutputsParams) -> str:
    """Free text in which each of the ``triggers`` begins one of the ``structures``: its begin, JSON, its end."""
    from llguidance import LLMatcher

    part = "structural_tag"
    tag = _loaded(params.structural_tag, part)
    if unknown := tag.keys() - {"type", "structures", "triggers"}:
        known = "structures (each with begin, schema and end) and triggers"
        raise refused(part, f"{min(unknown)} is not supported; a structural tag has {known}")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise refused(part, "structures must be a list of at least one object with begin, schema and end")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise refused(part, "triggers must be a list of texts, none of them empty")
    rules, names = list[str](), list[str]()
    for place, structure in enumerate(structures):
        names.append(f"tag_{place}")
        rules += _tag_rules(params, names[-1], structure, triggers, f"structures[{place}]")
    start = f"start: ({' | '.join(names)})* tag_end"
    text = "\n".join(["%llguidance {}", start, "tag_end: TAG_TEXT", r"TAG_TEXT: /(.|\n)*/", *rules])
    return LLMatcher.grammar_from_lark(text)


def _tag_rules(
    params: StructuredOutputsParams, name: str, structure: object, triggers: Sequence[str], at: str
) -> Iterator[str]:
    part = "structural_tag"
    if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
        raise refused(part, f"{at} must be an object with begin, schema and end")
    begin, end = structure["begin"], structure["end"]
    if not isinstance(begin, str) or not isinstance(end, str):
        raise refused(part, f"begin and end of {at} must be texts")
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise refused(part, f"begin of {at}, {begin!r}, begins with none of the triggers")
    rest = [_text(text) for text in (begin.removeprefix(trigger), end)]
    schema = json.dumps(_schema(params, structure["schema"], part))
    yield f"{name}_trigger[lazy]: TAG_TEXT {_text(trigger)}"
    body = [*([] if rest[0] == '""' else rest[:1]), f"%json {schema}", *([] if rest[1] == '""' else rest[1:])]
    yield f"{name}: {name}_trigger {' '.join(body)}"


def where_unsupported(params: StructuredOutputsParams, message: str) -> str:
    """Where in the schema the first keyword stands that llguidance's ``message`` names; "" if it names none."""
    start = message.find("Unimplemented keys: ")
    if start < 0 or params.kind != "json":
        return ""
    try:
        keys, _ = json.JSONDecoder().raw_decode(message[start:].partition(": ")[2])
    except ValueError:
        return ""
    for path, inner in _objects(_loaded(params.json, "json"), "$"):
        if found := [key for key in keys if key in inner]:
            return f"{path}.{found[0]}"
    return ""
