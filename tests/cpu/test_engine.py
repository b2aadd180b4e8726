"""The whole engine on the bundled model: right against transformers, and the same bits on every path."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import preheat
from preheat import LLM, SamplingParams
from preheat.backends.cpu import sampler
from preheat.frontend.outputs import RequestOutput
from preheat.model.files import BUNDLED_PATH
from preheat.ops.activation import ACTIVATIONS, silu_and_mul
from preheat.ops.logprobs import token_logprobs
from preheat.warmup.record import Record

LOGIT_ERROR = 3e-5
"""Largest difference between a logit and transformers' in float32."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return 200 pieces of Python, 1 to 400 tokens long, some with common beginnings."""
    rng = random.Random(0)
    text = "\n".join(path.read_text() for path in sorted(Path(preheat.__file__).parent.rglob("*.py")))
    llm = LLM(max_num_seqs=1, max_model_len=64)
    ids = llm.frontend.tokenizer.encode(text[:400_000], add_special_tokens=False)
    found = []
    for i in range(200):
        length = 1 + int(rng.expovariate(1 / 60)) % 400
        start = 1000 * (i % 20) if i % 3 == 0 else rng.randrange(len(ids) - length)
        found.append(ids[start : start + length])
    return found


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def reference(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED_PATH, dtype=dtype).eval()


@torch.inference_mode()
def test_float32_gives_the_reference_tokens(prompts: list[list[int]]) -> None:
    """Each of 64 greedy tokens is transformers' likeliest token after all tokens before it.

    Two tokens may be as likely as each other, to within twice the error of a logit in float32.
    """
    some = prompts[:40]
    outputs = LLM(dtype="float32").generate(some, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    model = reference(torch.float32)
    for prompt, output in zip(some, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert float((logits.amax(-1) - chosen).max()) <= 2 * LOGIT_ERROR


@torch.inference_mode()
def test_bfloat16_agrees_wherever_the_reference_is_clear(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best token agrees, teacher-forced, wherever the reference's two best are four errors apart.

    The logits are taken where the engine turns them into log-probabilities of the prompt. Asking for the whole
    vocabulary at every position would make ten million entries, each with its text.
    """
    llm, model = LLM(dtype="bfloat16"), reference(torch.bfloat16)
    seen: list[Tensor] = []

    def listening(logits: Tensor, *how: Any) -> Any:
        seen.append(logits.clone())
        return token_logprobs(logits, *how)

    monkeypatch.setattr(sampler, "token_logprobs", listening)
    clear = differ = 0
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for prompt in [prompt for prompt in prompts[:40] if len(prompt) > 1]:
        seen.clear()
        llm.generate([prompt], params, use_tqdm=False)
        ours = torch.cat(seen).log_softmax(-1)
        theirs = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        error = (ours - theirs).abs().max(-1).values
        top = theirs.topk(2, -1).values
        certain = top[:, 0] - top[:, 1] > 4 * error
        clear += int(certain.sum())
        differ += int((ours.argmax(-1) != theirs.argmax(-1))[certain].sum())
    assert clear > 1000  # the comparison is about something
    assert differ == 0


def observed(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Return tokens, and the logprobs of tokens and alternatives as exact floats."""
    seen = []
    for output in outputs:
        choice = output.outputs[0]
        assert choice.logprobs is not None
        seen.append((choice.token_ids, [v.logprob for entry in choice.logprobs for v in entry.values()]))
    return seen


GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=3, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=200, seed=7, max_tokens=16, logprobs=3, ignore_eos=True,
    presence_penalty=0.3, repetition_penalty=1.1,
)  # fmt: skip
MIXED = [GREEDY, SEEDED] * 8
"""Parameters of one batch: a row's bits do not depend on the parameters of other rows either."""


def of_all_lengths(prompts: list[list[int]]) -> list[list[int]]:
    """Return as many prompts as ``MIXED``, in no order, with common beginnings among them."""
    some = sorted(prompts, key=len)[:: len(prompts) // len(MIXED)][: len(MIXED) - 2]
    some += [some[-1][:40], some[-1][:50]]
    random.Random(1).shuffle(some)
    return some


def everywhere(
    prompts: list[list[int]], params: SamplingParams | list[SamplingParams], **options: Any
) -> list[tuple[list[int], list[float]]]:
    llm = LLM(**options)
    seen = observed(llm.generate(prompts, params, use_tqdm=False))
    llm.loop.scheduler.check()
    assert llm.loop.scheduler.stats().blocks_used == 0
    return seen


@pytest.mark.parametrize(("dtype", "threads"), [("bfloat16", 2), ("float32", 1)], indirect=["threads"])
def test_every_path_gives_the_same_bits(prompts: list[list[int]], dtype: str, threads: int) -> None:
    some = of_all_lengths(prompts)
    together = everywhere(some, MIXED, dtype=dtype)

    llm = LLM(dtype=dtype, block_size=16)
    alone = [observed(llm.generate([p], how, use_tqdm=False))[0] for p, how in zip(some[:8], MIXED, strict=False)]
    assert alone == together[:8]
    assert observed(llm.generate(some, MIXED, use_tqdm=False)) == together  # beside others, prefixes now cached
    assert llm.loop.scheduler.stats().prefix_hits > 0

    tight = LLM(
        dtype=dtype, max_num_batched_tokens=33, max_num_seqs=32, max_num_prefill_seqs=2, enable_prefix_caching=False,
        max_model_len=368, num_gpu_blocks_override=24, block_size=16,
    )  # fmt: skip
    assert observed(tight.generate(some, MIXED, use_tqdm=False)) == together  # ragged chunks and preemption
    assert tight.loop.scheduler.stats().preemptions > 0


def test_one_and_two_threads_give_the_same_bits(prompts: list[list[int]]) -> None:
    some = of_all_lengths(prompts)
    assert everywhere(some, MIXED, num_threads=1) == everywhere(some, MIXED, num_threads=2)


@pytest.mark.usefixtures("eager_here")
def test_an_operation_that_looks_at_its_batch_is_found(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an operation whose rounding depends on the number of rows breaks the comparisons above."""
    alone = [everywhere([p], GREEDY)[0] for p in prompts[:3]]
    wrong = lambda x: silu_and_mul(x) * (1 + 2**-7 * (len(x) > 2))  # noqa: E731
    monkeypatch.setitem(ACTIVATIONS, "silu_and_mul", wrong)  # type: ignore[arg-type]
    assert everywhere(prompts[:3], GREEDY) != alone


def test_prompt_logprobs_do_not_depend_on_chunks_or_the_cache(prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    some = [p for p in prompts if len(p) > 70][:8]
    warm = LLM()
    warm.generate(some, SamplingParams(max_tokens=1), use_tqdm=False)
    results = [
        [out.prompt_logprobs for out in llm.generate(some, params, use_tqdm=False)]
        for llm in (warm, LLM(max_num_batched_tokens=48, max_num_seqs=8))
    ]
    assert results[0] == results[1]
    for prompt, entries in zip(some, results[0], strict=True):
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        assert all(token in entry for token, entry in zip(prompt[1:], entries[1:], strict=True) if entry is not None)


def test_truncation_all_logprobs_and_a_reset_prefix_cache(prompts: list[list[int]]) -> None:
    """The frontend's settings reach the engine.

    A prompt that was cut is the prompt of its last tokens.
    """
    llm = LLM(max_logprobs=3, block_size=16)
    prompt = next(prompt for prompt in prompts if len(prompt) > 40)

    def run(ids: list[int], **params: Any) -> RequestOutput:
        return llm.generate([ids], SamplingParams(temperature=0, max_tokens=4, **params), use_tqdm=False)[0]

    cut = run(prompt, truncate_prompt_tokens=33, logprobs=-1)
    assert cut.prompt_token_ids == prompt[-33:]
    assert cut.outputs == run(prompt[-33:], logprobs=3).outputs
    assert {len(entry) for entry in cut.outputs[0].logprobs or ()} == {3}
    assert [run(prompt[-33:]).num_cached_tokens for _ in range(2)] == [32, 32]
    llm.reset_prefix_cache()
    assert [run(prompt[-33:]).num_cached_tokens for _ in range(2)] == [0, 32]


def test_seeded_choices_differ_from_each_other_but_not_from_run_to_run(prompts: list[list[int]]) -> None:
    llm, params = LLM(), SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=16, ignore_eos=True)
    first = [choice.token_ids for choice in llm.generate(prompts[5], params, use_tqdm=False)[0].outputs]
    again = [choice.token_ids for choice in llm.generate(prompts[:9], params, use_tqdm=False)[5].outputs]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 4


def test_a_step_that_fails_harms_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_num_seqs=2)
    right = llm.loop.executor.launch

    def broken(batch: Any) -> Any:
        raise RuntimeError("no more of this")

    monkeypatch.setattr(llm.loop.executor, "launch", broken)
    with pytest.raises(preheat.PreheatError, match="no more of this"):
        llm.generate(["def f():"], use_tqdm=False)
    monkeypatch.setattr(llm.loop.executor, "launch", right)
    assert llm.generate(["def f():"], use_tqdm=False)[0].finished
    llm.loop.scheduler.check()


def test_an_interrupted_call_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM()
    right, calls = llm.loop.step, []

    def interrupted() -> bool:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right()

    monkeypatch.setattr(llm.loop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["def f():", "class A:"], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    monkeypatch.setattr(llm.loop, "step", right)
    assert llm.loop.scheduler.idle
    llm.loop.scheduler.check()
    assert len(llm.generate("def f():", use_tqdm=False)) == 1


def test_the_best_known_function() -> None:
    out = LLM().generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0]
    assert out.text.strip() == "return a + b"
    assert out.finish_reason == "stop"


def test_the_frontend_warm_up_leaves_nothing_behind():
    llm = LLM(max_num_seqs=2, max_num_batched_tokens=32)
    stats, metrics = llm.loop.scheduler.stats(), llm.frontend.metrics
    assert (stats.steps, stats.prompt_tokens, stats.generation_tokens, stats.running, stats.blocks_used) == (0,) * 5
    assert (metrics.prompt_tokens, metrics.generation_tokens, sum(metrics.finished.values())) == (0, 0, 0)
    assert not any(entry.hits for entry in Record.from_json(llm.loop.listener.report()).entries)


def test_a_context_that_leaves_no_room_for_an_answer_can_be_booted():
    assert LLM(max_model_len=1, max_num_seqs=1, max_num_batched_tokens=8, boot_check="off").loop.scheduler.idle
