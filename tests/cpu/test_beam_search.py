"""Beam search equals vLLM's rules written out over one-token requests, with the same bits in any batch."""

from __future__ import annotations

import msgspec
import pytest

from preheat import LLM, BeamSearchOutput, BeamSearchParams, InvalidRequest, SamplingParams
from preheat.frontend.beams import Beams

OPTIONS = {"num_threads": 1, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 32, "block_size": 16,
           "skip_warmup": False, "boot_check": "off", "on_cold": "raise", "max_logprobs": 16}  # fmt: skip
PROMPTS = ["Once upon a time", "The cat sat on the mat and", "In the beginning there was a very small"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", **OPTIONS)


def reference(llm: LLM, prompt: list[int], width: int, tokens: int, penalty: float, eos: list[int], ignore: bool):
    """Run vLLM's beam search by one-token requests with logprobs, each from an empty cache."""
    step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * width, ignore_eos=True)

    def score(beam):
        ids, total = beam
        return total / (len(ids) - (ids[-1] in eos)) ** penalty

    beams, completed = [(prompt, 0.0)], []
    for _ in range(tokens):
        grown = []
        for ids, total in beams:
            llm.reset_prefix_cache()
            (output,) = llm.generate([{"prompt_token_ids": ids}], step, use_tqdm=False)
            for token, logprob in output.outputs[0].logprobs[0].items():
                longer = ([*ids, token], total + logprob.logprob)
                (completed if token in eos and not ignore else grown).append(longer)
        beams = sorted(grown, key=lambda beam: beam[1], reverse=True)[:width]
    return sorted([*completed, *beams], key=score, reverse=True)[:width]


def found(output: BeamSearchOutput) -> list[tuple[list[int], float]]:
    return [(sequence.tokens, sequence.cum_logprob) for sequence in output.sequences]


@pytest.mark.parametrize(("width", "penalty", "ignore"), [(3, 1.0, False), (3, 8.0, False), (4, 2.0, True)])
def test_equals_vllms_rules(llm: LLM, width: int, penalty: float, ignore: bool, monkeypatch) -> None:
    """The result equals vLLM's bit for bit.

    A token that the model likes stands in for an early end of sequence.
    """
    ids = llm.frontend.tokenizer.encode(PROMPTS[0])
    plain = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
    eos = [plain[0].outputs[0].token_ids[1]]
    monkeypatch.setattr(llm.frontend.tokenizer, "eos_ids", eos)
    params = BeamSearchParams(width, 6, ignore_eos=ignore, length_penalty=penalty)
    (output,) = llm.beam_search([{"prompt_token_ids": ids}], params)
    assert found(output) == reference(llm, ids, width, 6, penalty, eos, ignore)
    reasons = [sequence.finish_reason for sequence in output.sequences]
    assert reasons == ["stop" if s.tokens[-1] in eos and not ignore else "length" for s in output.sequences]
    if penalty == 1.0:
        assert {"stop", "length"} == set(reasons)
    for sequence in output.sequences:
        assert len(sequence.logprobs) == len(sequence.tokens) - len(ids)
        assert sum(p[t].logprob for p, t in zip(sequence.logprobs, sequence.tokens[len(ids) :], strict=True)) == (
            sequence.cum_logprob
        )


def test_the_same_bits_alone_and_beside_others(llm: LLM) -> None:
    """A search has the same bits beside other searches, sampling, cold and warm prefixes.

    A cold event would raise.
    """
    params = BeamSearchParams(4, 12)
    alone = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        alone += llm.beam_search(prompt, params)
    assert llm.beam_search(PROMPTS, params) == alone
    llm.reset_prefix_cache()
    others = [llm.frontend.prepare(f"Number {n} is", SamplingParams(seed=n, max_tokens=30)) for n in range(8)]
    llm.frontend.start(others)
    assert llm.beam_search(PROMPTS, params, concurrency_limit=2) == alone
    assert all(state.finished for state in others)
    texts = [sequence.text for sequence in alone[0].sequences]
    assert len(set(texts)) == 4
    assert all(text.startswith(PROMPTS[0]) for text in texts)


def test_a_search_of_width_one_is_greedy(llm: LLM) -> None:
    (greedy,) = llm.generate(
        PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False
    )
    (output,) = llm.beam_search(PROMPTS[1], BeamSearchParams(1, 12, ignore_eos=True))
    assert output.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_impossible_searches_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"beam_width is 9: .*at most 16 are allowed \(--max-logprobs\)"):
        llm.beam_search(PROMPTS, BeamSearchParams(9, 4))
    with pytest.raises(InvalidRequest, match=r"prompt\[1\]"):
        llm.beam_search([[1], []], BeamSearchParams(2, 4))
    wide, long = {"beam_width": 129}, {"length_penalty": float("nan")}
    for wrong in ({"beam_width": 0}, wide, {"max_tokens": 0}, {"temperature": 0.5}, {"length_penalty": 11.0}, long):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | wrong)
    assert not llm.frontend.busy


def test_a_failing_step_ends_the_search_with_its_error(llm: LLM, monkeypatch) -> None:
    calls = iter(range(100))
    launch = type(llm.loop.executor).launch

    def fails(self, batch):
        if next(calls) == 3:
            raise RuntimeError("planted")
        return launch(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.loop.executor), "launch", fails)
        with pytest.raises(Exception, match="planted"):
            llm.beam_search(PROMPTS, BeamSearchParams(3, 8))
    assert not llm.frontend.busy
    assert llm.beam_search(PROMPTS[0], BeamSearchParams(2, 2))


def test_hits_on_its_own_blocks_do_not_count_for_a_search(llm: LLM) -> None:
    llm.reset_prefix_cache()
    state = llm.frontend.prepare(PROMPTS[0], SamplingParams(n=2, temperature=0.0, max_tokens=20, ignore_eos=True))
    hits = llm.loop.scheduler.stats().prefix_hits
    llm.frontend.start([llm.frontend.input.search(state, 1.0, "n")])
    while not state.finished:
        llm.advance()
    assert llm.loop.scheduler.stats().prefix_hits > hits
    assert state.cached_tokens == 0


def test_an_aborted_search_leaves_nothing_behind(llm: LLM) -> None:
    frontend = llm.frontend
    state = frontend.prepare(PROMPTS[0], SamplingParams(n=3, temperature=0.0, max_tokens=9))
    frontend.start([frontend.input.search(state, 1.0, "n")])
    while len(state.search.round) < 3:
        llm.advance()
    frontend.abort(state)
    assert not frontend.busy
    llm.advance()
    assert llm.loop.idle
    assert not state.finished


def test_the_comparison_can_fail(llm: LLM, monkeypatch) -> None:
    """Control: a score that forgets the length has another order."""
    monkeypatch.setattr(Beams, "score", lambda self, beam: beam.cum_logprob)
    ids = llm.frontend.tokenizer.encode(PROMPTS[0])
    plain = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
    eos = [plain[0].outputs[0].token_ids[1]]
    monkeypatch.setattr(llm.frontend.tokenizer, "eos_ids", eos)
    (output,) = llm.beam_search([{"prompt_token_ids": ids}], BeamSearchParams(3, 6, length_penalty=8.0))
    assert found(output) != reference(llm, ids, 3, 6, 8.0, eos, False)


def test_params_are_vllms() -> None:
    assert [field.name for field in msgspec.structs.fields(BeamSearchParams)] == [
        "beam_width", "max_tokens", "ignore_eos", "temperature", "length_penalty", "include_stop_str_in_output",
        "skip_special_tokens", "structured_outputs",
    ]  # fmt: skip
