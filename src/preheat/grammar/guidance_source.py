"""A request's constraint as a grammar of llguidance. Nothing is compiled here."""

from __future__ import annotations

import re

from preheat.core import StructuredOutputsParams
from preheat.grammar.derive import TooComplex, check_counts
from preheat.grammar.guidance_tags import Lark
from preheat.grammar.json_source import json_rules
from preheat.grammar.lark import LarkWriter
from preheat.grammar.notation import check_lark, check_once, readable
from preheat.grammar.pattern import WHOLE, PatternError, parsed
from preheat.grammar.source import Inexact, check_sizes, choices_of, refused
from preheat.grammar.structural import PART, format_of


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return the grammar of ``params``. Raises InvalidRequest, naming the part, if it cannot be a grammar."""
    try:
        return _source(params)
    except RecursionError:
        raise refused(params.kind, "it is nested too deeply") from None
    except Inexact as error:
        raise refused(params.kind, f"llguidance cannot enforce {error}") from None


def _source(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    check_sizes(params)
    match params.kind:
        case "json":
            return LLMatcher.grammar_from_lark(_json(params, params.json, "json"))
        case "json_object":
            return LLMatcher.grammar_from_lark(_json(params, {"type": "object"}, "json_object"))
        case "regex":
            _check_regex(params.regex or "")
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {' | '.join(choices_of(params))}")
        case "grammar":
            lark = _lark(params.grammar or "")
            check_lark(lark)
            return LLMatcher.grammar_from_lark(lark)
        case _:
            tags = Lark(lambda given, prefix: LarkWriter(prefix).rules(json_rules(params, given, PART)))
            return LLMatcher.grammar_from_lark(tags.text(format_of(params)))


_RUST = re.compile(r"(\(\?)[a-zA-Z-]+(?=:)|\(\?[a-zA-Z-]+\)|(\\[pP])\{[^}]*\}")
"""Syntax of Rust that :mod:`preheat.grammar.pattern` does not know."""


def _check_regex(pattern: str) -> None:
    """Refuse repetitions that cost too much; llguidance finds all other errors."""
    try:
        check_counts(parsed(_RUST.sub(lambda found: found[1] or (found[2] and "a") or "", pattern), WHOLE))
    except PatternError:
        return
    except TooComplex as error:
        raise refused("regex", str(error)) from None


def _json(params: StructuredOutputsParams, given: object, part: str) -> str:
    lines = LarkWriter().rules(json_rules(params, given, part))
    return "\n".join(["%llguidance {}", *lines])


def _lark(text: str) -> str:
    """Return ``text`` in Lark's notation; it is in Lark's notation or EBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    if not text.strip():
        raise refused("grammar", "it is empty")
    text = readable(text)
    if "::=" in text:
        check_once(text)
    try:
        return str(any_to_lark(text))
    except Exception as error:  # of many kinds
        raise refused("grammar", f"it is neither Lark's notation nor EBNF: {error}") from None
