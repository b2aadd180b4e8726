"""``logprob_token_ids``: log-probabilities of chosen tokens equal their bits in the whole vocabulary."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from preheat import LLM, InvalidRequest, SamplingParams
from preheat.warmup.record import Record
from tests.cpu.structured import held, random_llm

IDS = [7, 300, 7, 0, 41]
ALL = 500
USUAL = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=ALL),
    SamplingParams(temperature=1.1, seed=3, max_tokens=12, ignore_eos=True, logprobs=ALL, presence_penalty=0.5),
    held(1.0, 5, max_tokens=10, regex="[ab]{4,9}"),
    SamplingParams(temperature=0.8, seed=4, max_tokens=7, ignore_eos=True, logprobs=ALL, n=2),
]
ASKED = [replace(params, logprob_token_ids=IDS, logprobs=number) for number, params in enumerate(USUAL)]


def said(llm: LLM, params: list[SamplingParams]) -> list:
    outputs = llm.generate([f"x{number}" for number in range(len(params))], params, use_tqdm=False)
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    options = {"max_logprobs": ALL, "skip_warmup": False, "on_cold": "raise", "determinism_warmup_iterations": 0}
    return random_llm(tmp_path_factory.mktemp("model"), **options)


def test_exactly_these_and_the_sampled_token(llm):
    for usual, asked in zip(said(llm, [replace(each, logprobs=ALL) for each in USUAL]), said(llm, ASKED), strict=True):
        for (tokens, every), (same, told) in zip(usual, asked, strict=True):
            assert same == tokens
            for token, whole, entry in zip(tokens, every, told, strict=True):
                assert list(entry) == list(dict.fromkeys([token, *IDS]))
                assert all(entry[id].logprob == whole[id].logprob for id in entry)
                assert entry[token].rank == whole[token].rank
                assert {entry[id].rank for id in entry if id != token} == {None}
    assert not any(Record.from_json(llm.loop.listener.report()).cold.values())


def test_the_same_bits_alone_and_beside_rows_that_ask_for_others(llm):
    mixed = [*ASKED, *(replace(each, logprobs=3) for each in USUAL), replace(ASKED[0], logprob_token_ids=[9])]
    together = said(llm, mixed)
    assert together[: len(ASKED)] == said(llm, ASKED)
    assert said(llm, [mixed[0]])[0] == together[0]
    assert {len(entry) for _, told in together[4] for entry in told} <= {3, 4}
    assert {len(entry) for _, told in together[-1] for entry in told} <= {1, 2}


def test_with_drafts_logprobs_belong_to_their_positions(llm, tmp_path):
    config = {"method": "ngram", "num_speculative_tokens": 4}
    drafted = random_llm(tmp_path, max_logprobs=ALL, speculative_config=config)
    assert said(drafted, ASKED) == said(llm, ASKED)


def test_without_logprobs_it_asks_for_them_and_prompts_keep_their_own(llm):
    params = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[5], prompt_logprobs=3, ignore_eos=True)
    (output,) = llm.generate(["xyz"], params, use_tqdm=False)
    assert [5 in entry for entry in output.outputs[0].logprobs] == [True, True]
    assert {len(entry) for entry in output.prompt_logprobs[1:]} <= {3, 4}
    assert all(each.rank for entry in output.prompt_logprobs[1:] for each in entry.values())
    (free,) = llm.generate(["xyz"], replace(params, logprob_token_ids=[]), use_tqdm=False)
    assert free.outputs[0].logprobs is None


def test_wrong_logprob_ids_are_refused(llm):
    with pytest.raises(ValueError, match="at most 128 are allowed"):
        SamplingParams(logprob_token_ids=list(range(129)))
    for wrong in (-1, llm.frontend.tokenizer.vocab_size):
        with pytest.raises(InvalidRequest, match="logprob_token_ids has token id"):
            llm.generate(["x"], SamplingParams(logprob_token_ids=[wrong]), use_tqdm=False)
