"""``allowed_token_ids``, ``bad_words``, and a grammar that begins behind a token.

Prompts come in vLLM's forms.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from preheat import LLM, InvalidRequest, SamplingParams, StructuredOutputsParams, TokensPrompt
from preheat.core import Request
from preheat.frontend.answer_format import AnswerFormats, ToolChoice
from preheat.frontend.tools import Tool
from preheat.grammar.service import LIBRARIES
from preheat.grammar.state import Grammar, Library, State
from preheat.ops.sampling import allowed
from preheat.utils.reasoning import Phase

FREE = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
PROMPTS = ["def add(a, b):", "class Stack:", "import os"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, max_model_len=128, max_num_batched_tokens=64)


def with_(**fields) -> SamplingParams:
    return msgspec.structs.replace(FREE, **fields)


def drawn(llm: LLM, *params: SamplingParams, prompts=PROMPTS) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def free(llm: LLM) -> list[list[int]]:
    return drawn(llm, FREE, FREE, FREE)


def test_only_allowed_tokens_are_drawn_and_other_rows_do_not_notice(llm: LLM, free: list[list[int]]) -> None:
    some = with_(allowed_token_ids=[300, 301, 302])
    found = drawn(llm, FREE, some, FREE)
    assert set(found[1]) <= {300, 301, 302} and len(set(found[1])) > 1 and len(found[1]) == 24
    assert [found[0], found[2]] == [free[0], free[2]] and not set(free[1]) <= {300, 301, 302}
    assert drawn(llm, some, prompts=PROMPTS[1:2]) == [found[1]]  # the same alone
    everything = with_(allowed_token_ids=[*range(llm.frontend.tokenizer.vocab_size)])
    assert drawn(llm, everything, everything, everything) == free  # the control: allowing all tokens changes nothing


def test_bad_words_do_not_occur(llm: LLM, free: list[list[int]]) -> None:
    """Bad words of one or several tokens do not occur.

    The tokens are the same up to the word's end.
    """
    tokenizer = llm.frontend.tokenizer
    for length in (1, 2):
        pieces = (free[0][at : at + length] for at in range(3, 20))
        ids = next(ids for ids in pieces if tokenizer.encode(tokenizer.decode(ids).lstrip(), False) == ids)
        word = tokenizer.decode(ids)
        found = drawn(llm, with_(bad_words=[word]), FREE, FREE)
        at = next(i for i in range(24) if free[0][i : i + length] == ids) + length - 1
        assert found[0][:at] == free[0][:at] and found[0][at] != free[0][at]
        assert ids not in [found[0][i : i + length] for i in range(24)]
        assert found[1:] == free[1:]


def test_impossible_token_rules_are_refused(llm: LLM) -> None:
    for wrong in ({"allowed_token_ids": [10**6]}, {"bad_words": ["x"] * 2000}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            llm.generate(["x"], with_(**wrong), use_tqdm=False)
    for wrong in ({"allowed_token_ids": []}, {"bad_words": [""]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingParams(**wrong)


def test_a_grammar_begins_behind_a_token(llm: LLM, free: list[list[int]]) -> None:
    """Text is free up to its fifth token.

    This token begins the grammar, with JSON behind it.
    """
    mark = free[0][4]
    assert mark not in free[0][:4]
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    bound = StructuredOutputsParams(json=schema, disable_any_whitespace=True, after_token_id=mark)
    params = with_(structured_outputs=bound, ignore_eos=False)
    (found,) = drawn(llm, params, prompts=PROMPTS[:1])
    assert found[:5] == free[0][:5] and found[5] != free[0][5]
    text = llm.frontend.tokenizer.decode(found[5:])
    assert text.replace(" ", "") in ('{"a":1}', '{"a":2}')
    absent = next(id for id in range(500, 1000) if id not in free[0])
    never = with_(structured_outputs=msgspec.structs.replace(bound, after_token_id=absent))
    assert (
        drawn(llm, never, prompts=PROMPTS[:1])[0][:6] == free[0][:6]
    )  # the control: without the token it never begins


def test_masks_of_drafts(llm: LLM) -> None:
    """Behind each draft the mask is of the state there, with rules and the token before the grammar."""
    backend = llm.loop.grammars.backend
    params = SamplingParams(allowed_token_ids=[5, 6, 7], bad_words=["x"])
    state = Grammar(backend, None).state(Request(1, [1], params, 0, 8, bad_words=[[5, 6], [7]]))
    assert isinstance(state, State)
    masks = np.zeros((3, backend.words), np.int32)
    assert state.fill_free(masks, [5, 6]) == []
    state.keep_rules(masks, [5, 6])
    found = [np.flatnonzero(allowed(mask, backend.vocab_size)).tolist() for mask in masks]
    assert found == [[5, 6], [5], [5, 6]]
    structured = StructuredOutputsParams(regex="a+", after_token_id=9)
    request = Request(1, [1], SamplingParams(structured_outputs=structured), 0, 8, stop_ids=[0])
    state = backend.compile(structured).state(request)
    assert [(place, drafts) for _, place, drafts in state.fill_free(masks, [4, 9])] == [(2, [])]  # the grammar's
    assert (state.accept(4), state.accept(9), state.phase) == ("", "", Phase.ENDED)
    assert state.accept(4)  # no "a"


def masks_of(state: State, drafts: list[int]) -> np.ndarray:
    """Return the masks before and behind ``drafts``, int32 [1 + drafts, words]."""
    backend = state._backend
    masks = np.zeros((1 + len(drafts), backend.words), np.int32)
    backend.fill(masks, state.fill_free(masks, drafts))
    return masks


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest, llm: LLM) -> Library:
    """Return each library of grammars, over the tokens of the bundled model."""
    own = llm.loop.grammars.backend
    if type(own) is LIBRARIES[request.param]:
        return own
    text = (Path(llm.frontend.tokenizer.folder) / "tokenizer.json").read_text(encoding="utf-8")
    return LIBRARIES[request.param](text, own.vocab_size, 1)


def test_where_the_first_token_begins_no_reasoning_the_grammar_holds_it(llm: LLM, library: Library) -> None:
    """The grammar holds a first token that begins no reasoning.

    Masks of drafts equal one token after another. The first token is the start token, white space before it, or
    anything else.
    """
    (start, end, call), stop = (300, 301, 302), 0
    space, a, b = (llm.frontend.tokenizer.encode(text, False)[0] for text in "\nab")
    bound = StructuredOutputsParams(regex="\n*a+b", after_token_id=end, start_token_id=start, call_token_ids=(call,))
    request = Request(1, [1], SamplingParams(structured_outputs=bound), 0, 8, stop_ids=[stop])
    grammar = library.compile(bound)
    first = np.flatnonzero(allowed(masks_of(grammar.state(request), [])[0], library.vocab_size)).tolist()
    assert start in first and a in first and space in first and not {b, end, stop} & {*first}
    for drafts, phase in (
        ([a, a, b], Phase.NEVER), ([start, b, end, a, b], Phase.ENDED), ([space, start, end, a, b], Phase.ENDED),
        ([space, a, start], Phase.NEVER), ([start, start, b, b], Phase.WITHIN), ([space, space], Phase.UNKNOWN),
    ):  # fmt: skip
        together, state = masks_of(grammar.state(request), drafts), grammar.state(request)
        for draft, mask in zip(drafts, together, strict=False):
            assert (masks_of(state, [])[0] == mask).all()
            if not allowed(mask, library.vocab_size)[draft]:
                assert state.accept(draft)
                break
            assert not state.accept(draft)
        else:
            assert (masks_of(state, [])[0] == together[-1]).all() and state.phase is phase
    within = grammar.state(request)
    assert not within.accept(start)
    free = allowed(masks_of(within, [])[0], library.vocab_size)
    assert not free[stop] and free.sum() == library.vocab_size - 1  # a text that is not there yet does not end
    assert within.accept(call) and within.phase is Phase.ENDED  # for this grammar a call is no text


def test_strict_tools_are_held_to_their_schemas(llm: LLM) -> None:
    """Calls in the model's own form have free text around them, and only the schema in them."""
    tokenizer = llm.frontend.tokenizer
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    formats = AnswerFormats(tokenizer, "hermes")
    constraint = formats.form(ToolChoice((Tool("f", schema, strict=True),), "auto"), "").constraint
    assert constraint is not None
    assert formats.form(ToolChoice((Tool("f", schema),), "auto"), "").constraint is None
    grammar = llm.loop.grammars.backend.compile(constraint)

    def wrong(text: str) -> str:
        state = grammar.state(Request(1, [1], SamplingParams(structured_outputs=constraint), 0, 8, stop_ids=[0]))
        return next((error for token in tokenizer.encode(text, False) if (error := state.accept(token))), "")

    call = '<tool_call>\n{"name": "f", "arguments": {"n": true}}\n</tool_call>'
    assert wrong(f"Well: {call} and {call}") == ""
    for bad in (call.replace("true", "1"), call.replace('"f"', '"g"'), call.replace('"n"', '"m"')):
        assert wrong(bad)


def test_prompt_forms(llm: LLM) -> None:
    ids = llm.frontend.tokenizer.encode(PROMPTS[0])
    forms = [PROMPTS[0], {"prompt": PROMPTS[0]}, ids, TokensPrompt(prompt_token_ids=ids),
             {"prompt_token_ids": ids, "prompt": "shown", "cache_salt": "mine"}]  # fmt: skip
    results = llm.generate(forms, FREE, use_tqdm=False)
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
    assert results[-1].prompt == "shown" and results[-1].num_cached_tokens == 0
    with pytest.raises(InvalidRequest, match="encoder_prompt"):
        llm.generate([{"prompt": "x", "encoder_prompt": "y"}], FREE, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="--scheduling-policy"):
        llm.generate(["x"], FREE, use_tqdm=False, priority=[1])


def test_a_grammar_waits_for_the_header_that_names_it(llm: LLM, library: Library) -> None:
    """A grammar begins only behind the right header.

    Masks of drafts equal one token after another.
    """
    (mark, end), stop = (300, 301), 0
    said = {text: llm.frontend.tokenizer.encode(text, False) for text in ("final", "finally", " final", "so", "a", "b")}
    (a,), (b,) = said["a"], said["b"]
    bound = StructuredOutputsParams(regex="a+b", after_token_id=end, after_header=(mark, "final"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(bound), type=StructuredOutputsParams) == bound
    request = Request(1, [1], SamplingParams(structured_outputs=bound), 0, 8, stop_ids=[stop])
    grammar = library.compile(bound)
    for header, begins in (
        ([mark, *said["final"]], True), ([mark, *said[" final"], *said["so"]], False), ([*said["final"]], False),
        ([mark, *said["finally"]], False), ([mark, *said["so"], end, mark, *said["final"]], True), ([mark], False),
    ):  # fmt: skip
        drafts = [*header, end, a, b]
        together, state = masks_of(grammar.state(request), drafts), grammar.state(request)
        for draft, mask in zip(drafts, together, strict=False):
            assert (masks_of(state, [])[0] == mask).all() and not state.accept(draft)
        assert (state.phase is Phase.ENDED) == begins
        ends = allowed(masks_of(state, [])[0], library.vocab_size)[stop]
        assert ends == begins  # a text that is there may end, and none that never began
