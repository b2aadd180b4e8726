"""The schema of forced calls has the texts of each tool's own schema, whatever stands beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from preheat.errors import InvalidRequest
from preheat.frontend.answer_format import ToolChoice
from preheat.frontend.tools import Tool
from preheat.server.openai.conversation import tool_choice

TREE = {
    "type": "object",
    "properties": {"more": {"type": "array", "items": {"$ref": "#"}}, "of": {"$ref": "#/$defs/leaf"}},
    "required": ["of"],
    "$defs": {"leaf": {"const": {"$ref": "#/$defs/none"}}},
}
NAMED_AS_KEYWORDS = {
    "properties": {"default": {"$ref": "#/$defs/leaf"}, "$ref": {"$ref": "#/properties/default"}},
    "required": ["default", "$ref"],
    "$defs": {"leaf": {"enum": [8]}},
}
LEAF = {"$ref": "#/$defs/none"}
ARGUMENTS: list[tuple[str, Any, bool]] = [
    ("tree", {"of": LEAF}, True),
    ("tree", {"of": LEAF, "more": [{"of": LEAF}]}, True),
    ("tree", {"of": LEAF, "more": [{"of": 8}]}, False),
    ("tree", {"of": LEAF, "more": [{}]}, False),
    ("words", {"default": 8, "$ref": 8}, True),
    ("words", {"default": LEAF, "$ref": 8}, False),
    ("perhaps", None, False),
    ("perhaps", {}, True),
]


@pytest.mark.parametrize(("name", "arguments", "fits"), ARGUMENTS)
def test_references_lead_to_the_tools_own_parts(name: str, arguments: object, fits: bool) -> None:
    """Two tools may define one name differently, and a tool may refer to itself."""
    tools = (Tool("tree", TREE), Tool("words", NAMED_AS_KEYWORDS), Tool("perhaps", {"type": ["object", "null"]}))
    forced = ToolChoice(tools, "required").forced
    assert forced is not None
    call = [{"name": name, "parameters": arguments}]
    assert Draft202012Validator(forced.json).is_valid(call) is fits
    assert tools[0].parameters == TREE


@pytest.mark.parametrize("kind", ["string", ["string", "null"], 5])
def test_arguments_are_objects(kind: object) -> None:
    """A grammar of a text would let the model write a text where a call must be."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    with pytest.raises(InvalidRequest, match="the arguments of a call are a JSON object") as refused:
        tool_choice([tool], "required", None)
    assert refused.value.param == "tools[0].function.parameters.type"


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep = json.loads('{"items":' * 700 + "{}" + "}" * 700)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        _ = ToolChoice((Tool("f", deep),), "required").forced
