"""What a request asks of its text, compiled by xgrammar. What that library would take and not keep to is refused."""

from __future__ import annotations

import json
import re
from typing import Any

from preheat.core import StructuredOutputsParams
from preheat.grammar.source import MAX_SPACES, check_sizes, choices_of, loaded_schema, refused
from preheat.grammar.structural import PART, Format, format_of, with_schemas
from preheat.grammar.xgrammar_schema import exact, unkept


def compiled(compiler: Any, params: StructuredOutputsParams) -> Any:
    """The compiled grammar of ``params``. Raises InvalidRequest, naming the part, for what cannot be one, RuntimeError
    for what xgrammar refuses.
    """
    check_sizes(params)
    if params.whitespace_pattern is not None:
        raise refused("whitespace_pattern", "xgrammar has none: disable_any_whitespace, or backend guidance")
    match params.kind:
        case "json":
            return _schema(compiler, params, loaded_schema(params, params.json, "json"))
        case "json_object":
            return _schema(compiler, params, {"type": "object"})
        case "regex":
            if bad := unkept(params.regex or "", in_json=False):
                raise refused("regex", f"xgrammar does not keep to {bad}")
            return compiler.compile_regex(params.regex)
        case "choice":
            return compiler.compile_grammar(f"root ::= {' | '.join(choices_of(params))}")
        case "grammar":
            text = params.grammar or ""
            return compiler.compile_grammar(text) if "::=" in text else compiler.compile_lark(text)
        case _:
            return _structural_tag(compiler, params)


def _structural_tag(compiler: Any, params: StructuredOutputsParams) -> Any:
    if params.disable_any_whitespace:
        raise refused(PART, "xgrammar has no disable_any_whitespace in structural tags")

    def fields(given: object) -> Format:
        schema = exact(loaded_schema(params, given, PART), PART)
        return {"json_schema": schema, "max_whitespace_cnt": MAX_SPACES}

    tree = with_schemas(format_of(params), fields)
    return compiler.compile_structural_tag(json.dumps({"type": PART, "format": tree}))


def _schema(compiler: Any, params: StructuredOutputsParams, schema: dict[str, Any]) -> Any:
    compact = params.disable_any_whitespace
    return compiler.compile_json_schema(
        json.dumps(exact(schema, params.kind)),
        any_whitespace=not compact,
        separators=(",", ":") if compact else None,
        strict_mode=False,
        max_whitespace_cnt=None if compact else MAX_SPACES,
    )


def plain_message(error: Exception) -> str:
    """What xgrammar says, without time and place in its source."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()[:500]
