"""A request's constraint, compiled by xgrammar."""

from __future__ import annotations

import json
import re
from typing import Any

from preheat.core import StructuredOutputsParams
from preheat.grammar.derive import TooComplex, is_empty
from preheat.grammar.ebnf import EbnfWriter
from preheat.grammar.json_rules import ROOT
from preheat.grammar.json_source import json_rules
from preheat.grammar.nodes import Rules, Token
from preheat.grammar.notation import check_ebnf, readable
from preheat.grammar.pattern import WHOLE, PatternError, parsed
from preheat.grammar.source import Inexact, check_sizes, choices_of, refused
from preheat.grammar.structural import PART, Format, format_of, with_grammars


def compiled(compiler: Any, params: StructuredOutputsParams) -> Any:
    """Return the compiled grammar of ``params``.

    Raises InvalidRequest, naming the part, if it cannot be a grammar, RuntimeError if xgrammar refuses it.
    """
    check_sizes(params)
    if params.kind == "structural_tag":
        return compiler.compile_structural_tag(json.dumps({"type": PART, "format": _tags(params)}))
    return compiler.compile_grammar(_source(params))


def _source(params: StructuredOutputsParams) -> Any:
    match params.kind:
        case "json":
            return _written(json_rules(params, params.json, "json"), "json")
        case "json_object":
            return _written(json_rules(params, {"type": "object"}, "json_object"), "json_object")
        case "regex":
            return _regex(params.regex or "", "regex")
        case "choice":
            return f"root ::= {' | '.join(choices_of(params))}"
        case _:
            return _grammar(params.grammar or "")


def _written(rules: Rules, part: str) -> str:
    try:
        return EbnfWriter().text(rules, ROOT)
    except (TooComplex, Inexact) as error:
        raise refused(part, f"xgrammar cannot enforce it: {error}") from None


def _regex(pattern: str, part: str) -> str:
    try:
        node = parsed(pattern, WHOLE)
        if is_empty(node):
            raise refused(part, "no text satisfies it")
    except PatternError as error:
        raise refused(part, f"its regular expression is not supported: {error}") from None
    return _written({ROOT: Token(node)}, part)


def _grammar(text: str) -> Any:
    import xgrammar

    if not text.strip():
        raise refused("grammar", "it is empty")
    make = xgrammar.Grammar.from_ebnf if "::=" in text else xgrammar.Grammar.from_lark
    grammar = make(readable(text))
    check_ebnf(str(grammar))
    return grammar


def _tags(params: StructuredOutputsParams) -> Format:
    def grammar(given: Format) -> str:
        if given["type"] == "regex":
            return _regex(given["pattern"], PART)
        return _written(json_rules(params, given["json_schema"], PART), PART)

    return with_grammars(format_of(params), grammar)


def plain_message(error: Exception) -> str:
    """Return xgrammar's message without its time and place in the source."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()[:500]
