"""Reading answers: reasoning, content and calls from tokens, the same whole and in a stream, at every cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from preheat.core import Request, SamplingParams, StructuredOutputsParams
from preheat.errors import InvalidRequest
from preheat.frontend.answer_format import AnswerFormat, AnswerFormats, ToolChoice
from preheat.frontend.answer_parser import AnswerParser, ParsedAnswer, parser_of
from preheat.frontend.marks import mark_chars, mark_texts
from preheat.frontend.reasoning import REASONING_PARSERS
from preheat.frontend.stop import StopChecker, StopStrings
from preheat.frontend.stream_parser import StreamParser
from preheat.frontend.text_marks import TextMarks
from preheat.frontend.tokenizer import Tokenizer
from preheat.frontend.tools import TOOL_PARSERS, Tool
from preheat.grammar.state import State
from preheat.utils.reasoning import Phase
from tests.tokenizers import byte_level
from tests.tool_calls import CALLS

BEHIND = [name for name, kind in TOOL_PARSERS.items() if not kind.REASONING]
"""Parsers of the text behind any reasoning.

The others read whole answers, see test_harmony.py.
"""
BEFORE = {name: marks for name, marks in REASONING_PARSERS.items() if not marks.channel}

MARKS = list(dict.fromkeys(
    [mark for marks in REASONING_PARSERS.values() if not marks.text for mark in (marks.start, marks.end)]
    + [mark for kind in TOOL_PARSERS.values() for mark in kind.MARKS]
))  # fmt: skip
TOOLS = (Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}}), Tool("f"))
JSON = StructuredOutputsParams(json={"type": "object"})


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Write tokenizers: the marks are tokens with a text in ``plain``, special in ``special``, none in ``bare``."""
    found = {}
    for name in ("plain", "special", "bare"):
        backend, folder = byte_level(), tmp_path_factory.mktemp(name)
        add = backend.add_special_tokens if name == "special" else backend.add_tokens
        marks = MARKS if name != "bare" else []
        add([AddedToken(mark, special=name == "special", normalized=False) for mark in marks])
        backend.add_special_tokens([AddedToken("<|odd|>", special=True)])
        backend.save(str(folder / "tokenizer.json"))
        found[name] = Tokenizer(folder)
    return found


def parts_of(parser: AnswerParser, pieces: list[str]) -> list[tuple]:
    """Return the blocks of an answer that comes in ``pieces``, without ids."""
    answer = ParsedAnswer()
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        answer.add(part)
    return [(block.kind, block.text, block.name) for block in answer.blocks]


def deltas(tokenizer: Tokenizer, form: AnswerFormat, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer([], skip, mark_chars(form.marks))
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def answered(tokenizer: Tokenizer, form: AnswerFormat, text: str, skip: bool = True) -> tuple[str, str, list]:
    """Return reasoning, content and calls."""
    blocks = parts_of(parser_of(form), deltas(tokenizer, form, tokenizer.encode(text, False), skip))
    texts = ["".join(text for kind, text, _ in blocks if kind == wanted) for wanted in ("reasoning", "content")]
    return (*texts, [(name, json.loads(text)) for kind, text, name in blocks if kind == "call"])


def form_of(
    tokenizer: Tokenizer, tools: str | None = None, reasoning: str | None = "qwen3", prompt: str = "", **options: Any
) -> AnswerFormat:
    choice = options.pop("choice", None) or (ToolChoice(TOOLS, "auto") if tools else ToolChoice())
    return AnswerFormats(tokenizer, tools, reasoning).form(choice, prompt, **options)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nwell\n</think>\n\nYes", "well\n", "Yes"),
        ("", "\n<think>well</think>Yes", "well", "Yes"),
        ("", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("", "so</think>Yes", "", "so</think>Yes"),  # content that was sent cannot become reasoning
        ("", " Yes", "", " Yes"),
        ("", " \n", "", " \n"),
        ("", "<think>\n\n</think>\n\nYes", "", "Yes"),
        ("", "<think>cut o", "cut o", ""),
        ("<think></think>\n", "<think>Yes", "", "<think>Yes"),
        ("<think>\n", "well</think>Yes</think>", "well", "Yes</think>"),
        ("<think>", "<think>well</think>", "well", ""),
        ("<think>", "well <think></think>", "well <think>", ""),
        ("<think>", "cut </thi", "cut </thi", ""),
    ],
)
def test_reasoning(tokenizers: dict[str, Tokenizer], prompt: str, text: str, reasoning: str, content: str) -> None:
    form = form_of(tokenizers["plain"], prompt=prompt)
    assert answered(tokenizers["plain"], form, text) == (reasoning, content, [])
    # Special tokens are in no text, and mean the same.
    for mark in ("<think>", "</think>"):
        reasoning, content = reasoning.replace(mark, ""), content.replace(mark, "")
    form = form_of(tokenizers["special"], prompt=prompt)
    assert answered(tokenizers["special"], form, text) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("said", "phase"),
    [
        ("<think>\nLet me", Phase.WITHIN), ("<think>a</think>\nSo", Phase.ENDED), ("So", Phase.UNKNOWN),
        ("<think>a</think> <think>b", Phase.WITHIN), ("", Phase.UNKNOWN),
    ],
)  # fmt: skip
def test_a_message_that_is_continued_may_be_within_its_reasoning(
    tokenizers: dict[str, Tokenizer], said: str, phase: Phase
) -> None:
    assert form_of(tokenizers["plain"], prompt=f"<s>{said}", continued=f"{said}\n").phase is phase
    assert form_of(tokenizers["plain"], prompt=f"<s>{said}</s>", continued=said).phase is Phase.UNKNOWN  # it is over


OSLO = [("weather", {"city": "Oslo"})]


def test_every_parser_has_a_call() -> None:
    assert CALLS.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize("marks", ["plain", "special"])
@pytest.mark.parametrize("name", BEHIND)
def test_a_call_ends_the_reasoning(tokenizers: dict[str, Tokenizer], name: str, marks: str) -> None:
    tokenizer, call = tokenizers[marks], CALLS[name]
    form = form_of(tokenizer, name)
    assert answered(tokenizer, form, f"<think>Well.\n{call}") == ("Well.\n", "", OSLO)
    assert answered(tokenizer, form, f"<think>{call}") == ("", "", OSLO)
    assert answered(tokenizer, form, f"<think>Well.</think>\n{call}{call}") == ("Well.", "", OSLO * 2)
    assert answered(tokenizer, form, f"<think>Well.{call}{call}") == ("Well.", "", OSLO * 2)
    assert answered(tokenizer, form, call) == ("", "", OSLO)
    opened = form_of(tokenizer, name, "deepseek_r1")
    assert answered(tokenizer, opened, f"Well.{call}") == ("Well.", "", OSLO)


def test_a_mark_that_begins_no_call_is_reasoning(tokenizers: dict[str, Tokenizer]) -> None:
    form = form_of(tokenizers["plain"], "hermes")
    text = '<think>I write <tool_call> and {"name"</think>Yes'
    assert answered(tokenizers["plain"], form, text) == ('I write <tool_call> and {"name"', "Yes", [])
    text = '<think>Well <tool_call>{"name": "f", </think>Yes'
    assert answered(tokenizers["plain"], form, text) == ('Well <tool_call>{"name": "f", ', "Yes", [])
    text = '<think><tool_call>{"name": "f", "arguments": {"a": "</think>"}}'
    assert answered(tokenizers["plain"], form, text) == ("", "", [("f", {"a": "</think>"})])


def test_reasoning_is_searched_for_calls_only_where_the_model_may_call(tokenizers: dict[str, Tokenizer]) -> None:
    text = f"<think>Well.{CALLS['hermes']}</think>{{}}"
    within = f"Well.{CALLS['hermes']}"
    for options in ({"asked": JSON}, {"choice": ToolChoice(TOOLS, "none")}):
        form = form_of(tokenizers["plain"], "hermes", **options)
        assert answered(tokenizers["plain"], form, text) == (within, "{}", [])
    form = form_of(tokenizers["plain"], "hermes", choice=ToolChoice(TOOLS[:1], "named"))
    assert answered(tokenizers["plain"], form, text) == (within, "", [("weather", {})])


def test_content_that_the_client_described_is_passed_on_to_the_letter(tokenizers: dict[str, Tokenizer]) -> None:
    form = form_of(tokenizers["plain"], asked=StructuredOutputsParams(choice=["\n yes"]))
    assert answered(tokenizers["plain"], form, "<think>Hm.</think>\n yes") == ("Hm.", "\n yes", [])
    assert answered(tokenizers["plain"], form_of(tokenizers["plain"]), "<think>Hm.</think>\n yes")[1] == "yes"


@pytest.mark.parametrize("name", BEHIND)
def test_special_tokens_are_in_no_text(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer, odd = tokenizers["special"], "<|odd|>"
    call = CALLS[name].replace("Oslo", f"Os{odd}lo")
    form = form_of(tokenizer, name)
    assert answered(tokenizer, form, f"{odd}<think>a{odd}b</think>{odd}c{odd}d{call}{odd}") == ("ab", "cd", OSLO)
    mark = (TOOL_PARSERS[name].MARKS or [odd])[-1]  # it begins no call here
    assert answered(tokenizer, form, f"a{mark}b [/THINK]") == ("", "ab ", [])
    asked = form_of(tokenizer, name, skip_special_tokens=False)
    assert answered(tokenizer, asked, f"<think>a{odd}b</think>c{odd}", skip=False) == (f"a{odd}b", f"c{odd}", [])
    assert answered(tokenizer, asked, f"{call}", skip=False)[2] == [("weather", {"city": f"Os{odd}lo"})]


IN_TEXT = {name: marks for name, marks in REASONING_PARSERS.items() if marks.text}
TEXTS = [
    text
    for marks in REASONING_PARSERS.values()
    for text in (marks.start, marks.end, *marks.others[0], *marks.others[1], marks.label, *marks.answer)
    if text
]
PIECES = [
    *MARKS, *CALLS.values(), *TEXTS, "<|odd|>", "<s>", " ", "\n", "{", "}", '"', "a", "é", "😀", "[f(a=1)",
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", '{"name": "f", "arguments": {"a": 1', "[", "]", ",",
    "<tool", "analysis", "final", " to=functions.f", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_whole_answer(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    """A stream equals the whole answer, for any tokens, cut anywhere, with every parser.

    The text of a client never has the text of special tokens.
    """
    marks = data.draw(st.sampled_from(["plain", "special", "bare"]))
    tokenizer, skip = tokenizers[marks], data.draw(st.booleans())
    known = IN_TEXT if marks == "bare" else BEFORE
    pairs = st.tuples(*(st.sampled_from([None, *table]) for table in (BEHIND, known)))
    if marks != "bare":
        pairs = pairs | st.sampled_from([("openai", "openai"), (None, "openai_gptoss"), ("openai", None)])
    tools, reasoning = data.draw(pairs)
    modes = st.sampled_from(["auto", "none", "required", "named"] if tools else ["none", "required", "named"])
    choice = ToolChoice(TOOLS, data.draw(modes), data.draw(st.booleans()))
    prompt = data.draw(st.sampled_from(["", "<think>", "</think>", "[THINK]", "<|start|>assistant<|channel|>final"]))
    asked = data.draw(st.sampled_from([None, JSON]))
    if marks == "bare" and (asked or choice.forced):
        prompt = ""  # a grammar has no reasoning to end: see the test of refusals
    form = form_of(tokenizer, tools, reasoning, prompt, choice=choice, asked=asked, skip_special_tokens=skip)
    pieces = st.sampled_from([tokenizer.encode(piece, False) for piece in PIECES])
    ids = [id for piece in data.draw(st.lists(pieces, max_size=12)) for id in piece]
    ids = data.draw(st.just(ids) | st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    stream, whole = parser_of(form), parser_of(form)
    each = deltas(tokenizer, form, ids, skip)
    blocks = parts_of(stream, each)
    assert blocks == parts_of(whole, ["".join(each)])
    text, cuts = "".join(each), data.draw(st.lists(st.integers(0, 200), max_size=6))
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    assert blocks == parts_of(parser_of(form), [text[a:b] for a, b in pairwise(places)])
    assert stream.reasoning_tokens(ids) == whole.reasoning_tokens(ids) <= len(ids)
    for kind, shown, name in blocks:
        (name + shown).encode()
        assert not (skip and marks == "special" and any(mark in shown for mark in [*MARKS, "<|odd|>"]))
        if kind == "call":
            json.loads(shown, object_pairs_hook=lambda pairs: dict(pairs) if len(dict(pairs)) == len(pairs) else 1 / 0)


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        ("granite", "Here is my thought process: a b\n\nHere is my response: c", "a b\n\n", "c"),
        ("granite", "\nHere's my thought process:\nHere is a Here's my response:", "Here is a ", ""),
        ("granite", "Here is my thought: a", "", "Here is my thought: a"),
        ("granite", "Here is my thought process: Here is my resp", "Here is my resp", ""),
        ("granite", "I say: Here is my response: c", "", "I say: Here is my response: c"),
        ("granite", "Here is my", "", "Here is my"),
        ("olmo3", "<think>a </thin b</think>c</think>", "a </thin b", "c</think>"),
        ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb\n</answer>c\n</answer>\n", "a\n", "b\n</answer>c"),
        ("hunyuan_a13b", "<answer>\nb\n</answ", "", "b\n</answ"),
        ("hunyuan_a13b", "<answer> b\n</answer>", "", "<answer> b\n</answer>"),
    ],
)
def test_marks_may_be_text(
    tokenizers: dict[str, Tokenizer], parser: str, text: str, reasoning: str, content: str
) -> None:
    tokenizer = tokenizers["bare"]
    form, ids = form_of(tokenizer, None, parser), tokenizer.encode(text, False)
    assert form.reasoning is not None and form.reasoning.in_text
    assert answered(tokenizer, form, text) == (reasoning, content, [])
    answer = parser_of(form)
    pieces = deltas(tokenizer, form, ids)
    assert parts_of(answer, pieces) == parts_of(parser_of(form), ["".join(pieces)])
    assert (answer.reasoning_tokens(ids) > 0) == bool(reasoning)


def test_reasoning_between_marks_that_are_text_is_counted(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bare"]
    for text, count in (("<think>abc</think>d", 3), ("<think>ab</th", 2), ("abc", 0), ("\n<think>", 0)):
        ids = tokenizer.encode(text, False)
        assert parser_of(form_of(tokenizer, None, "olmo3")).reasoning_tokens(ids) == count


def test_a_call_ends_reasoning_whose_marks_are_text(tokenizers: dict[str, Tokenizer]) -> None:
    form = form_of(tokenizers["bare"], "granite4", "granite")
    text = f"Here is my thought process: Well.{CALLS['granite4']}"
    assert answered(tokenizers["bare"], form, text) == ("Well.", "", OSLO)
    text = 'Here is my thought process: <tool_call>{"name": "Here is my response:'
    assert answered(tokenizers["bare"], form, text) == ('<tool_call>{"name": "', "", [])


def test_no_grammar_waits_for_a_mark_that_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bare"]
    form = form_of(tokenizer, None, "olmo3", asked=JSON)
    assert form.constraint is JSON and form.phase is Phase.NEVER
    assert answered(tokenizer, form, "<think>{}") == ("", "<think>{}", [])
    assert form_of(tokenizer, None, "olmo3", "<think></think>", asked=JSON).phase is Phase.ENDED
    for options in ({"asked": JSON}, {"choice": ToolChoice(TOOLS, "required")}):
        with pytest.raises(InvalidRequest, match="--reasoning-parser olmo3 marks reasoning by text"):
            form_of(tokenizer, None, "olmo3", "<think>\n", **options)
    assert form_of(tokenizers["plain"], None, "olmo3", "<think>\n", asked=JSON).phase is Phase.WITHIN  # it is a token


def test_marks_around_reasoning_and_content_are_dropped(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["plain"]
    for text, thought in (("thought\na b", "a b"), ("thoughts", "thoughts"), ("though", "though"),
                          ("\nthought\n", "")):  # fmt: skip
        form = form_of(tokenizer, None, "gemma4")
        assert answered(tokenizer, form, f"<|channel>{text}<channel|>c") == (thought, "c", [])
        assert answered(tokenizer, form, f"<|channel>{text}") == (thought, "", [])
    form = form_of(tokenizer, "ernie45", "ernie45")
    text = "abc\n</think>\n\n\n<response>\ndef\n</response>\n"
    assert answered(tokenizer, form, text) == ("abc\n", "def", [])
    assert answered(tokenizer, form, "abc</think>\ndef\n</response>") == ("abc", "def\n</response>", [])
    assert answered(tokenizer, form, f"abc</think>\n\n{CALLS['ernie45']}\n") == ("abc", "", OSLO)
    form = form_of(tokenizer, None, "ernie45", "</think>", asked=StructuredOutputsParams(regex=r"<response>\n"))
    assert answered(tokenizer, form, "<response>\n") == ("", "<response>\n", [])


class Anything:
    """Grammar that allows every text, as a library has it, and the token where it began."""

    words, vocab_size, end = 64, 2048, 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = lambda ids: b"".join(map(tokenizer.token_bytes, ids))
        self.is_special = tokenizer.special_ids.__contains__
        self.seen: list[int] = []

    def deep_copy(self) -> Anything:
        found = Anything.__new__(Anything)
        found.__dict__ = self.__dict__ | {"seen": [*self.seen]}
        return found

    def consume_token(self, token: int) -> bool:
        self.seen.append(token)
        return True


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_grammar_and_parser_agree_on_the_content(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    """At every token, the grammar has seen exactly the tokens of the content."""
    tokenizer = tokenizers["plain"]
    prompt = data.draw(st.sampled_from(["", "<think>", "</think>"]))
    tokens = ["<think>", "</think>", "\n", " ", "{", "a", "x y", "<tool_call>"]
    said = data.draw(st.lists(st.sampled_from(tokens), max_size=8))
    form = form_of(tokenizer, prompt=prompt, asked=JSON)
    library = Anything(tokenizer)
    params = SamplingParams(structured_outputs=form.constraint)
    state = State(library, library.deep_copy(), Request(0, [], params, 0, 8, stop_ids=[0]))  # type: ignore[arg-type]
    ids = [id for text in said for id in tokenizer.encode(text, False)]
    for end, id in enumerate(ids, 1):
        assert not state.accept(id)
        blocks = parts_of(parser_of(form), deltas(tokenizer, form, ids[:end]))
        content = "".join(text for kind, text, _ in blocks if kind == "content")
        seen = (
            tokenizer.decode(state.matcher.seen, skip_special_tokens=False) if state.phase is not Phase.WITHIN else ""
        )
        assert content == seen


def test_the_agreement_can_fail(tokenizers: dict[str, Tokenizer]) -> None:
    """Control: a grammar that only knows the end waits for it.

    The parser sees that no reasoning began.
    """
    tokenizer = tokenizers["plain"]
    form, library = form_of(tokenizer, asked=JSON), Anything(tokenizer)
    assert form.constraint is not None
    params = SamplingParams(structured_outputs=msgspec.structs.replace(form.constraint, start_token_id=None))
    state = State(library, library.deep_copy(), Request(0, [], params, 0, 8, stop_ids=[0]))  # type: ignore[arg-type]
    (token,) = tokenizer.encode("{", False)
    assert not state.accept(token) and state.matcher.seen == []
    assert parts_of(parser_of(form), ["{"]) == [("content", "{", "")]


def test_the_law_of_streams_can_fail(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a parser that holds nothing back misses a mark that is cut."""
    text, form = f"<think>Well.{CALLS['hermes']}", form_of(tokenizers["plain"], "hermes")
    ids = [id for char in text.removeprefix("<think>") for id in tokenizers["plain"].encode(char, False)]
    pieces = deltas(tokenizers["plain"], form, [*tokenizers["plain"].encode("<think>", False), *ids])
    assert parts_of(parser_of(form), pieces) == parts_of(parser_of(form), ["".join(pieces)])
    spelled = form_of(tokenizers["bare"], None, "granite")
    thought = [*"Here is my thought process: a", *"Here is my response: b"]
    assert parts_of(parser_of(spelled), thought) == parts_of(parser_of(spelled), ["".join(thought)])
    for kind in (StreamParser, TextMarks):
        monkeypatch.setattr(kind, "_held", lambda *_: 0)
    assert parts_of(parser_of(form), pieces) != parts_of(parser_of(form), ["".join(pieces)])
    assert parts_of(parser_of(spelled), thought) != parts_of(parser_of(spelled), ["".join(thought)])


def test_where_a_model_does_not_think_its_first_token_is_held(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["plain"]
    start, end = map(tokenizer.token_id, ("<think>", "</think>"))
    for prompt, first in (("", start), ("<think>", None)):
        found = form_of(tokenizer, prompt=prompt, asked=JSON).constraint
        assert found is not None and (found.start_token_id, found.after_token_id) == (first, end)
    assert form_of(tokenizer, prompt="</think>", asked=JSON).constraint is JSON
    strict = ToolChoice((Tool("f", {}, strict=True),), "auto")
    found = form_of(tokenizer, "hermes", choice=strict).constraint
    assert found is not None and found.call_token_ids == (tokenizer.token_id("<tool_call>"),)
    assert form_of(tokenizers["special"], "hermes", choice=strict).constraint is None  # no text of a grammar


CHOICE = StructuredOutputsParams(choice=["yes"])
TAGS = StructuredOutputsParams(structural_tag={"type": "structural_tag", "structures": [
    {"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]})  # fmt: skip


@pytest.mark.parametrize(
    ("template", "prompt", "asked", "phase"),
    [
        ("{{ messages }}", "", CHOICE, Phase.NEVER),  # a mask that lets reasoning begin would push the model into it
        ("{{ messages }}", "", JSON, Phase.NEVER),
        ("{{ messages.split('</think>') }}", "", CHOICE, Phase.UNKNOWN),
        ("<think>{{ messages }}", "", CHOICE, Phase.UNKNOWN),
        ("{{ messages }}", "Think in <think> first.", CHOICE, Phase.UNKNOWN),
        ("{{ messages }}", "<think>", CHOICE, Phase.WITHIN),
        ("{{ messages }}", "", TAGS, Phase.UNKNOWN),  # its text may begin with anything
        ("{{ messages }}", "", None, Phase.UNKNOWN),
        (None, "", CHOICE, Phase.UNKNOWN),
    ],
)
def test_a_grammar_leaves_room_for_reasoning_if_the_template_may_begin_it(
    tokenizers: dict[str, Tokenizer],
    template: str | None,
    prompt: str,
    asked: StructuredOutputsParams | None,
    phase: Phase,
) -> None:
    """Grammar and parser have the same phase: the text held to the grammar is the content."""
    form = form_of(tokenizers["plain"], prompt=prompt, asked=asked, template=template)
    assert form.phase is phase
    if asked is not None and phase is Phase.NEVER:
        assert form.constraint is asked
        assert answered(tokenizers["plain"], form, "yes") == ("", "yes", [])
    elif asked is not None:
        assert form.constraint is not None and form.constraint.after_token_id is not None


def test_reasoning_is_counted(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["plain"]
    for text, thought in (("<think>abc</think>d", "abc"), ("abc</think>", ""), ("\n<think>ab", "ab"),
                          ("<think>ab" + CALLS["hermes"], "ab")):  # fmt: skip
        form, ids = form_of(tokenizer, "hermes"), tokenizer.encode(text, False)
        parser = parser_of(form)
        parts_of(parser, deltas(tokenizer, form, ids))
        assert parser.reasoning_tokens(ids) == len(tokenizer.encode(thought, False))


def test_stop_strings_see_marks_as_their_text(tokenizers: dict[str, Tokenizer]) -> None:
    """Stop strings match the text of marks, and marks are shown or held back whole."""
    tokenizer = tokenizers["special"]
    form = form_of(tokenizer)
    text = "".join(deltas(tokenizer, form, tokenizer.encode("<think>ab</think>cd", False)))
    for stop, include, shown in (("</think>", False, 3), ("</think>", True, 4), ("b</th", False, 2), ("k>c", False, 3)):
        for size in (1, 2, 9):
            checker, found = StopChecker(StopStrings([stop], include), mark_texts(form.marks)), ""
            for at in range(0, len(text), size):
                if checker.found is None:
                    found += checker.push(text[at : at + size])
            assert (found, checker.found) == (text[:shown], stop)
