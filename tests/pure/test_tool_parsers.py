"""Parsers of tool calls: what they find, and that it never depends on how the text was cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preheat.frontend.reasoning import REASONING_PARSERS
from preheat.frontend.stream_parser import CallArguments, CallStart, Content, StreamParser
from preheat.frontend.tools import TOOL_PARSERS, NamedParser, RequiredParser, Tool
from preheat.frontend.tools.json_object import whole_object
from preheat.settings import OPTIONS

WEATHER = Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
TOOLS = [WEATHER, Tool("f"), Tool("g")]


def parts(parser: StreamParser, *pieces: str) -> tuple[str, dict[int, tuple[str, str]]]:
    """Content and calls, joined from the parts; arguments only of calls that have begun."""
    content = ""
    calls: dict[int, tuple[str, str]] = {}
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        match part:
            case Content(text):
                content += text
            case CallStart(index, id, name):
                assert index == len(calls) and id
                calls[index] = name, ""
            case CallArguments(index, text):
                calls[index] = calls[index][0], calls[index][1] + text
    return content, calls


def parsed(name: str, text: str, **options):
    """Content and calls, their arguments read."""
    content, calls = parts(TOOL_PARSERS[name](TOOLS, **options), text)
    return content, [(tool, read(arguments)) for tool, arguments in calls.values()]


def read(arguments: str) -> dict:
    """A JSON object, whose names come once each, on all levels."""

    def once(pairs: list) -> dict:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(arguments, object_pairs_hook=once)


OSLO = ("weather", {"city": "Oslo"})
BOTH = ("weather", {"city": "Oslo", "days": 3})
CASES = {
    "hermes": [
        ("Hello", "Hello", []),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", [OSLO]),
        ('\n\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}', "", [OSLO]),  # it is not closed
        ('Wait.\n<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>\n', "Wait.\n", [OSLO]),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {"a": "<tool_call>"}}',
         "", [("f", {}), ("g", {"a": "<tool_call>"})]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "}\\"]"}]}, "id": 7}</tool_call> Done', " Done",
         [("f", {"a": [1, {"b": '}"]'}]})]),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ('<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", {})]),  # cut off by max_tokens
        ("1 < 2 <tool", "1 < 2 <tool", []),
        ("  ", "  ", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1 "b": [2,], "a": {"c": 3}}}</tool_call> ok', " ok",
         [("f", {"a": 1, "b": [2]})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\d\n", "b": None, "c": oops}}</tool_call>', "",
         [("f", {"a": "\\d\n", "b": None})]),
        (r'<tool_call>{"name": "\ud800", "arguments": {}}', "", [("\ufffd", {})]),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
        ('<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
        (' {"name": "f", "parameters": {}}; {"name": "weather", "arguments": {"city": "Oslo"}}', "", [("f", {}), OSLO]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('Now <|python_tag|>{"name": "f", "parameters": {}} ok', "Now ok", [("f", {})]),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "f", "arguments": {}}]', "",
         [OSLO, ("f", {})]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]f{}', "", [OSLO, ("f", {})]),
        ('So: [TOOL_CALLS] weather[CALL_ID]abc123def[ARGS]{"city": "Oslo"}', "So: ", [OSLO]),
        ("[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ],
    "olmo3": [
        ("<function_calls>weather(city='Oslo')\nf(a=true, b=null)\n</function_calls>", "",
         [OSLO, ("f", {"a": True, "b": None})]),
        ("Look:\n<function_calls>\nweather(city='Oslo')", "Look:\n", [OSLO]),  # it is not closed
        ("<function_calls>f()</function_calls>\n<function_calls>g(a={'b': [False]})</function_calls> Done", " Done",
         [("f", {}), ("g", {"a": {"b": [False]}})]),
        ("<function_calls>nothing</function_calls>", "<function_calls>nothing</function_calls>", []),
        ("[f(a=1)]", "[f(a=1)]", []),
    ],
    "pythonic": [
        ("[weather(city='Oslo')]", "", [OSLO]),
        ('[weather(city="Oslo", days=-3), f(a={"b": [1.5, None, true]}, c=")]")]', "",
         [("weather", {"city": "Oslo", "days": -3}), ("f", {"a": {"b": [1.5, None, True]}, "c": ")]"})]),
        ("<|python_start|>[a.b()]<|python_end|>", "", [("a.b", {})]),
        ("[link](http://x)", "[link](http://x)", []),
        ("[1, 2]", "[1, 2]", []),
        ("[f(x)]", "[f(x)]", []),
        ("[f(x=open('y'))]", "[f(x=open('y'))]", []),
        ("[f(a=1), then", "then", [("f", {"a": 1})]),
        ("Text [f()]", "Text [f()]", []),
        ("Text <|python_start|>[f(a=1, a=2)]<|python_end|>", "Text ", [("f", {"a": 2})]),
        ("<function_calls>f()\nweather(city='Oslo')</function_calls>", "", [("f", {}), OSLO]),
        ("[f(a={1: 'x', '1': 'y', null: 2})]", "", [("f", {"a": {"1": "y", "null": 2}})]),
        ("[f(a={(1, 2): 3})]", "[f(a={(1, 2): 3})]", []),
        ("[f(a=1e999)]", "[f(a=1e999)]", []),  # JSON has no infinity
        ("[f(**{'a': 1})]", "[f(**{'a': 1})]", []),
        (r"[f(a='\ud800')]", "", [("f", {"a": "\ud800"})]),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter><parameter=days>3</parameter></function>",
         "", [("weather", {"city": "Oslo", "days": 3})]),
        ("Sure.<function=weather><parameter=city>42</parameter></function>", "Sure.", [("weather", {"city": "42"})]),
        ("<tool_call><function=f></function></tool_call>\n<function=g><parameter=x>a\n<b>\n</parameter></function>", "",
         [("f", {}), ("g", {"x": "a\n<b>"})]),
        ("<tool_call><function=weather><parameter=days>many</parameter></function>", "",
         [("weather", {"days": "many"})]),
        ("<tool_call><function=weather><parameter=city>Os", "", [("weather", {"city": "Os"})]),
        ("<tool_call>no</tool_call> <function=", "<tool_call>no</tool_call> <function=", []),
        # Of the tags each may be missing, and several.
        ("<tool_call><function=weather><parameter=city>Oslo<parameter=days>3</function></tool_call>", "", [BOTH]),
        ("<tool_call><function=weather><parameter=days>3</parameter><parameter=city>Oslo</function></tool_call> ok",
         " ok", [BOTH]),
        ("<tool_call><function=weather><parameter=days>3</parameter><parameter=city>Oslo</parameter></tool_call> ok",
         " ok", [BOTH]),
        ("<tool_call><function=weather><parameter=days>3<parameter=city>Oslo</tool_call> ok", " ok", [BOTH]),
        ("<function=weather>\n<parameter=city>\nOslo\n</parameter>\nThat was it.", "That was it.", [OSLO]),
        ("<tool_call>\n<function=f>\n</tool_call>\n<tool_call>\n<function=g>", "", [("f", {}), ("g", {})]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<tool_call>\n<function=g></function>", "",
         [OSLO, ("g", {})]),
        ("<tool_call><function=weather><parameter=days\n3</parameter><parameter=city>Oslo</parameter></function>", "",
         [OSLO]),
        ("<function=weather><parameter=city>Bergen</parameter><parameter=city>Oslo</parameter></function>", "", [OSLO]),
        ("<function=weather><parameter=city>Oslo</para", "", [OSLO]),
        ("<function=f\n<parameter=a>1</parameter>", "<function=f\n<parameter=a>1</parameter>", []),
    ],
}  # fmt: skip


def test_the_tables_are_those_of_the_options() -> None:
    assert OPTIONS["tool_call_parser"].choices == tuple(TOOL_PARSERS) == tuple(CASES)
    assert OPTIONS["reasoning_parser"].choices == tuple(REASONING_PARSERS)


@pytest.mark.parametrize(("name", "text", "content", "calls"), [(n, *case) for n in CASES for case in CASES[n]])
def test_what_is_found(name: str, text: str, content: str, calls: list) -> None:
    assert parsed(name, text) == (content, calls)
    assert parsed(name, text, parallel=False) == (content, calls[:1])


FRAGMENTS = [
    *"<>[](){}:;,='\"\\ \n", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "x"}}', '"name"', "f",
    "<function=weather>", "<parameter=days>", "3", "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", '{"a": 1}',
    "<|python_tag|>", "[f(a=1), ", "<think>", "</think>", "é", '"arguments": {', '{"name": "f", ', "text",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.sampled_from([case[0] for cases in CASES.values() for case in cases]),
)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def parsers():
    yield from (lambda kind=kind: kind(TOOLS) for kind in TOOL_PARSERS.values())
    yield lambda: RequiredParser(TOOLS)
    yield lambda: NamedParser(TOOLS)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 10_000), max_size=8))
@example(text=CASES["hermes"][4][0], cuts=list(range(200)))
def test_cuts_change_nothing(text: str, cuts: list[int]) -> None:
    for make in parsers():
        whole = parts(make(), text)
        assert parts(make(), *cut(text, cuts)) == whole
        assert parts(make(), *text) == whole
        assert all(isinstance(read(arguments), dict) for _, arguments in whole[1].values())


def test_the_property_can_fail() -> None:
    """The control: a parser that holds nothing back misses a marker that is cut."""

    class Hasty(TOOL_PARSERS["hermes"]):
        def _held(self, markers: tuple[str, ...]) -> int:
            return 0

    text = CASES["hermes"][1][0]
    assert parts(Hasty(TOOLS), text) == parts(TOOL_PARSERS["hermes"](TOOLS), text)
    assert parts(Hasty(TOOLS), *text) != parts(Hasty(TOOLS), text)


def test_content_and_arguments_are_not_held_back() -> None:
    parser = TOOL_PARSERS["hermes"](TOOLS)
    assert parser.push("Hello <to") == [Content("Hello ")]
    assert parser.push("mato>") == [Content("<tomato>")]
    start, *rest = parser.push('<tool_call>{"name": "f", "arguments": {')
    assert (start.index, start.name, rest) == (0, "f", [CallArguments(0, "{")])
    assert parser.push('"a": "b') == [CallArguments(0, '"a": "b')]


def test_forced_calls() -> None:
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert parts(RequiredParser(TOOLS), text) == ("", {0: ("f", '{"a": 1}'), 1: ("g", "{}")})
    assert parts(RequiredParser(TOOLS), "no") == ("no", {})
    assert parts(NamedParser(TOOLS[:1]), ' {"city": "Oslo"}') == ("", {0: ("weather", '{"city": "Oslo"}')})
    assert parts(NamedParser(TOOLS[:1]), '{"city": "Os')[1] == {0: ("weather", '{"city": "Os"}')}
    assert parts(NamedParser(TOOLS[:1]), "") == ("", {})


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"), ({"type": "integer"}, "12", 12), ({}, "12", 12),
        ({"type": "integer"}, "x", "x"), ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "null"]}, "12", "12"), ({"type": ["null", "string"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"type": "object"}, "{'a': True}", {"a": True}), ({"type": 5, "anyOf": 5}, "[1]", [1]), (True, "1", 1),
        ({"type": "number"}, "NaN", "NaN"), ({"type": "number"}, "1e999", "1e999"),
        ({"type": "object"}, '{"a": 1, "a": 2}', {"a": 2}), ({"enum": ["\\ud800"]}, r'"\ud800"', "\ud800"),
    ],
)  # fmt: skip
def test_a_schema_says_how_a_bare_value_is_read(schema: Any, text: str, value: Any) -> None:
    parser = TOOL_PARSERS["qwen3_coder"]([Tool("f", {"properties": {"a": schema}})])
    found = parts(parser, f"<function=f><parameter=a>{text}</parameter></function>")[1][0][1]
    assert read(found) == {"a": value}


def test_ids() -> None:
    def ids(name: str) -> list[str]:
        found = TOOL_PARSERS[name](TOOLS).push(CASES[name][0 if name == "mistral" else 4][0] + " ")
        return [part.id for part in found if isinstance(part, CallStart)]

    assert [len(id) for id in ids("mistral")] == [9, 9] and "".join(ids("mistral")).isalnum()
    assert len(set(ids("hermes"))) == 2 and all(id.startswith("call_") for id in ids("hermes"))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=3), JSON, max_size=3), escaped=st.booleans(), end=st.integers(0, 200))
def test_arguments_are_passed_on_as_they_are_and_closed_where_they_break_off(
    value: dict, escaped: bool, end: int
) -> None:
    text = json.dumps(value, ensure_ascii=escaped)
    assert whole_object(text) == text
    if cut_off := text[: end % (len(text) + 1)]:
        assert isinstance(read(whole_object(cut_off)), dict)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(
        st.sampled_from([*'{}[]:,"\\ \n-1.e', '"a"', '"b":', "true", "None", "x", r"\u00", "é"]), max_size=20
    )
)
def test_whatever_a_model_writes_is_valid_in_the_end(tokens: list[str]) -> None:
    read(whole_object("{" + "".join(tokens)))


def test_an_object_in_an_object_in_an_object() -> None:
    deep = '{"a":' * 5000
    assert read(whole_object(deep + "1" + "}" * 5000))
