"""Budgets of reasoning in an engine: the same tokens alone, beside others, preempted, drafted, and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, InvalidRequest, SamplingParams, StructuredOutputsParams
from tests.cpu.structured import write_thinker

SMALL = {
    "max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": 16, "dtype": "float32", "max_model_len": 256,
    "num_threads": 1, "load_format": "dummy", "device": "cpu", "seed": 0, "reasoning_parser": "qwen3",
    "enable_prefix_caching": False,
}  # fmt: skip
FEW_BLOCKS = {"num_gpu_blocks_override": 20}
LENGTH = 40


def engine(folder: Path, **more: Any) -> LLM:
    return LLM(str(folder), **SMALL | more)


def sampled(number: int, **more: Any) -> SamplingParams:
    usual = {"temperature": 0.9 * (number % 3), "seed": number, "max_tokens": LENGTH, "ignore_eos": True}
    return SamplingParams(**usual | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return engine(folder)


@pytest.fixture(scope="module")
def asked(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that open the reasoning, with and without budgets.

    Budgets are of zero, few and more tokens, and one of them comes before a grammar.
    """
    end = llm.frontend.tokenizer.token_id("</think>")
    after = StructuredOutputsParams(regex="[ab]{4,8}", after_token_id=end)
    more: list[dict[str, Any]] = [
        {"thinking_token_budget": 0}, {"thinking_token_budget": 3}, {}, {"thinking_token_budget": 9},
        {"thinking_token_budget": 4, "structured_outputs": after, "ignore_eos": False},
        {"thinking_token_budget": 20, "logprobs": 2},
        {"thinking_token_budget": 5, "allowed_token_ids": [*range(40, 60)]},
        {"thinking_token_budget": 200},
    ]  # fmt: skip
    start = llm.frontend.tokenizer.token_id("<think>")
    prompts = [[50 + at, *range(60, 64 + 4 * at), start] for at in range(len(more))]
    return prompts, [sampled(number, **each) for number, each in enumerate(more)]


def said(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]
    llm.loop.scheduler.check()
    return outputs


@pytest.fixture(scope="module")
def alone(llm: LLM, asked: Any) -> list[list[int]]:
    return [said(llm, [prompt], [params])[0] for prompt, params in zip(*asked, strict=True)]


def test_the_reasoning_ends_with_the_budget_and_no_other_token_changes(llm: LLM, asked: Any, alone: Any) -> None:
    prompts, params = asked
    tokenizer = llm.frontend.tokenizer
    end = tokenizer.token_id("</think>")
    for prompt, wanted, answer in zip(prompts, params, alone, strict=True):
        budget = wanted.thinking_token_budget
        (free,) = said(llm, [prompt], [sampled(wanted.seed, allowed_token_ids=wanted.allowed_token_ids)])
        thought = free.index(end) if end in free else LENGTH
        if budget is None or budget >= thought:
            assert answer == free
            continue
        assert answer[:budget] == free[:budget] and answer[budget] == end != free[budget]
        if wanted.structured_outputs is not None:
            text = tokenizer.decode(answer[budget + 1 :], skip_special_tokens=True)
            assert 4 <= len(text) <= 8 and set(text) <= {*"ab"}
    assert alone[7] != alone[1] and sum(end in answer for answer in alone) >= 6


@pytest.mark.parametrize(
    "more",
    [
        {},
        FEW_BLOCKS,
        {"max_num_seqs": 3, "max_num_batched_tokens": 16},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}, **FEW_BLOCKS},
        {"speculative_config": {"method": "grammar", "num_speculative_tokens": 6}},
        {"structured_outputs_config": {"backend": "xgrammar"}},
    ],
    ids=["together", "preempted", "cut", "ngram", "suffix-preempted", "grammar", "xgrammar"],
)
def test_the_same_tokens_in_every_way(folder: Path, asked: Any, alone: Any, more: dict[str, Any]) -> None:
    other = engine(folder, **more)
    assert said(other, *asked) == alone
    assert (other.loop.scheduler.stats().preemptions > 0) == ("num_gpu_blocks_override" in more)


def test_the_same_tokens_can_be_missed(llm: LLM, asked: Any, alone: Any) -> None:
    """Control: one token more in each budget gives other answers."""
    prompts, params = asked
    budgets = [each.thinking_token_budget for each in params]
    wider = [each.clone() for each in params]
    for each, budget in zip(wider, budgets, strict=True):
        each.thinking_token_budget = None if budget is None else budget + 1
    changed = [now != before for now, before in zip(said(llm, prompts, wider), alone, strict=True)]
    assert changed == [True, True, False, True, True, True, True, False]


@pytest.mark.parametrize("budget", [0, 5, 12])
def test_a_text_goes_on_from_any_of_its_tokens(llm: LLM, asked: Any, budget: int) -> None:
    """A text goes on from any of its tokens with the rest of its budget.

    It is the law of ``min_tokens`` for moved texts.
    """
    (prompt, *_), _ = asked
    params = sampled(0, thinking_token_budget=budget)
    (whole,) = said(llm, [prompt], [params])
    cuts = range(1, LENGTH, 3)
    moved = [sampled(0, thinking_token_budget=budget, max_tokens=LENGTH - cut) for cut in cuts]
    assert said(llm, [prompt + whole[:cut] for cut in cuts], moved) == [whole[cut:] for cut in cuts]


def test_where_there_is_no_reasoning_nothing_changes(llm: LLM) -> None:
    tokenizer = llm.frontend.tokenizer
    start, end = map(tokenizer.token_id, ("<think>", "</think>"))
    for prompt in ([50, 60, start, 61, end], [50, 60]):
        free, bound = said(llm, [prompt] * 2, [sampled(4), sampled(4, thinking_token_budget=0)])
        assert free == bound and free[0] != start
    # an answer that begins the reasoning itself
    bias = {start: 100.0}
    thinks = sampled(4, thinking_token_budget=2, logit_bias=bias, max_tokens=6)
    assert said(llm, [[50, 60]], [thinks])[0][:4] == [start, start, start, end]


def test_a_text_that_is_held_from_its_first_token_has_no_reasoning(llm: LLM) -> None:
    """A text held from its first token has no reasoning, whatever the prompt looks like."""
    start = llm.frontend.tokenizer.token_id("<think>")
    held = {"structured_outputs": StructuredOutputsParams(regex="[ab]{6,8}"), "ignore_eos": False}
    free, bound = said(llm, [[50, start]] * 2, [sampled(4, **held), sampled(4, **held, thinking_token_budget=2)])
    assert free == bound and len(free) >= 6


def test_a_budget_without_its_options_is_refused(folder: Path) -> None:
    for more, message in (
        ({"reasoning_parser": None}, "--reasoning-parser"),
        ({"reasoning_parser": "granite"}, "no single token does"),
        ({"structured_outputs_config": {"backend": "none"}}, "thinking_token_budget is not supported"),
    ):
        other = engine(folder, skip_warmup=True, boot_check="off", **more)
        with pytest.raises(InvalidRequest, match=message) as caught:
            other.generate([[5, other.frontend.tokenizer.token_id("<think>")]], sampled(0, thinking_token_budget=1))
        assert caught.value.param == "thinking_token_budget"
