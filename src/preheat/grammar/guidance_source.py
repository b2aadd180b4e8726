"""What a request asks of its text, as a grammar of llguidance. Nothing is compiled here."""

from __future__ import annotations

import json
from typing import Any

from preheat.core import StructuredOutputsParams
from preheat.grammar.guidance_tags import Lark
from preheat.grammar.source import MAX_SPACES, OPTIONS, check_sizes, choices_of, loaded, loaded_schema, objects, refused
from preheat.grammar.structural import PART, format_of

WHITESPACE = rf"[ \t\n\r]{{0,{MAX_SPACES}}}"


def grammar_source(params: StructuredOutputsParams) -> str:
    """The grammar of ``params``. Raises InvalidRequest, naming the part, for what cannot be one."""
    try:
        return _source(params)
    except RecursionError:
        raise refused(params.kind, "it is nested too deeply") from None


def _source(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    check_sizes(params)
    match params.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(params, params.json, "json")))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(params, {"type": "object"}, "json_object")))
        case "regex":
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices_of(params))}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(params.grammar or ""))
        case _:
            lark = Lark(lambda given: _schema(params, given, PART))
            return LLMatcher.grammar_from_lark(lark.text(format_of(params)))


def _schema(params: StructuredOutputsParams, given: object, part: str) -> dict[str, Any]:
    """The JSON schema ``given`` with what ``params`` say about it, for llguidance."""
    schema = loaded_schema(params, given, part)
    if params.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern}
    return {**schema, OPTIONS: options}


def _lark(text: str) -> str:
    """Lark's notation, from that or from EBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    if not text.strip():
        raise refused("grammar", "it is empty")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # of many kinds
        raise refused("grammar", f"it is neither Lark's notation nor EBNF: {error}") from None


def where_unsupported(params: StructuredOutputsParams, message: str) -> str:
    """Where in the schema the first keyword stands that llguidance's ``message`` names; "" if it names none."""
    start = message.find("Unimplemented keys: ")
    if start < 0 or params.kind != "json":
        return ""
    try:
        keys, _ = json.JSONDecoder().raw_decode(message[start:].partition(": ")[2])
    except ValueError:
        return ""
    for path, inner in objects(loaded(params.json, "json"), "$"):
        if found := [key for key in keys if key in inner]:
            return f"{path}.{found[0]}"
    return ""
