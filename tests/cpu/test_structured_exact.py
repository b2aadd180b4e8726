"""Both libraries allow, byte by byte, exactly the requested texts in every notation, or refuse the request."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from preheat.configs.structured import StructuredOutputsConfig
from preheat.core import Request, SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest
from preheat.grammar.guidance import Guidance
from preheat.grammar.service import Grammars
from preheat.grammar.state import Grammar, Library
from preheat.grammar.xgrammar import XGrammar
from tests.tokenizers import byte_level

pytestmark = pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is not installed")

END = 1


@pytest.fixture(scope="module", params=[Guidance, XGrammar], ids=["guidance", "xgrammar"])
def backend(request) -> Library:
    tokenizer = byte_level()
    found: Library = request.param(tokenizer.to_str(), tokenizer.get_vocab_size(), 1)
    return found


@pytest.fixture(scope="module")
def bytes_of(backend) -> dict[int, int]:
    """Return the token of each byte."""
    texts = {token: backend.text([token]) for token in range(backend.vocab_size) if not backend.is_special(token)}
    return {text[0]: token for token, text in texts.items() if len(text) == 1}


def takes(backend: Library, bytes_of: dict[int, int], grammar: Grammar, text: str) -> bool:
    """Return whether the masks allow ``text`` to its last byte, and the end there."""
    return allows(backend, grammar, [bytes_of[each] for each in text.encode()])


def allows(backend: Library, grammar: Grammar, tokens: list[int]) -> bool:
    """Return whether the masks allow ``tokens``, and the end behind them."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"))
    state = grammar.state(Request(1, [0], params, 0, 9, stop_ids=[END]))
    mask = np.zeros((1, backend.words), np.int32)
    for token in [*tokens, END]:
        backend.fill(mask, [(state, 0, ())])
        assert not state.error
        if not mask[0, token // 32] >> token % 32 & 1:
            return False
        if token != END:
            assert not state.accept(token)
    return True


ASTRAL = "\U0001f336\U0010ffff"
LITERALS: dict[str, tuple[dict[str, Any], str]] = {
    "const": ({"json": {"const": ASTRAL}}, f'"{ASTRAL}"'),
    "enum": ({"json": {"enum": [1, [ASTRAL]]}}, f'["{ASTRAL}"]'),
    "key": ({"json": {"properties": {ASTRAL: {}}, "required": [ASTRAL], "type": "object"}}, f'{{"{ASTRAL}":1}}'),
    "pattern": ({"json": {"type": "string", "pattern": f"^{ASTRAL}$"}}, f'"{ASTRAL}"'),
    "choice": ({"choice": [ASTRAL, "b"]}, ASTRAL),
    "regex": ({"regex": f"{ASTRAL}+"}, ASTRAL),
    "grammar": ({"grammar": f'root ::= "{ASTRAL}"'}, ASTRAL),
    "escaped": ({"grammar": r'root ::= "\ud83c\udf36" "\U0010FFFF"'}, ASTRAL),
    "class of escapes": ({"grammar": r'root ::= [\u00e9\ud83c\udf36] "\U0010ffff"'}, ASTRAL),
    "escapes in Lark": ({"grammar": r'start: "\ud83c\udf36" /\udbff\udfff/'}, ASTRAL),
    "tag": (
        {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": ASTRAL}}},
        ASTRAL,
    ),
}


@pytest.mark.parametrize("name", LITERALS)
def test_a_literal_may_have_characters_beyond_the_first_plane(backend, name):
    """UTF-8 has four bytes for such a character, and two surrogates are no text."""
    asked, text = LITERALS[name]
    grammar = backend.compile(StructuredOutputsParams(**asked))
    assert allows(backend, grammar, byte_level().encode(text, add_special_tokens=False).ids)
    other = text.replace("\U0001f336", "\U0001f337")
    assert not allows(backend, grammar, byte_level().encode(other, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (r'root ::= "\ud83c"', "half a surrogate pair"),
        (r'root ::= "\ud83c" "\udf36"', "half a surrogate pair"),
        (r"start: /[\udf36]/", "half a surrogate pair"),
        ('root ::= a\na ::= "b"\na ::= "c"', "defined m"),
        ('start: "a"\nstart: "b"', "duplicate rule"),
    ],
)
def test_a_grammar_with_half_a_character_or_two_meanings_is_refused(backend, grammar, said):
    with pytest.raises(InvalidRequest, match=said):
        backend.compile(StructuredOutputsParams(grammar=grammar))


def test_an_escaped_backslash_begins_no_escape(backend):
    grammar = backend.compile(StructuredOutputsParams(grammar=r'root ::= "\\ud83c"'))
    assert allows(backend, grammar, byte_level().encode(r"\ud83c", add_special_tokens=False).ids)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const": ({"json": {"const": 2**53 + 1}}, [f"{2**53 + 1}"], [f"{2**53}", f"{2**53 + 2}"]),
    "enum": ({"json": {"enum": [-(10**25) - 7, 4]}}, ["4", f"-{10**25 + 7}"], [f"-{10**25}"]),
    "bounds": (
        {"json": {"type": "integer", "exclusiveMinimum": 2**60, "maximum": 2**60 + 2}},
        [f"{2**60 + 1}", f"{2**60 + 2}"],
        [f"{2**60}", f"{2**60 + 3}"],
    ),
    "decimals": (
        {"json": '{"minimum": 0.30000000000000000001, "maximum": 0.30000000000000000002, "type": "number"}'},
        ["0.30000000000000000001", "0.300000000000000000015", "0.3000000000000000000200"],
        ["0.3", "0.30000000000000000003", "0.300000000000000000021"],
    ),
    "digits": (
        {"json": '{"const": [1.0, 1e400, 0.10000000000000000000001]}'},
        ["[1.0, 1E+400, 0.10000000000000000000001]"],
        ["[1, 1E+400, 0.10000000000000000000001]"],
    ),
    "multiples": (
        {"json": {"type": "integer", "multipleOf": 12, "minimum": -30, "maximum": 130}},
        ["-24", "0", "12", "120"],
        ["-36", "8", "132", "21"],
    ),
    "escapes": (
        {"json": {"type": "string"}},
        [r'"h\u00C9\/\b"', r'"\ud83c\udf36"', '"é😀"', '""'],
        [r'"\ud83c"', r'"\a"', '"\n"'],
    ),
    "lengths": (
        {"json": {"type": "string", "minLength": 2, "maxLength": 3}},
        [r'"\n\u0041"', '"é😀b"', r'"\ud83c\udf36xy"'],
        [r'"\u0041"', '"abcd"', r'"\n\t\r\f"'],
    ),
    "pattern": (
        {"json": {"type": "string", "pattern": r"^[^\s/]{2}\.$"}},
        [r'"ab."', r'"\u0061\"\u002e"'],
        [r'"a\/."', r'"a\n."', '"abc"'],
    ),
    "pattern and length": (
        {"json": {"type": "string", "pattern": "b", "maxLength": 3}},
        ['"b"', '"aba"'],
        ['"a"', '"baaa"'],
    ),
    "format": (
        {"json": {"type": "string", "format": "date"}},
        ['"2000-02-29"', r'"\u0032024-01-31"'],
        ['"1900-02-29"', '"2024-13-01"'],
    ),
    "keys": (
        {"json_object": True},
        [r'{"\u006b\/": {"": [null, -0.5e+3]}}'],
        ['{"a": 01}', "[]", '{"a"}', '{"a": 1,}'],
    ),
    "further keys": (
        {"json": OBJECT},
        ['{"a":1,"b":"a"}', r'{"\u0062": 1}', "{}"],
        ['{"a":"x"}', r'{"\u0061":"x"}', '{"a":1,"a":2}'],
    ),
    "keys by pattern": (
        {
            "json": {
                "type": "object",
                "patternProperties": {"^a": {"type": "null"}, "b$": {"enum": [1, None]}},
                "additionalProperties": {"type": "boolean"},
            }
        },
        ['{"b": 1}', '{"ab": null}', '{"c": true, "\\u0061": null}'],
        ['{"ab": 1}', '{"c": null}'],
    ),
    "all of": (
        {"json": {"allOf": [OBJECT, {"required": ["b"]}], "additionalProperties": {"const": 0}}},
        ['{"a": 0, "b": 0}', '{"b": 0}'],
        ['{"a": 1}', '{"a": 1, "b": 0}', '{"a": 0}'],
    ),
    "any type": ({"json": {"minimum": 7}}, ['"x"', "7", "[1]", "null"], ["6"]),
    "prefix": (
        {"json": {"prefixItems": [{"type": "null"}], "items": {"const": 1}, "type": "array", "maxItems": 2}},
        ["[]", "[null]", "[null,1]"],
        ["[1]", "[null,1,1]", "[null,null]"],
    ),
    "printed": (
        {"json": OBJECT},
        ['{\n    "a": 1\n}', '{"a": 1, "b": [\n\t1,\n\t2\n]}', '{ "a":1 }'],
        ['{"a" :1}', '{\n\n"a":1}', '{"a":  1}', ' {"a":1}'],
    ),
    "free": ({"json": OBJECT, "whitespace_pattern": r"[ \n]*"}, ['{\n\n "a" :\n 1 , "b" : 2}'], ['{"a":\t1}']),
    "dot": ({"regex": "a.b"}, ["axb", "aéb"], ["a\nb", "ab"]),
    "class": ({"regex": r"[^a]\d\D"}, ["\n1x", "é0\n"], ["a1x", "b12"]),
    "anchors": ({"regex": "^(a|b$)$"}, ["a", "b"], ["ab", "a$"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_grammars_allow_exactly_the_texts_asked_for(backend, bytes_of, name):
    asked, fit, unfit = FORMS[name]
    grammar = backend.compile(StructuredOutputsParams(**asked))
    assert [text for text in fit if not takes(backend, bytes_of, grammar, text)] == []
    assert [text for text in unfit if takes(backend, bytes_of, grammar, text)] == []


@pytest.mark.parametrize(
    "pattern", [r"\s", r"\S", r"\w", r"\W", r"\d", r"\D", ".", "[^a]", r"[^\w]", r"[\s\d]", r"[^\n]"]
)
def test_character_classes_match_as_in_python(backend, bytes_of, pattern):
    grammar = backend.compile(StructuredOutputsParams(regex=pattern))
    texts = ["a", "Z", "_", "0", "\u0663", " ", "\t", "\n", "\r", "\v", "\u00a0", "\u2028", "é", "-", "😀", "文"]
    assert [takes(backend, bytes_of, grammar, text) for text in texts] == [
        bool(re.fullmatch(pattern, text)) for text in texts
    ]


LOOP = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
ENDLESS: dict[str, dict[str, Any]] = {
    "ref": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "any of itself": {"json": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "an object in itself": {"json": LOOP},
    "an array in itself": {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    "all of": {
        "json": {
            "type": "object",
            "properties": {"b": {"const": 1}},
            "allOf": [{"required": ["b"], "properties": {"b": {"const": 2}}}],
        }
    },
    "counts": {"json": {"type": "array", "minItems": 3, "maxItems": 2}},
    "lengths": {"json": {"type": "string", "minLength": 2, "maxLength": 1}},
    "pattern and length": {"json": {"type": "string", "pattern": "^abc$", "maxLength": 2}},
    "class": {"json": {"type": "string", "pattern": r"[^\s\S]"}},
    "bounds": {"json": {"type": "number", "exclusiveMinimum": 1, "maximum": 1}},
    "multiples": {"json": {"type": "integer", "multipleOf": 9, "minimum": 1, "maximum": 8}},
    "types": {"json": {"type": "string", "allOf": [{"type": "null"}]}},
    "const": {"json": {"const": 3, "type": "string"}},
    "false": {"json": {"type": "array", "prefixItems": [False], "minItems": 1}},
    "no names": {"json": {"type": "object", "additionalProperties": False, "minProperties": 1}},
    "enum": {"json": {"enum": []}},
    "type": {"json": {"type": []}},
    "not": {"json": {"not": {}}},
    "any of": {"json": {"anyOf": []}},
    "one of": {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
    "choice": {"choice": []},
    "long choice": {"choice": ["x" * 200_000]},
    "regex": {"regex": r"ab[^\d\D]"},
    "counted": {"regex": "(((?:ab?){1,500}){1,500}){2,500}"},
    "ebnf": {"grammar": 'root ::= "a" next\nnext ::= "b" root'},
    "ebnf branch": {"grammar": 'root ::= "a" | b\nb ::= "b" b'},
    "ebnf counts": {"grammar": 'root ::= (x{1,200}){1,200}\nx ::= "a" | "b"'},
    "lark": {"grammar": 'start: "a" start'},
    "lark branch": {"grammar": 'start: "x" | y*\ny: "y" y'},
    "tag": {
        "structural_tag": {
            "format": {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": LOOP}, "end": ">"}
        }
    },
    "half a character": {"json": '{"const": "\\ud83c"}'},
    "huge": {"json": '{"type": "integer", "minimum": 1e999999}'},
    "white space": {"json": {}, "whitespace_pattern": "[^\\s\\S]"},
    "items": {"json": {"type": "array", "minItems": 10**9}},
    "characters": {"json": {"type": "string", "minLength": 2**33}},
    "names that may be equal": {"json": {"additionalProperties": {"const": 1}, "type": "object", "minProperties": 2}},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_grammars_without_a_finite_text_are_refused(backend, name):
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.\w+: ") as error:
        backend.compile(StructuredOutputsParams(**ENDLESS[name]))
    assert error.value.status == 400


@pytest.mark.parametrize(("key", "text"), [("maxItems", "[1]"), ("maxLength", '"1"'), ("maxProperties", '{"1":1}')])
def test_a_number_of_parts_beyond_every_text_bounds_nothing(backend, bytes_of, key, text):
    kind = {"maxItems": "array", "maxLength": "string"}.get(key, "object")
    grammar = backend.compile(StructuredOutputsParams(json={"type": kind, key: 2**33}))
    assert takes(backend, bytes_of, grammar, text)


def test_of_properties_without_a_name_one_counts_as_another(backend, bytes_of):
    """Two of them may have one name, so a text with both may have fewer properties than it shows."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}}
    grammar = backend.compile(StructuredOutputsParams(json=schema | {"minProperties": 2, "maxProperties": 3}))
    fits = ['{"a":1, "b":2}', '{"a":1, "b":2, "b":2}', '{"b":2, "b":2}', '{"a":1}', '{"a":1, "b":2, "b":2, "b":2}']
    assert [takes(backend, bytes_of, grammar, text) for text in fits] == [True, True, False, False, False]


def test_a_way_that_does_not_end_is_not_taken(backend, bytes_of):
    """A way without an end is not taken, and the rest of the schema is served."""
    schema = {
        "anyOf": [
            LOOP | {"properties": {"x": {"$ref": "#/anyOf/0"}}},
            {"type": "object", "properties": {"y": False, "z": {"const": 1}}, "additionalProperties": False},
        ]
    }
    grammar = backend.compile(StructuredOutputsParams(json=schema))
    fits = [takes(backend, bytes_of, grammar, text) for text in ('{"z":1}', "{}", '{"y":1}', '{"x":{}}')]
    assert fits == [True, True, False, False]


def test_a_grammar_that_fails_on_its_way_is_refused_before_it_is_used(backend):
    """Each grammar is tried when it is compiled, so a failing one is refused before its use."""
    grammars = Grammars(backend, {}, StructuredOutputsConfig(), 5.0)
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.regex: "):
        grammars.grammar(StructuredOutputsParams(regex="(a?){1000}a{1000}")).result()
