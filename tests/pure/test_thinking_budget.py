"""Budgets of reasoning, as a function of only the tokens.

They decide the tokens spent, and the forced ones after them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core import Request, SamplingParams, Thinking
from preheat.errors import InvalidRequest
from preheat.frontend.params_checker import check_params
from preheat.frontend.reasoning import ReasoningFormat
from preheat.frontend.tokenizer import Tokenizer
from preheat.grammar.budget import Budget
from preheat.utils.reasoning import Phase

START, END, CALL, SPACE, TEXT = 100, 101, 102, 32, 7
SAID = st.lists(st.sampled_from([START, END, CALL, SPACE, TEXT, 8]), max_size=14)


def limit(left: int, within: bool = True, last: tuple[int, ...] = (END,)) -> Thinking:
    return Thinking(left, within, START, (END, CALL), last)


def behind(thinking: Thinking, tokens: list[int]) -> Budget:
    budget = Budget(thinking, lambda token: token == SPACE)
    for token in tokens:
        budget.accept(token)
    return budget


def held(thinking: Thinking, wishes: list[int]) -> list[int]:
    """Return the text of a model that wishes for these tokens."""
    budget, said = behind(thinking, []), list[int]()
    for wish in wishes:
        forced = budget.forced([])
        said.append(wish if forced is None else forced)
        budget.accept(said[-1])
    return said


def reasoning(thinking: Thinking, tokens: list[int]) -> list[int]:
    """Return the reasoning in ``tokens``, by the definition of where it begins and ends."""
    if not thinking.within:
        first = next((place for place, token in enumerate(tokens) if token != SPACE), len(tokens))
        if tokens[first : first + 1] != [START]:
            return []
        tokens = tokens[first + 1 :]
    end = next((place for place, token in enumerate(tokens) if token in thinking.ends), len(tokens))
    return tokens[:end]


@given(left=st.integers(0, 6), within=st.booleans(), wishes=SAID)
def test_the_reasoning_has_as_many_tokens_as_it_may(left: int, within: bool, wishes: list[int]) -> None:
    """The reasoning has at most ``left`` tokens.

    Only the token where it would go on becomes the end. All tokens behind it are the model's own.
    """
    thinking = limit(left, within)
    said, wished = held(thinking, wishes), reasoning(thinking, wishes)
    assert reasoning(thinking, said) == wished[:left]
    changed = [place for place, (now, before) in enumerate(zip(said, wishes, strict=True)) if now != before]
    assert len(changed) <= 1 and all(said[place] == END for place in changed)
    if len(wished) < left:
        assert not changed


@given(left=st.integers(0, 5), within=st.booleans(), last=st.sampled_from([(END,), (8, TEXT, END)]), wishes=SAID)
def test_drafts_and_a_text_that_goes_on_elsewhere(
    left: int, within: bool, last: tuple[int, ...], wishes: list[int]
) -> None:
    """Behind drafts the forced tokens are the same as behind tokens, wherever the text is cut.

    A fresh state gets there from the tokens.
    """
    thinking = limit(left, within, last)
    said = held(thinking, wishes)
    for cut in range(len(said) + 1):
        for end in range(cut, len(said) + 1):
            assert behind(thinking, said[:cut]).forced(said[cut:end]) == behind(thinking, said[:end]).forced([])


def test_an_end_of_several_tokens_is_forced() -> None:
    assert held(limit(2, last=(8, 9, END)), [TEXT] * 8) == [TEXT, TEXT, 8, 9, END, TEXT, TEXT, TEXT]


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> ReasoningFormat:
    from tests.api.conftest import write_tools_model

    return ReasoningFormat("qwen3", Tokenizer(write_tools_model(tmp_path_factory.mktemp("thinks"))))


@given(prompt=SAID, wishes=SAID, budget=st.integers(0, 6))
def test_a_prompt_that_has_its_first_tokens(
    form: ReasoningFormat, prompt: list[int], wishes: list[int], budget: int
) -> None:
    """A text that goes on from any token of its reasoning ends the reasoning at the same token."""
    ids = {START: form.start_id, END: form.end_id}
    prompt, wishes = ([ids.get(token, token) for token in tokens] for tokens in (prompt, wishes))
    thinking = form.thinking(budget, [*prompt, form.start_id])
    assert thinking is not None and thinking.within and thinking.left == budget
    said = held(thinking, wishes)
    for cut in range(len(reasoning(thinking, said)) + 1):
        if form.start_id in said[:cut]:  # a second start begins no new reasoning
            break
        onwards = form.thinking(budget, [*prompt, form.start_id, *said[:cut]])
        assert onwards is not None and held(onwards, wishes[cut:]) == said[cut:]


def test_how_an_answer_begins(form: ReasoningFormat) -> None:
    start, end = form.start_id, form.end_id
    for prompt, phase, expected in (
        ([5], None, (9, False)), ([start], None, (9, True)), ([start, 5, 5], None, (7, True)),
        ([start, 5, end], None, (9, False)), ([start, *[5] * 20], None, (0, True)),
        ([start, 5], Phase.UNKNOWN, (9, False)),  # somebody's own words; the template ends otherwise
        ([5], Phase.WITHIN, (9, True)), ([start, 5], Phase.WITHIN, (8, True)),
    ):  # fmt: skip
        found = form.thinking(9, prompt, phase)
        assert found is not None and (found.left, found.within) == expected
    assert form.thinking(9, [start], Phase.ENDED) is None and form.thinking(9, [start], Phase.NEVER) is None


@pytest.mark.parametrize("wrong", [-2, 1.5, "x", True])
def test_numbers_of_tokens(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="thinking_token_budget"):
        check_params({"thinking_token_budget": wrong})


def test_a_negative_budget_means_no_limit() -> None:
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()
    assert SamplingParams(thinking_token_budget=0).masked == ("thinking_token_budget",)
    assert Request(1, [1], SamplingParams(), 0, 8).thinking is None
