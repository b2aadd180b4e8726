"""Structured outputs before compilation: parameters, settings, files of grammars, rules from a schema."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest

from preheat.configs.structured import preloads_of, read_preloads, structured_config, with_config
from preheat.core import Level, Request, SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest, SettingsError
from preheat.grammar.derive import fits
from preheat.grammar.guidance_source import grammar_source
from preheat.grammar.json_rules import ROOT
from preheat.grammar.json_source import json_rules
from preheat.grammar.nodes import NOTHING, Alt, Node, Quoted, Ref, Repeat, Rules, Seq, Token, alt, repeat, seq
from preheat.grammar.quote import quoted
from preheat.plan.build_items import GrammarItem
from preheat.schedule.sequence import Sequence
from preheat.schedule.slots import Slots
from preheat.settings import Settings

NAMES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "it has none"),
        ({"json_object": False}, "it has none"),
        ({"regex": "a", "json": {}}, "it has json and regex"),
        ({"choice": ["a", ""]}, "empty text"),
        ({"regex": "a", "whitespace_pattern": " "}, "no meaning for structured_outputs.regex"),
        ({"json_object": True, "disable_additional_properties": True}, "no meaning for structured_outputs.json_object"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "give one of them"),
        ({"json": {}, "start_token_id": 5}, "give after_token_id too"),
        ({"json": {}, "call_token_ids": (5,)}, "give after_token_id too"),
    ],
)
def test_meaningless_structured_outputs_are_refused(values, why):
    with pytest.raises(ValueError, match=why):
        StructuredOutputsParams(**values)


def test_structured_outputs_travel_with_their_kind():
    for name, value in zip(NAMES, ({"a": [1]}, "a", ["b"], "c", True, {"d": {}}), strict=True):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**{name: value}), temperature=0)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        assert again == params and again.structured_outputs.kind == name
        assert Level.of(params) is Level.FULL
    assert Level.of(SamplingParams(temperature=0)) is Level.GREEDY


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"backend": "outlines"}, "outlines is not implemented"),
        ({"backend": "llama"}, "'llama' is not one of auto, guidance, xgrammar, none"),
        ({"backend": 3}, "Expected `str`"),
        ({"disable_any_whitespace": True, "whitespace_pattern": " "}, "leaves no use for whitespace_pattern"),
        ({"reasoning_parser": "x"}, "unknown field `reasoning_parser`"),
    ],
)
def test_the_setting_is_checked(value, why):
    with pytest.raises(SettingsError, match=why) as error:
        Settings(structured_outputs_config=value)
    assert error.value.param == "structured_outputs_config"


def test_the_servers_wishes_are_added():
    config = structured_config({"disable_any_whitespace": True, "disable_additional_properties": True})
    json_params = StructuredOutputsParams(json={}, whitespace_pattern=" ")
    assert with_config(json_params, config) == StructuredOutputsParams(
        json={}, disable_any_whitespace=True, disable_additional_properties=True
    )
    free = structured_config({"whitespace_pattern": "[ \\n]*"})
    assert with_config(StructuredOutputsParams(json={}), free).whitespace_pattern == "[ \\n]*"
    assert with_config(json_params, free) == json_params
    compact = StructuredOutputsParams(json={}, disable_any_whitespace=True)
    assert with_config(compact, free) == compact
    regex = StructuredOutputsParams(regex="a")
    assert with_config(regex, free) == regex
    assert with_config(regex, config) == regex and with_config(json_params, structured_config(None)) == json_params


def test_preloads(tmp_path):
    path = tmp_path / "grammars.jsonl"
    path.write_text('{"name": "home", "json": {"type": "object"}}\n\n{"choice": ["yes", "no"]}\n')
    settings = Settings(preload_grammars=str(path))
    found = preloads_of(settings)
    assert list(found) == ["json_object", "home", "line 3"]
    assert found["line 3"] == StructuredOutputsParams(choice=["yes", "no"])
    assert GrammarItem("home").name == "(grammar, home)"
    assert not preloads_of(Settings(preload_grammars=str(path), structured_outputs_config={"backend": "none"}))
    assert not preloads_of(Settings(skip_tokenizer_init=True))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"choice": ["a"]}\n{"regex"}', "line 2"),
        ('{"name": "a"}', "line 1: .*it has none"),
        ('{"name": "a", "regex": "x"}\n{"name": "a", "regex": "y"}', "line 2: there are two grammars named a"),
        ('{"name": "json_object", "regex": "x"}', "two grammars named json_object"),
        ('{"regex": "x", "more": 1}', "unknown field `more`"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(tmp_path, text, why):
    path = tmp_path / "grammars.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=why) as error:
        read_preloads(str(path))
    assert error.value.param == "preload_grammars"
    with pytest.raises(SettingsError, match="cannot read"):
        read_preloads(str(tmp_path / "none"))


def names_of(**asked: object) -> set[str]:
    """Return the names that may come first in an object of the schema."""
    rules = json_rules(StructuredOutputsParams(**asked), asked["json"], "json")
    return {name for name in ("a", "b") if _reads(rules, f'{{"{name}":1}}')}


def _reads(rules: Rules, value: str) -> bool:
    """Return whether ``value`` fits the rules, with each rule replaced by its contents."""

    def whole(node: Node, depth: int = 0) -> Node:
        match node:
            case Ref(name):
                return whole(rules[name], depth + 1) if depth < 8 else NOTHING
            case Token(inner):
                return inner
            case Quoted(inner):
                return quoted(inner)
            case Seq(parts):
                return seq(*(whole(part, depth) for part in parts))
            case Alt(parts):
                return alt(*(whole(part, depth) for part in parts))
            case Repeat(inner, least, most):
                return repeat(whole(inner, depth), least, most)
        return node

    return fits(whole(rules[ROOT]), value)


def test_white_space_is_bounded_unless_asked_otherwise():
    const = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    forms = {
        '{"a":1}': (True, True, True), '{"a": 1}': (True, True, False), '{ "a": 1 }': (True, True, False),
        '{\n  "a": 1\n}': (True, True, False), '{"a" : 1}': (False, True, False), '{"a":  1}': (False, True, False),
    }  # fmt: skip
    options = ({}, {"whitespace_pattern": "[ \n]*"}, {"disable_any_whitespace": True})
    found = [json_rules(StructuredOutputsParams(json=const, **each), const, "json") for each in options]
    for value, right in forms.items():
        assert tuple(_reads(rules, value) for rules in found) == right, value


def test_objects_are_closed_on_request():
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    assert names_of(json=schema) == {"a", "b"}
    assert names_of(json=schema, disable_additional_properties=True) == {"a"}
    own = schema | {"additionalProperties": {"const": 1}}
    assert names_of(json=own, disable_additional_properties=True) == {"a", "b"}


TAG = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}
ANY = {"type": "any_text"}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"json": "["}, "structured_outputs.json: it is not valid JSON"),
        ({"json": "[1]"}, "structured_outputs.json: it must be a JSON object"),
        ({"json": {"items": [{"x-guidance": {}}]}}, r"x-guidance at \$\.items\[0\]"),
        ({"choice": ["a"] * 10_001}, "it has 10,001 texts"),
        ({"choice": []}, "it has no texts"),
        ({"choice": ["a" * 140_000]}, "it has 140,000 characters, at most 131,072"),
        ({"json": {"enum": ["b" * 70_000, "c" * 70_000]}}, "at most 131,072"),
        ({"json": {"properties": {"a": {"type": []}}}}, r"type must be one of .* \(at \$\.properties\.a\.type\)"),
        ({"json": {"$defs": {"a": {"minLength": -1}}}}, r"minLength must be .* \(at \$\.\$defs\.a\.minLength\)"),
        (
            {"json": {"items": {"maxlength": 3}}},
            r"maxlength is not a keyword .* maxLength is \(at \$\.items\.maxlength\)",
        ),
        ({"json": {"type": "string", "pattern": "a(b"}}, r"unclosed group at position 1 .*\(at \$\.pattern\)"),
        ({"json": '{"const": Infinity}'}, "Infinity is not a number"),
        ({"json": '{"const": 1e%s}' % ("9" * 30)}, "not valid JSON: Number out of range"),
        ({"json": '{"const": 1e9999999}'}, "1e9999999 has an exponent beyond 4,096"),
        ({"json": {"maxItems": Decimal("-1E+9999999")}}, r"-1E\+9999999 has an exponent beyond 4,096"),
        ({"json": "[%s]" % ("1," * 300_000)}, "structured_outputs.json: the JSON has more than 262,144 values"),
        ({"grammar": " "}, "structured_outputs.grammar: it is empty"),
        ({"structural_tag": {"tags": []}}, "tags is not supported"),
        ({"structural_tag": {"format": {}}}, "format must be an object with a type"),
        ({"structural_tag": {"format": {"type": "dispatch"}}}, "type dispatch is not supported"),
        ({"structural_tag": {"format": {"type": "or", "elements": []}}}, "at least one format"),
        ({"structural_tag": {"format": {"type": "regex"}}}, "format: pattern of regex is missing"),
        ({"structural_tag": {"format": ANY | {"max_tokens": 3}}}, "max_tokens of any_text is not supported"),
        ({"structural_tag": {"format": ANY | {"excludes": ["x"]}}}, "excludes of format any_text needs backend xgram"),
        ({"structural_tag": {"format": {"type": "star", "content": ANY}}}, "any_text .* in the middle of a text"),
        ({"structural_tag": {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}}, "only json"),
        ({"structural_tag": {"format": ANY, "triggers": ["<"]}}, "triggers and format both"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "at least one"),
        ({"structural_tag": {"structures": [TAG], "triggers": [""]}}, "none of them empty"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["["]}}, "begins with none of the triggers"),
        ({"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<"]}}, r"structures\[0\] must be an object"),
        ({"structural_tag": {"structures": [TAG | {"end": 1}], "triggers": ["<"]}}, "must be a text"),
    ],
)
def test_a_part_that_is_wrong_is_named(asked, why):
    with pytest.raises(InvalidRequest, match=why):
        grammar_source(StructuredOutputsParams(**asked))


class Counting:
    """A state that counts tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept(self, token: int) -> str:
        self.tokens.append(token)
        return ""


def test_the_state_goes_where_the_sequence_goes():
    """A state follows its sequence into a slot, out of it, and through a preemption.

    min_tokens does not depend on it.
    """
    from preheat.schedule.blocks import BlockPool
    from preheat.schedule.running import RunningSequences

    slots, pool, state = Slots(2, 32, 16), BlockPool(8, 16), Counting()
    running = RunningSequences(slots, pool)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), min_tokens=5)
    slot = running.start(Sequence(Request(1, [1, 2], params, 0, 9, stop_ids=[3]), state))
    assert slots.grammars == {slot: state} and slots.has_grammar[slot]
    assert slots.min_len[slot] == 2
    running.grow(slot, 2)
    _, sequence = running.preempt_last()
    assert not slots.grammars and sequence.grammar is state
    running.stop([running.start(sequence)])
    assert not slots.grammars
