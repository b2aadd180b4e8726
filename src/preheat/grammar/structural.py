"""Structural tags: free text, and JSON, tags and other formats in it.

A tag is a tree of formats, with the names of vLLM and xgrammar. `format_of` turns the older form, ``structures`` and
``triggers``, into a tree. xgrammar takes the tree itself; for llguidance it is written as a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from preheat.core import StructuredOutputsParams
from preheat.grammar.source import loaded, refused

PART = "structural_tag"

Format = dict[str, Any]

FIELDS: Mapping[str, tuple[set[str], set[str]]] = MappingProxyType(
    {
        "const_string": ({"value"}, set()),
        "json_schema": ({"json_schema"}, {"style"}),
        "regex": ({"pattern"}, set()),
        "any_text": (set(), {"excludes"}),
        "sequence": ({"elements"}, set()),
        "or": ({"elements"}, set()),
        "optional": ({"content"}, set()),
        "plus": ({"content"}, set()),
        "star": ({"content"}, set()),
        "tag": ({"begin", "content", "end"}, set()),
        "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first", "excludes"}),
        "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
    }
)
"""The supported formats: the fields that each must have, and the fields that it may have."""


def format_of(params: StructuredOutputsParams) -> Format:
    """Return the tree of formats of ``structural_tag``. Raises InvalidRequest, naming the part.

    Its schemas are checked to be objects.
    """
    given = loaded(params.structural_tag, PART)
    if unknown := given.keys() - {"type", "structures", "triggers", "format"}:
        raise refused(PART, f"{min(unknown)} is not supported; it has a format, or structures and triggers")
    if "format" in given:
        if old := given.keys() & {"structures", "triggers"}:
            raise refused(PART, f"{min(old)} and format both constrain the text; give one of them")
        return _checked(given["format"], "format")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise refused(PART, "structures must be a list of at least one object with begin, schema and end")
    tags = list[Format]()
    for place, each in enumerate(structures):
        if not isinstance(each, dict) or each.keys() != {"begin", "schema", "end"}:
            raise refused(PART, f"structures[{place}] must be an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return _checked({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "structures")


def _checked(given: Any, at: str) -> Format:
    """Return the tree ``given``. Raises InvalidRequest if a format has missing or other fields."""
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise refused(PART, f"{at} must be an object with a type")
    kind = given["type"]
    if kind not in FIELDS:
        raise refused(PART, f"{at}: type {kind} is not supported; supported are {', '.join(FIELDS)}")
    must, may = FIELDS[kind]
    own = {key: value for key, value in given.items() if value is not None}
    if wrong := (must - own.keys()) or (own.keys() - must - may - {"type"}):
        what = "is missing" if must - own.keys() else "is not supported"
        raise refused(PART, f"{at}: {min(wrong)} of {kind} {what}")
    for key, value in own.items():
        if key in ("elements", "tags"):
            if not isinstance(value, list) or not value:
                raise refused(PART, f"{at}.{key} must be a list of at least one format")
            own[key] = [_checked(each, f"{at}.{key}[{place}]") for place, each in enumerate(value)]
            if key == "tags" and any(each["type"] != "tag" for each in own[key]):
                raise refused(PART, f"{at}.{key} must be formats of type tag")
        elif key == "content":
            own[key] = _checked(value, f"{at}.{key}")
        else:
            _check_value(key, value, f"{at}.{key}")
    if kind == "triggered_tags":
        _check_triggers(own, at)
    return own


def _check_value(key: str, value: Any, at: str) -> None:
    """Raise InvalidRequest if a field has a value of the wrong kind."""
    if key == "json_schema":
        loaded(value, PART)
    elif key in ("at_least_one", "stop_after_first"):
        if not isinstance(value, bool):
            raise refused(PART, f"{at} must be true or false")
    elif key == "style":
        if value != "json":
            raise refused(PART, f"{at} {value!r} is not supported: only json is")
    elif key == "end" and isinstance(value, list) and value and all(isinstance(each, str) and each for each in value):
        return
    elif key in ("triggers", "excludes"):
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise refused(PART, f"{at} must be a list of texts, none of them empty")
    elif not isinstance(value, str):
        raise refused(PART, f"{at} must be a text: tokens are not supported")
    elif key == "value" and not value:
        raise refused(PART, f"{at} must not be empty")


def _check_triggers(given: Format, at: str) -> None:
    for place, tag in enumerate(given["tags"]):
        if not any(tag["begin"].startswith(trigger) for trigger in given["triggers"]):
            raise refused(PART, f"{at}[{place}]: begin {tag['begin']!r} begins with none of the triggers")


def with_grammars(tree: Format, grammar: Callable[[Format], str]) -> Format:
    """Return ``tree`` with the result of ``grammar`` in place of each schema and regular expression."""
    if tree["type"] in ("json_schema", "regex"):
        return {"type": "grammar", "grammar": grammar(tree)}
    found = dict(tree)
    for key, value in tree.items():
        if key == "content":
            found[key] = with_grammars(value, grammar)
        elif key in ("elements", "tags"):
            found[key] = [with_grammars(each, grammar) for each in value]
    return found
