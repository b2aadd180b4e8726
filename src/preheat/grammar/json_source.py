"""JSON as rules: the schema of a request, and white space between its parts."""

from __future__ import annotations

from preheat.core import StructuredOutputsParams
from preheat.grammar.characters import of, others
from preheat.grammar.derive import TooComplex, is_empty
from preheat.grammar.document import Document
from preheat.grammar.json_rules import JsonRules, Layout
from preheat.grammar.nodes import EVERYTHING, Chars, Node, Rules, both, optional, seq, text, within
from preheat.grammar.pattern import WHOLE, PatternError, parsed
from preheat.grammar.source import loaded_schema, refused

INDENT = 16
"""Spaces or tabs at the beginning of a line."""

_SPACE = text(" ")
_BETWEEN = optional(parsed(rf" |\n[ \t]{{0,{INDENT}}}", WHOLE))

PRINTED = Layout(open=_BETWEEN, close=_BETWEEN, colon=optional(_SPACE))
"""White space as programs print it: one space, or a new line with its indentation, where it makes sense."""


def json_rules(params: StructuredOutputsParams, given: object, part: str) -> Rules:
    """Return the rules of JSON for a schema, in the layout of ``params``.

    Raises InvalidRequest, naming the ``part`` and the place in it.
    """
    schema = loaded_schema(params, given, part)
    try:
        return JsonRules(Document(schema, part), layout(params)).rules
    except UnicodeEncodeError:
        raise refused(part, "it has half a surrogate pair, and that is not a character") from None
    except ValueError as error:  # of numbers with thousands of digits too
        raise refused(part, f"it cannot be enforced: {error}") from None


def layout(params: StructuredOutputsParams) -> Layout:
    """Return the places of white space by ``params``."""
    if params.disable_any_whitespace:
        return Layout()
    if params.whitespace_pattern is None:
        return PRINTED
    space = _free(params.whitespace_pattern)
    return Layout(space, space, space, space)


def _free(pattern: str) -> Node:
    """Return the white space of a request's own ``pattern``. Raises InvalidRequest if it allows anything else."""
    name = "whitespace_pattern"
    try:
        node = parsed(pattern, WHOLE)
        empty = is_empty(node)
    except (PatternError, TooComplex) as error:
        raise refused(name, str(error)) from None
    if empty or not _blank(node):
        raise refused(name, "it must match only spaces, tabs and line breaks")
    return node


def _blank(node: Node) -> bool:
    """Return whether all texts of ``node`` are white space of JSON."""
    other = Chars(others(of(" \t\n\r")))
    if all(not isinstance(each, Chars) or is_empty(both(each, other)) for each in within(node)):
        return True
    return is_empty(both(node, seq(EVERYTHING, other, EVERYTHING)))
