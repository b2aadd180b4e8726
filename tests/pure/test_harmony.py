"""Answers of gpt-oss: messages in channels, read from tokens.

They are the same whole and in a stream. Grammars, counts and prompts fit them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from preheat.core import Request, SamplingParams, StructuredOutputsParams
from preheat.errors import ModelError, SettingsError
from preheat.frontend.answer_format import AnswerFormat, AnswerFormats, ToolChoice
from preheat.frontend.answer_parser import parser_of
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.messages import chat_messages
from preheat.frontend.tokenizer import Tokenizer
from preheat.frontend.tools.harmony import HarmonyParser, begun
from preheat.grammar.state import State
from preheat.settings import Settings
from preheat.utils.reasoning import Phase
from tests.pure.test_answers import JSON, TOOLS, Anything, answered, deltas, parts_of
from tests.tokenizers import byte_level

ANALYSIS, COMMENTARY, FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
OSLO = [("weather", {"city": "Oslo"})]


@pytest.fixture(scope="module", params=["plain", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Write a tokenizer with the marks as tokens, with a text or without."""
    backend, folder = byte_level(), tmp_path_factory.mktemp(request.param)
    add = backend.add_special_tokens if request.param == "special" else backend.add_tokens
    add([AddedToken(mark, special=request.param == "special", normalized=False) for mark in HarmonyParser.MARKS])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def form_of(
    tokenizer: Tokenizer, tools: str | None = "openai", reasoning: str | None = None, prompt: str = "", **options: Any
) -> AnswerFormat:
    choice = options.pop("choice", ToolChoice(TOOLS, "auto") if tools else ToolChoice())
    return AnswerFormats(tokenizer, tools, reasoning).form(choice, prompt, **options)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{ANALYSIS}They greet.{NEXT}{FINAL}Hello!", "They greet.", "Hello!", []),
        (f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{CALL}", "One.\nTwo.", "", OSLO),
        (f"{ANALYSIS}Well.{NEXT}{COMMENTARY}I look.{NEXT}{CALL}", "Well.", "I look.", OSLO),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
        (f"{ANALYSIS}cut o", "cut o", "", []),
        (f"{ANALYSIS}<|end|>", "", "", []),
        ("<|channel|>analysis They forget", "They forget", "", []),
        ("Hello", "", "Hello", []),
    ],
)
def test_channels_map_to_reasoning_content_and_calls(
    tokenizer: Tokenizer, text: str, reasoning: str, content: str, calls: list
) -> None:
    for tools, thoughts in (("openai", "openai_gptoss"), ("openai", None), ("openai", "openai")):
        form = form_of(tokenizer, tools, thoughts)
        assert answered(tokenizer, form, text) == (reasoning, content, calls)
        shown = form_of(tokenizer, tools, thoughts, skip_special_tokens=False)
        assert answered(tokenizer, shown, text, skip=False) == (reasoning, content, calls)


def test_where_nothing_may_be_called_arguments_are_content(tokenizer: Tokenizer) -> None:
    for tools, options in ((None, {}), ("openai", {"choice": ToolChoice(TOOLS, "none")})):
        form = form_of(tokenizer, tools, "openai", **options)
        assert answered(tokenizer, form, f"{ANALYSIS}Well.{NEXT}{CALL}") == ("Well.", '{"city": "Oslo"}', [])


def test_letters_of_a_mark_are_no_mark(tokenizer: Tokenizer) -> None:
    """Where the marks are tokens, the same letters spelled by other tokens are text."""
    form = form_of(tokenizer)
    ids = [*tokenizer.encode(FINAL, False), *(id for char in "a<|end|>b" for id in tokenizer.encode(char, False))]
    assert parts_of(parser_of(form), deltas(tokenizer, form, ids)) == [("content", "a<|end|>b", "")]


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4) | st.none(), max_size=3)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(thoughts=st.lists(TEXT, max_size=2), said=st.none() | TEXT, called=st.none() | ARGUMENTS, data=st.data())
def test_written_messages_are_parsed_back(
    tokenizer: Tokenizer, thoughts: list[str], said: str | None, called: dict[str, Any] | None, data: st.DataObject
) -> None:
    """At any cut, nothing is lost.

    The count of reasoning tokens equals the count of the thoughts' tokens.
    """
    messages = [ANALYSIS + thought for thought in thoughts]
    messages += [] if said is None else [(FINAL if called is None else COMMENTARY) + said]
    if called is not None:
        messages.append(f"<|channel|>commentary to=functions.f json<|message|>{json.dumps(called)}")
    form, ids = form_of(tokenizer), tokenizer.encode(NEXT.join(messages), False)
    calls = [] if called is None else [("f", called)]
    assert answered(tokenizer, form, NEXT.join(messages)) == ("\n".join(thoughts), said or "", calls)
    text = "".join(deltas(tokenizer, form, ids))
    place = data.draw(st.integers(0, len(text)))
    parser = parser_of(form)
    assert parts_of(parser, [text[:place], text[place:]]) == parts_of(parser_of(form), [*text])
    assert parser.reasoning_tokens(ids) == sum(len(tokenizer.encode(thought, False)) for thought in thoughts)


def test_a_grammar_holds_the_final_channel_and_all_before_it_is_reasoning(tokenizer: Tokenizer) -> None:
    form = form_of(tokenizer, asked=JSON)
    assert form.constraint is not None and form.constraint.after_header == (tokenizer.token_id("<|channel|>"), "final")
    before = f"{ANALYSIS}Well.{NEXT}{COMMENTARY}I look.{NEXT}{CALL}<|start|>assistant"
    for final in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        assert answered(tokenizer, form, f'{before}{final}{{"a": 1}}') == (
            'Well.\nI look.\n{"city": "Oslo"}', '{"a": 1}', []
        )  # fmt: skip
    named = form_of(tokenizer, choice=ToolChoice(TOOLS[:1], "named"))
    assert answered(tokenizer, named, f'{ANALYSIS}Hm.{NEXT}{FINAL}{{"city": "Oslo"}}') == ("Hm.", "", OSLO)
    required = form_of(tokenizer, None, "openai", choice=ToolChoice(TOOLS, "required"))
    text = f'{FINAL}[{{"name": "weather", "parameters": {{"city": "Oslo"}}}}]'
    assert answered(tokenizer, required, text) == ("", "", OSLO)


def seen_by_the_grammar(tokenizer: Tokenizer, constraint: StructuredOutputsParams, ids: list[int]) -> str:
    """Return the text that a grammar has seen when it has accepted ``ids``, alone and as drafts."""
    library = Anything(tokenizer)
    request = Request(0, [], SamplingParams(structured_outputs=constraint), 0, 8, stop_ids=[0])
    state = State(library, library.deep_copy(), request)  # type: ignore[arg-type]
    ahead = state._phases(ids)
    for id, phase in zip(ids, ahead[1:], strict=True):
        assert not state.accept(id) and state.phase is phase
    return tokenizer.decode(state.matcher.seen, skip_special_tokens=False)


BEFORE = [
    ANALYSIS, COMMENTARY, CALL, NEXT, "<|end|>", "<|start|>", "<|channel|>", "final", "assistant", " ", "Well.",
    "<|channel|>finally<|message|>", "<|constrain|>json", "<|channel|>commentary final<|message|>", "<|message|>",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    before=st.lists(st.sampled_from(BEFORE), max_size=6),
    final=st.sampled_from(["", FINAL, "<|channel|>final json<|message|>", "<|channel|> final<|message|>"]),
    text=TEXT,
)
def test_grammar_and_parser_agree_on_the_content(
    tokenizer: Tokenizer, before: list[str], final: str, text: str
) -> None:
    form = form_of(tokenizer, asked=JSON)
    assert form.constraint is not None
    said = "".join(before)
    if "<|channel|>final<|message|>" in said.replace(" ", ""):
        return  # the final message: a grammar would not let it go on so
    ids = tokenizer.encode(said + final + (text if final else ""), False)
    content = answered(tokenizer, form, said + final + (text if final else ""))[1]
    assert content == seen_by_the_grammar(tokenizer, form.constraint, ids) == (text if final else "")


def test_the_agreement_can_fail(tokenizer: Tokenizer) -> None:
    """Control: a grammar that does not look at headers begins in the reasoning."""
    form = form_of(tokenizer, asked=JSON)
    assert form.constraint is not None
    ids = tokenizer.encode(f"{ANALYSIS}Well.", False)
    blind = msgspec.structs.replace(form.constraint, after_header=None)
    assert seen_by_the_grammar(tokenizer, form.constraint, ids) == ""
    assert seen_by_the_grammar(tokenizer, blind, ids) == "Well."


@pytest.mark.parametrize(
    ("prompt", "header", "phase"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", "", Phase.WITHIN),
        (f"<|start|>assistant{FINAL}It is", FINAL, Phase.ENDED),
        (f"<|start|>assistant{ANALYSIS}Hm", ANALYSIS, Phase.WITHIN),
        (f"<|start|>assistant{FINAL}It is.<|return|>", "", Phase.WITHIN),
        ("no header", "", Phase.WITHIN),
    ],
)
def test_a_prompt_may_have_begun_the_message(tokenizer: Tokenizer, prompt: str, header: str, phase: Phase) -> None:
    assert begun(prompt) == header
    form = form_of(tokenizer, "openai", None, prompt)
    assert form.phase is phase
    kind = {FINAL: ("", "x", []), ANALYSIS: ("x", "", []), "": ("", "x", [])}[header]
    assert answered(tokenizer, form, "x") == kind
    assert (form_of(tokenizer, "openai", None, prompt, asked=JSON).constraint is JSON) == (phase is Phase.ENDED)


def test_parsers_need_channel_tokens_and_each_other(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"needs the tokens <\|channel\|> and <\|message\|>"):
        form_of(Tokenizer(tmp_path))
    for options in ({"reasoning_parser": "qwen3"}, {"tool_call_parser": "hermes", "reasoning_parser": "openai"}):
        with pytest.raises(SettingsError, match="openai reads whole answers"):
            Settings(model="m", **{"tool_call_parser": "openai", "enable_auto_tool_choice": True} | options)


TEMPLATE = """{% for m in messages %}
{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
{%- if m.thinking and m.tool_calls %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json
<|message|>{{ c.function.arguments|tojson }}<|call|>{% endfor %}
{%- if m.content %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


def test_conversations_are_shown_by_the_template_of_the_model(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer, TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = {"role": "user", "content": "Hi"}
    prompt = template.render(chat_messages([asked, {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]}]))
    assert prompt == (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json\n<|message|>{"a": 1}<|call|><|start|>assistant'
    )
    both = {"role": "assistant", "reasoning": "Hm.", "content": "I look.", "tool_calls": [call]}
    assert "I look." in template.render(chat_messages([asked, both]))  # the template takes no thoughts beside a text
