"""Structured outputs through the engine: texts fit their grammars, and no other row notices."""

from __future__ import annotations

import json
import re
import threading
import time

import numpy as np
import pytest
from msgspec.structs import replace

from preheat import InvalidRequest, PreheatError, SamplingParams
from preheat.configs.structured import StructuredOutputsConfig
from preheat.core import Request
from preheat.grammar import service
from preheat.grammar.guidance import Guidance
from preheat.grammar.json_source import INDENT
from preheat.grammar.service import Grammars, open_grammars
from preheat.grammar.state import State
from preheat.schedule.sequence import Sequence
from preheat.settings import Settings
from tests.cpu.structured import held, problem, problems, random_llm, texts, write_model
from tests.schemas import REFUSED, SERVED, closed, corpus
from tests.tokenizers import sentencepiece


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return random_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture
def grammars(llm) -> Grammars:
    assert isinstance(llm.loop.grammars, Grammars)
    return llm.loop.grammars


def test_answers_fit_their_schemas(llm):
    """Answers at temperature 1.5 fit their schemas: all 200, of each keyword and drawn.

    `python -m tools.schema_corpus 50` takes more answers.
    """
    assert len(corpus()) == 200
    assert problems(llm, corpus()) == {}


def test_the_validation_can_fail():
    assert problem({"type": "integer"}, '"x"', "stop") and problem({}, "{", "stop") and problem({}, "{}", "length")
    assert problem({"type": "string", "format": "date"}, '"2026-99-01"', "stop")
    assert not problem({"type": "integer"}, "1", "stop")


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_keywords_are_refused_by_name(llm, name):
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.json: ") as error:
        texts(llm, [held(json=REFUSED[name])])
    assert error.value.param == "structured_outputs.json" and error.value.status == 400


def test_the_keyword_is_said_with_its_place(llm):
    inner = closed({"a": {"type": "array", "items": {"type": "string", "not": {"const": "x"}}}})
    with pytest.raises(InvalidRequest, match=r'"not".*at \$\.properties\.a\.items\.not'):
        texts(llm, [held(json=inner)])


OPEN = {"type": "object", "properties": {"a": {"const": 1}}}
FORMS = {
    "regex": ({"regex": "[0-9]{3}-[a-f]{2,4}"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]{2,4}", text)),
    "choice": ({"choice": ["grün", "a \"b\"", "c\nd"]}, lambda text: text in ("grün", 'a "b"', "c\nd")),
    "lark": ({"grammar": 'start: "[" item ("," item)? "]"\nitem: /[ab]{1,3}/'},
             lambda text: re.fullmatch(r"\[[ab]{1,3}(,[ab]{1,3})?\]", text)),
    "ebnf": ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c" "d"'}, lambda text: text in ("ab", "acd")),
    "text of a schema": ({"json": json.dumps(closed({"a": {"enum": [1, 2]}}))},
                         lambda text: json.loads(text) in ({"a": 1}, {"a": 2})),
    "compact": ({"json": closed({"a": {"const": 1}, "b": {"const": [1, 2]}}), "disable_any_whitespace": True},
                lambda text: text == '{"a":1,"b":[1,2]}'),
    "white space": ({"json": closed({"a": {"const": 1}}), "whitespace_pattern": " ?"},
                    lambda text: re.fullmatch(r' ?\{ ?"a" ?: ?1 ?\} ?', text)),
    "no others": ({"json": OPEN, "disable_additional_properties": True},
                  lambda text: json.loads(text) in ({}, {"a": 1})),
}  # fmt: skip


def test_every_form(llm):
    params = [held(**asked) for asked, _ in FORMS.values()]
    for (name, (_, fits)), (text, reason) in zip(FORMS.items(), texts(llm, params), strict=True):
        assert fits(text) and reason == "stop", (name, text, reason)


def test_structural_tags(llm):
    """Structural tags hold JSON behind each begin, with free text around it.

    A bias makes the model write tags.
    """
    tag = {"begin": "<f=", "schema": closed({"a": {"enum": [1, 2]}}), "end": ">"}
    asked = {"structural_tag": {"structures": [tag], "triggers": ["<f"]}}
    tokenizer = llm.frontend.tokenizer
    bias = dict.fromkeys(tokenizer.encode("<f", add_special_tokens=False), 90.0)
    params = [replace(held(1.0, seed, max_tokens=60, **asked), logit_bias=bias) for seed in range(8)]
    found = [text for text, _ in texts(llm, params)]
    behind = [part for text in found for part in text.split("<f")[1:]]
    assert len(behind) >= 8
    whole = r'=\s*\{\s*"a"\s*:\s*[12]\s*\}\s*>'
    assert all(re.match(whole, part) or text.endswith(part) for text in found for part in text.split("<f")[1:])
    assert any(re.match(whole, part) for part in behind)


def test_white_space_is_bounded(llm):
    """A model that prefers white space writes no more of it than allowed."""
    tokenizer = llm.frontend.tokenizer
    spaces = [t for t in range(tokenizer.vocab_size) if tokenizer.token_text(t) and not tokenizer.token_text(t).strip()]
    params = SamplingParams(
        temperature=0, max_tokens=300, logit_bias=dict.fromkeys(spaces[:1000], 100.0),
        structured_outputs=held(json=closed({"a": {"const": 1}})).structured_outputs,
    )  # fmt: skip
    ((text, reason),) = texts(llm, [params])
    assert reason == "stop" and max(map(len, re.findall(r"\s+", text))) == 1 + INDENT


def test_ends(llm):
    """Where the text may end, any stop id may come, but not before min_tokens.

    With ignore_eos, a text that can go on does not end; a text that cannot go on always ends.
    """
    count = {"temperature": 0, "max_tokens": 40}
    long = held(regex="[ab]{1,30}").structured_outputs
    short = held(choice=["a"]).structured_outputs
    like = {"logit_bias": {1: 100.0}}  # the end-of-sequence token
    asked = {
        "at once": SamplingParams(structured_outputs=long, **like, **count),
        "min_tokens": SamplingParams(structured_outputs=long, min_tokens=5, **like, **count),
        "ignore_eos": SamplingParams(structured_outputs=long, ignore_eos=True, **like, **count),
        "over": SamplingParams(structured_outputs=short, min_tokens=9, ignore_eos=True, **count),
    }
    found = dict(zip(asked, llm.generate(["x"] * 4, list(asked.values()), use_tqdm=False), strict=True))
    outputs = {name: each.outputs[0] for name, each in found.items()}
    assert {output.finish_reason for output in outputs.values()} == {"stop"}
    assert len(outputs["at once"].token_ids) == 2
    assert len(outputs["min_tokens"].token_ids) == 6
    assert len(outputs["ignore_eos"].text) == 30
    assert outputs["over"].text == "a" and len(outputs["over"].token_ids) == 2


PLAIN = [SamplingParams(temperature=1.0, seed=n, max_tokens=12 + n, ignore_eos=True) for n in range(4)]
MASKED = [held(seed=n, json=SERVED[name]) for n, name in enumerate(("nested", "enum", "allOf", "minLength"))]
MIXED = [one for pair in zip(PLAIN, MASKED, strict=True) for one in pair]
"""Rows with and without grammars that end at different times."""


def answers(llm, params: list[SamplingParams], first: int = 0) -> list[list[int]]:
    """Return token ids; the prompts differ from ``first`` on."""
    prompts = [f"x{n}" for n in range(first, first + len(params))]
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]


def test_the_same_tokens_alone_and_among_others(llm):
    assert answers(llm, MIXED) == [answers(llm, [each], first=n)[0] for n, each in enumerate(MIXED)]


def test_a_mask_in_the_wrong_row_is_noticed(llm, monkeypatch):
    """Control: a step's masks in the order of other rows give other answers."""
    right = Guidance.fill

    def turned(self, masks, rows):
        right(self, masks, rows)
        places = [place for _, place, _ in rows]
        masks[places] = masks[places[::-1]].copy()

    monkeypatch.setattr(Guidance, "fill", turned)
    with pytest.raises(PreheatError, match="does not allow token"):
        answers(llm, MIXED)


def test_a_token_that_the_grammar_refuses_ends_its_request_alone(llm, monkeypatch):
    """A request fails alone if its grammar refuses a token, here the third.

    The others keep their texts.
    """
    params = [held(seed=n, regex="[ab]{4,9}") for n in range(3)]
    usual = texts(llm, params)
    right = State.accept
    wrong: list[State] = []

    def accept(self, token):
        if not wrong:
            wrong.append(self)
        if self is wrong[0] and self._accepted == 2:
            self.error = "no"
        return right(self, token)

    monkeypatch.setattr(State, "accept", accept)
    states = [llm.frontend.prepare("x", each) for each in params]
    llm.frontend.start(states)
    while llm.frontend.busy:
        llm.advance()
    errors = [state.error and type(state.error).__name__ for state in states]
    assert errors == ["GrammarFailed", None, None]
    assert [state.output().outputs[0].text for state in states[1:]] == [text for text, _ in usual[1:]]
    llm.loop.scheduler.check()


def test_a_lost_state_ends_the_request(llm, monkeypatch):
    """A request without its state ends.

    It never goes on without its grammar.
    """
    right = Sequence.__init__
    monkeypatch.setattr(Sequence, "__init__", lambda self, request, grammar=None, adapter=None: right(self, request))
    with pytest.raises(PreheatError, match="the state of its grammar was lost"):
        texts(llm, [held(regex="[ab]{4,9}")])


def test_a_slow_grammar_delays_nobody_and_is_refused_in_time(llm, grammars, monkeypatch):
    right, patient = grammars.backend.compile, threading.Event()

    def slow(params):
        patient.wait(60)
        return right(params)

    monkeypatch.setattr(grammars.backend, "compile", slow)
    frontend = llm.frontend
    waiting = frontend.prepare("x", held(regex="slow [ab]"))
    cancelled = frontend.prepare("x", held(regex="slower [ab]"))
    plain = frontend.prepare("x", SamplingParams(max_tokens=1))
    frontend.start([waiting, cancelled, plain])
    while not plain.finished:
        llm.advance()
    assert not waiting.finished and grammars.pending
    frontend.abort(cancelled)
    monkeypatch.setattr(grammars, "_seconds", 0.1)
    while frontend.busy:
        llm.advance()
    patient.set()
    assert isinstance(waiting.error, InvalidRequest) and "took more than 0.1 s" in waiting.error.message
    assert not grammars.pending and llm.loop.idle


def test_grammars_are_compiled_once(llm, grammars, monkeypatch):
    right, compiled = grammars.backend.compile, []
    monkeypatch.setattr(grammars.backend, "compile", lambda params: compiled.append(params) or right(params))
    texts(llm, [held(seed=seed, regex="once [ab]{2}") for seed in range(4)])
    texts(llm, [held(regex="once [ab]{2}")])
    assert [params.regex for params in compiled].count("once [ab]{2}") == 1


@pytest.mark.parametrize(
    "asked",
    [{"json": {"enum": [{"a": number} for number in range(1900)]}}, {"choice": [f"{n:x}" for n in range(10_000)]}],
    ids=["enum", "choice"],
)
def test_many_values_compile_in_time(grammars, asked):
    """The time grows with the number of values, not with its square."""
    began = time.process_time()
    grammars.grammar(held(**asked).structured_outputs).result()
    assert time.process_time() - began < 8


def test_a_schema_may_have_many_optional_properties(llm):
    """Any of them may come next, so a state of the parser has two items for each.

    The library allows 2,000 by itself.
    """
    names = [f"p{number}" for number in range(1200)]
    properties = {name: {"type": "null"} for name in names}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    asked = held(json=schema, max_tokens=8)
    assert texts(llm, [asked])[0][0].startswith("{")


def test_few_long_grammars_are_kept(grammars, monkeypatch):
    monkeypatch.setattr(service, "KEPT_BYTES", 1000)
    for number in range(9):
        grammars.grammar(held(choice=[f"{number}" * 300]).structured_outputs).result()
    assert len(grammars._kept) == 3 and grammars._kept_bytes <= 1000


def test_the_servers_wishes_hold_for_all(llm, grammars, monkeypatch):
    config = StructuredOutputsConfig(disable_any_whitespace=True, disable_additional_properties=True)
    monkeypatch.setattr(grammars, "config", config)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert texts(llm, [held(json=schema)]) == [('{"a":1}', "stop")]


def test_masks_behind_drafts(grammars):
    """A row of drafts has a mask for each position.

    It is the mask of the state behind each accepted draft. The state itself stays.
    """
    backend = grammars.backend
    grammar = backend.compile(held(regex="ab[cd]{1,3}e").structured_outputs)
    request = Request(1, [0], held(regex="x"), 0, 9, stop_ids=[1])
    tokens = [int(t) for text in ("a", "b", "c", "e") for t in backend._tokenizer.tokenize_str(text)]
    right, state = [], grammar.state(request)
    for token in [*tokens, None]:
        mask = np.zeros((1, backend.words), np.int32)
        backend.fill(mask, [(state, 0, ())])
        right.append(mask[0])
        if token is not None:
            assert not state.accept(token)
    state, masks = grammar.state(request), np.zeros((8, backend.words), np.int32)
    backend.fill(masks, [(state, 1, tokens)])
    assert [masks[1 + place].tolist() for place in range(len(tokens) + 1)] == [mask.tolist() for mask in right]
    assert not masks[0].any() and not masks[2 + len(tokens) :].any()
    wrong, masks = [tokens[0], tokens[0], tokens[1]], np.zeros((4, backend.words), np.int32)
    backend.fill(masks, [(state, 0, wrong)])
    assert masks[1].tolist() == right[1].tolist()
    assert not masks[1, tokens[0] // 32] >> (tokens[0] % 32) & 1
    assert not state.accept(tokens[0])


def test_long_chains_of_references(llm):
    """Long chains of references are compiled or refused, and the process lives.

    The library recurses along them.
    """
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(4_000)}
    held_by = {"$defs": chain | {"d4000": {"const": 1}}, "$ref": "#/$defs/d0"}
    state = llm.loop.grammars.grammar(held(json=held_by).structured_outputs).result().state(
        Request(1, [0], held(json=held_by), 0, 9, stop_ids=[1])
    )  # fmt: skip
    assert not state.accept(_token(llm, "["))
    wide = {"$defs": {f"d{i}": {} for i in range(20_000)}}
    for asked in ({"json": wide}, {"grammar": "start: " + '"a"' * 50_000}, {"regex": "a" * 200_000}):
        with pytest.raises(InvalidRequest, match=r"more than 20,000 objects|at most 131,072 are allowed"):
            texts(llm, [held(**asked)])


def _token(llm, text: str) -> int:
    (token,) = llm.frontend.tokenizer.encode(text, add_special_tokens=False)
    return token


def test_a_panic_of_the_library_fails_the_request_alone(llm, grammars, monkeypatch):
    """A panic of the library fails only its request, and the loop lives.

    The panic is no Exception.
    """

    class Panic(BaseException):
        pass

    def panic(*_):
        raise Panic("oh")

    for name in ("compile", "fill"):
        with monkeypatch.context() as patch:
            patch.setattr(grammars.backend, name, panic)
            with pytest.raises(PreheatError, match="library of structured outputs failed: oh"):
                texts(llm, [held(regex=f"panic in {name}")])
    assert texts(llm, [held(regex="a")]) == [("a", "stop")]


def test_a_tokenizer_that_the_library_cannot_read(tmp_path):
    """With a tokenizer that the library cannot read, the boot goes on without structured outputs."""
    write_model(tmp_path)
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    grammars = open_grammars(Settings(model=str(tmp_path)), lambda _: tmp_path, 320)
    assert isinstance(grammars, str) and "cannot be used for grammars" in grammars


def test_without_grammars_they_are_refused(tmp_path):
    engine = random_llm(tmp_path, structured_outputs_config={"backend": "none"})
    with pytest.raises(InvalidRequest, match='"backend": "none"'):
        texts(engine, [held(regex="a")])
