"""Parsers of tool calls find the same calls however the text is cut."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preheat.frontend.reasoning import REASONING_PARSERS
from preheat.frontend.stream_parser import CallArguments, CallStart, Content, StreamParser
from preheat.frontend.tools import TOOL_PARSERS, NamedParser, RequiredParser, Tool
from preheat.frontend.tools.json_calls import MarkedJsonParser
from preheat.frontend.tools.json_object import JsonObject, whole_object
from preheat.settings import OPTIONS
from tests.tool_calls import CASES

WEATHER = Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
TOOLS = [WEATHER, Tool("f"), Tool("g")]


def parts(parser: StreamParser, *pieces: str) -> tuple[str, dict[int, tuple[str, str]]]:
    """Return content and calls, joined from the parts.

    Arguments may come only for calls that have begun.
    """
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
    """Return content and calls with their arguments read."""
    content, calls = parts(TOOL_PARSERS[name](TOOLS, **options), text)
    return content, [(tool, read(arguments)) for tool, arguments in calls.values()]


def read(arguments: str) -> dict:
    """Return a JSON object, and assert that each name comes once, on all levels."""

    def once(pairs: list) -> dict:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(arguments, object_pairs_hook=once)


def test_options_and_tables_name_the_same_parsers() -> None:
    assert OPTIONS["tool_call_parser"].choices == tuple(TOOL_PARSERS) == tuple(sorted(CASES))
    assert OPTIONS["reasoning_parser"].choices == tuple(REASONING_PARSERS)


class ToyParser(MarkedJsonParser):
    """A format of calls that only names its markers."""

    ENDS: ClassVar[Mapping[str, str]] = {"<toy>": "</toy>"}


def test_a_toy_parser_only_names_its_markers() -> None:
    text = 'Well <toy>{"name": "weather", "arguments": {"city": "Oslo"}}</toy> <toy>not a call</toy>'
    found = parts(ToyParser(TOOLS), text)
    assert found == ("Well  <toy>not a call</toy>", {0: ("weather", '{"city": "Oslo"}')})
    assert parts(ToyParser(TOOLS), *text) == found


DOCUMENT = Path(__file__).parents[2] / "docs" / "tools.md"


def rows(head: str) -> dict[str, list[str]]:
    """Return the cells of the document's table below ``head``, by each of the names in their first one."""
    table = DOCUMENT.read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table]
    return {name: row for row in cells for name in re.findall("`(.*?)`", row[0])}


def test_the_document_shows_a_call_for_each_parser() -> None:
    shown = rows("## Parsers\n\n")
    assert shown.keys() == TOOL_PARSERS.keys()
    tool = Tool("f", {"properties": {"a": {"type": "integer"}}})
    for name, (_, models, form) in shown.items():
        assert models
        if same := re.fullmatch("as with `(.*)`", form):
            assert TOOL_PARSERS[name] is TOOL_PARSERS[same[1]]
            continue
        text = re.findall(r"(?<!`)`((?:[^`]|```)+)`(?!`)", form)[0].replace("↵", "\n")
        content, calls = parts(TOOL_PARSERS[name]([tool]), text)
        assert (content, [(called, read(said)) for called, said in calls.values()]) == ("", [("f", {"a": 1})]), name


def test_the_document_shows_the_marks_of_each_way_to_reason() -> None:
    shown = rows("## Reasoning\n\n")
    assert shown.keys() == REASONING_PARSERS.keys()
    for name, (_, marks, begins) in shown.items():
        known = REASONING_PARSERS[name]
        texts = [known.start, known.end, known.label.strip(), *map(str.strip, known.answer), known.channel]
        assert set(re.findall("`(.*?)`", marks)) - {"Here's"} == set(filter(None, texts))
        assert (begins == "within it") == known.open


@pytest.mark.parametrize(("name", "text", "content", "calls"), [(n, *case) for n in CASES for case in CASES[n]])
def test_each_parser_finds_its_calls(name: str, text: str, content: str, calls: list) -> None:
    assert parsed(name, text) == (content, calls)
    assert parsed(name, text, parallel=False) == (content, calls[:1])


@pytest.mark.parametrize("name", {kind: name for name, kind in TOOL_PARSERS.items()}.values())
def test_every_cut_gives_the_same(name: str) -> None:
    for text, _, _ in CASES[name]:
        whole = parts(TOOL_PARSERS[name](TOOLS), text)
        assert parts(TOOL_PARSERS[name](TOOLS), *text) == whole
        for place in range(1, len(text)):
            assert parts(TOOL_PARSERS[name](TOOLS), text[:place], text[place:]) == whole


FRAGMENTS = [
    *"<>[](){}:;,='\"\\ \n", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "x"}}', '"name"', "f",
    "<function=weather>", "<parameter=days>", "3", "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", '{"a": 1}',
    "<|python_tag|>", "[f(a=1), ", "<think>", "</think>", "é", '"arguments": {', '{"name": "f", ', "text",
    *{mark for kind in TOOL_PARSERS.values() for mark in kind.MARKS}, "functools", "```json", "functions.f:0",
    "call:f{", '<invoke name="f">', '<steptml:invoke name="f">', '<steptml:parameter name="a">', "</steptml:parameter>",
    "to=functions.f", "assistant", "final", "analysis",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.sampled_from([case[0] for cases in CASES.values() for case in cases]),
)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def parsers():
    yield from (lambda kind=kind: kind(TOOLS) for kind in dict.fromkeys(TOOL_PARSERS.values()))
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
    """Control: a parser that holds nothing back misses a marker that is cut."""

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


def test_an_escape_may_be_cut_anywhere() -> None:
    text = r'{"\u001f": "\u0007\n\\"}'
    for place in range(len(text) + 1):
        read = JsonObject()
        assert read.text(text[:place]) + read.text(text[place:]) + read.rest() == text


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(
        st.sampled_from([*'{}[]:,"\\ \n-1.e\x0b\u2028', '"a"', '"b":', "true", "None", "x", r"\u00", "é"]),
        max_size=20,
    )
)
@example(["\u2028", "}"])
@example(['"b":', "\xa0", "1"])
def test_completed_arguments_are_valid_json(tokens: list[str]) -> None:
    read(whole_object("{" + "".join(tokens)))


def test_calls_that_never_end_take_time_in_proportion() -> None:
    times = []
    for count in (100, 800):
        begun = time.process_time()
        found = parts(TOOL_PARSERS["pythonic"](TOOLS), "<function_calls>f(" * count + "[]</function_calls>")
        times.append(time.process_time() - begun)
        assert found == ("<function_calls>f(" * count + "[]</function_calls>", {})
    assert times[1] < 24 * times[0]  # 64 times if each one is read to the end


def test_an_object_in_an_object_in_an_object() -> None:
    deep = '{"a":' * 5000
    assert read(whole_object(deep + "1" + "}" * 5000))
