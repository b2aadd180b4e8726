"""Both libraries of grammars give fitting texts for the same requests."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest
from msgspec.structs import replace

from preheat import LLM, InvalidRequest
from preheat.configs.structured import library_version
from preheat.core import Request
from preheat.errors import SettingsError
from preheat.grammar.service import open_grammars
from preheat.grammar.xgrammar import XGrammar
from preheat.settings import Settings
from tests.cpu.structured import held, problem, problems, random_llm, texts, write_model
from tests.schemas import REFUSED, closed, corpus
from tests.tokenizers import sentencepiece

pytestmark = pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is not installed")


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def llm(request, tmp_path_factory) -> LLM:
    config = {"backend": request.param}
    return random_llm(tmp_path_factory.mktemp("model"), structured_outputs_config=config, dtype="float32")


NUMBER = {"type": "json_schema", "json_schema": closed({"a": {"enum": [1, 2]}})}
HEX = {"type": "regex", "pattern": "[0-9a-f]{2}/"}
TAG = {"type": "tag", "begin": "<n>", "content": NUMBER, "end": "</n>"}
FREE = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "!"]}
JSON = r'\{\s*"a"\s*:\s*[12]\s*\}'


def says(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def tag(**form) -> dict[str, object]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


FORMS = {
    "schema": ({"json": closed({"a": {"enum": [1, 2]}})}, JSON),
    "compact": ({"json": closed({"a": {"const": [1, 2]}, "b": {"const": 1}}), "disable_any_whitespace": True},
                r'\{"a":\[1,2\],"b":1\}'),
    "no others": ({"json": {"type": "object", "properties": {"a": {"const": 1}}},
                   "disable_additional_properties": True}, r'\{\s*("a"\s*:\s*1\s*)?\}'),
    "regex": ({"regex": "[0-9]{3}-(?:ab|cd)"}, "[0-9]{3}-(?:ab|cd)"),
    "choice": ({"choice": ["grün", 'a "b"', "c\nd\\"]}, r'grün|a "b"|c\nd\\'),
    "lark": ({"grammar": 'start: "[" item ("," item)? "]"\nitem: /[ab]{1,3}/'}, r"\[[ab]{1,3}(,[ab]{1,3})?\]"),
    "ebnf": ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c" "d"'}, "ab|acd"),
    "tag: sequence": (tag(type="sequence", elements=[says("x="), NUMBER, HEX]), rf"x={JSON}[0-9a-f]{{2}}/"),
    "tag: or": (tag(type="or", elements=[TAG, says("none")]), rf"<n>{JSON}</n>|none"),
    "tag: any_text": (tag(type="sequence", elements=[says("b"), FREE]), r"b<t>(?s:.*?)(</t>|!)"),
    "tag: separated": (tag(type="tags_with_separator", tags=[TAG], separator=",", at_least_one=True),
                       rf"<n>{JSON}</n>(,<n>{JSON}</n>)*"),
    "tag: triggered": (tag(type="triggered_tags", triggers=["<n"], tags=[TAG], at_least_one=True,
                           stop_after_first=True), rf"<n>{JSON}</n>"),
    "tag: times": (tag(type="sequence", elements=[{"type": "plus", "content": says("ab")},
                                                  {"type": "optional", "content": HEX}]), r"(ab)+([0-9a-f]{2}/)?"),
    "tag: older": ({"structural_tag": {"structures": [{"begin": "<n>", "schema": NUMBER["json_schema"],
                                                        "end": "</n>"}], "triggers": ["<n"]}}, "(?s:.*)"),
}  # fmt: skip


def test_every_form_with_both(llm):
    found = {name: texts(llm, [held(seed=seed, **asked) for seed in range(4)]) for name, (asked, _) in FORMS.items()}
    for name, answers in found.items():
        for text, reason in answers:
            assert re.fullmatch(FORMS[name][1], text) or reason == "length", (name, text)
        assert any(reason == "stop" for _, reason in answers), name
        assert len({text for text, _ in answers}) > 1 or name in ("compact", "tag: older"), name


def test_a_tag_triggered_by_free_text_is_held(llm):
    """A tag that free text triggers is held to its grammar.

    A bias makes the random model begin the tag.
    """
    first = llm.frontend.tokenizer.encode("<n", add_special_tokens=False)
    form = tag(type="triggered_tags", triggers=["<n"], tags=[TAG])
    params = [held(1.0, seed, max_tokens=90, **form) for seed in range(6)]
    params = [replace(each, logit_bias=dict.fromkeys(first, 90.0)) for each in params]
    behind = [(part, text) for text, _ in texts(llm, params) for part in text.split("<n")[1:]]
    whole = [re.match(rf">{JSON}</n>", part) for part, _ in behind]
    assert sum(map(bool, whole)) >= 6
    assert all(fits or text.endswith(part) for fits, (part, text) in zip(whole, behind, strict=True))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> LLM:
    config = {"backend": "xgrammar"}
    return random_llm(tmp_path_factory.mktemp("other"), structured_outputs_config=config, dtype="float32")


def test_xgrammar_keeps_to_schemas(other):
    assert problems(other, corpus()) == {}


MORE = {
    "an optional group": {"type": "string", "pattern": r"^a(\.[0-9]{1,3})?(bc+)?[)?]$"},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "lengths": {"type": "string", "minLength": 1, "maxLength": 5},
    "all of several": {"allOf": [{"type": "string", "pattern": "b"}, {"maxLength": 4}, {"pattern": "^a"}]},
    "two patterns": {"type": "object", "patternProperties": {"^a.?$": {"type": "null"}, "^.?b$": {"const": None}},
                     "additionalProperties": False, "maxProperties": 1},
    "$ref beside": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "maximum": 7}}, "minimum": 1},
    "pattern: quote": {"type": "string", "pattern": '^a["\\n\\\\]{1,3}b$'},
    "several types": {"type": ["string", "integer"], "maxLength": 3, "minimum": 3, "maximum": 5},
    "enum and type": {"type": "integer", "enum": ["a", 1, True, 2.0]},
    "no type": {"minimum": 3, "maximum": 9, "minLength": 3, "maxLength": 3, "maxItems": 0, "maxProperties": 0},
    "required, not named": {"type": "object", "required": ["b"], "additionalProperties": {"const": 1},
                            "maxProperties": 1},
    "one of allOf": {"allOf": [{"type": "boolean"}], "description": "D"},
    "recursion": closed({"n": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
}  # fmt: skip


def test_rewritten_schemas_hold_too(other):
    for seed in range(20):
        assert problems(other, MORE, seed=seed * len(MORE)) == {}


PART = r"^structured_outputs\.json: "
ALSO = {
    "pattern: anchor": {"type": "string", "pattern": "a^b"},
    "number: multipleOf": {"type": "number", "multipleOf": 0.5},
    "a loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "lengths": {"type": "string", "minLength": 5000},
}


@pytest.mark.parametrize("name", [*REFUSED, *ALSO])
def test_xgrammar_refuses_unsupported_keywords_by_name(other, name):
    with pytest.raises(InvalidRequest, match=PART) as error:
        texts(other, [held(json=(REFUSED | ALSO)[name])])
    assert error.value.status == 400


def test_the_keyword_is_said_with_its_place(other):
    inner = closed({"a": {"type": "array", "items": {"type": "string", "not": {"const": "x"}}}})
    with pytest.raises(InvalidRequest, match=r'"not" is not supported \(at \$\.properties\.a\.items\.not\)'):
        texts(other, [held(json=inner)])
    for asked, why in (
        ({"json": {}, "whitespace_pattern": "x"}, r"whitespace_pattern: it must match only spaces"),
        ({"regex": "a$b"}, r"regex: .*an anchor .* at position 1"),
        ({"regex": "(?=a)b"}, r"regex: .*look-around.* at position 0"),
        ({"grammar": "???"}, r"structured_outputs\.grammar: it cannot be compiled"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            texts(other, [held(**asked)])


def test_validation_would_notice_an_ignored_keyword(other, monkeypatch):
    """Control: a keyword that the library ignores is not kept to."""
    monkeypatch.setattr("preheat.grammar.document.UNSUPPORTED", frozenset())
    schema = {"type": "array", "items": {"const": 2}, "contains": {"const": 1}, "minItems": 1, "maxItems": 2}
    ((text, reason),) = texts(other, [held(json=schema)])
    assert reason == "stop" and problem(schema, text, reason)


def test_masks_behind_drafts(llm):
    """A row of drafts has a mask for each position behind an accepted draft.

    The state stays.
    """
    backend = llm.loop.grammars.backend
    grammar = backend.compile(held(regex="ab[cd]{1,3}e").structured_outputs)
    request = Request(1, [0], held(regex="x"), 0, 9, stop_ids=[1])
    tokens = [llm.frontend.tokenizer.encode(text, add_special_tokens=False)[0] for text in "abce"]
    right, state = [], grammar.state(request)
    for token in [*tokens, None]:
        mask = np.zeros((1, backend.words), np.int32)
        backend.fill(mask, [(state, 0, ())])
        right.append(mask[0].tolist())
        assert token is None or not state.accept(token)
    state, masks = grammar.state(request), np.zeros((8, backend.words), np.int32)
    backend.fill(masks, [(state, 1, tokens)])
    assert masks[1 : 2 + len(tokens)].tolist() == right and not masks[0].any() and not masks[2 + len(tokens) :].any()
    masks = np.zeros((4, backend.words), np.int32)
    backend.fill(masks, [(state, 0, [tokens[0], tokens[0], tokens[1]])])
    assert masks[1].tolist() == right[1] and not state.accept(tokens[0])


def test_special_tokens_are_no_text(other):
    """Special tokens are no text, even where any text may be: their names are no characters."""
    backend, special = other.loop.grammars.backend, [0, 1, 2]
    state = backend.compile(held(**tag(type="any_text")).structured_outputs).state(
        Request(1, [0], held(regex="x"), 0, 9, stop_ids=[1])
    )
    mask = np.zeros((1, backend.words), np.int32)
    backend.fill(mask, [(state, 0, ())])
    assert [token for token in special if mask[0, 0] >> token & 1] == [1]
    assert all(backend.is_special(token) for token in special)


def test_one_that_is_not_installed_is_said_at_boot(tmp_path, monkeypatch):
    monkeypatch.setattr("preheat.configs.structured.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'preheat\[xgrammar\]'"):
        random_llm(tmp_path, structured_outputs_config={"backend": "xgrammar"})


def test_the_library_is_chosen_at_boot_and_named_in_the_key(tmp_path):
    one, two = (Settings(structured_outputs_config={"backend": name}) for name in ("auto", "xgrammar"))
    assert library_version(one).startswith("llguidance 1.") and library_version(two).startswith("xgrammar 0.")
    write_model(tmp_path)
    assert isinstance(open_grammars(two, lambda _: tmp_path, 330).backend, XGrammar)
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(text) | {"added_tokens": []}))
    assert "cannot be used for grammars" in open_grammars(two, lambda _: tmp_path, 320)
