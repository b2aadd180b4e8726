"""The whole engine on a GPU: one set of bits on every path, a step ahead or not, and nothing cold after ready.

The model is small and random: two layers, one with a sliding window, so that contexts reach beyond a split of the keys.
Engines are shared, as a start takes seconds. Some are roomy, some so tight that requests wait, are cut into chunks,
preempted and moved.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from preheat import LLM, SamplingParams
from preheat.backends.cuda.attention.work import SPLIT
from preheat.backends.cuda.sampling.sampler import CudaSampler
from preheat.core import Level
from preheat.execution.input_batch import Packer
from preheat.schedule.running import RunningSequences
from preheat.schedule.scheduler import Scheduler
from preheat.warmup.cold_monitor import ColdMonitor
from preheat.warmup.cold_sources import ColdSources
from preheat.warmup.record import Record
from tests.cpu.test_compaction import forgets_tables, move_everything
from tests.cpu.test_random_requests import DRAWS, VOCAB, draw, run
from tests.tokenizers import thinking

DEVICE = "cuda"
REQUESTS, LENGTH = 60, 640
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": False,
    "use_sliding_window": True, "sliding_window": 90, "max_window_layers": 1,
}  # fmt: skip
ROOMY: dict[str, Any] = {
    "device": DEVICE, "load_format": "dummy", "max_model_len": LENGTH, "max_num_seqs": 64,
    "max_num_batched_tokens": 512, "block_size": 64, "num_gpu_blocks_override": 700, "boot_check": "off",
}  # fmt: skip
TIGHT = ROOMY | {
    "block_size": 16, "num_gpu_blocks_override": 44, "max_num_seqs": 12, "max_num_batched_tokens": 48,
    "max_num_prefill_seqs": 3, "defrag_threshold": 0,
}  # fmt: skip
EAGER = ROOMY | {"block_size": 256, "enforce_eager": True, "bucketing_policy": "split"}

FIELDS = tuple(DRAWS)
THINKING = {"reasoning_parser": "qwen3"}  # some requests have a thinking budget

Bits = list[tuple[Any, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    thinking().save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def warm(model: str) -> LLM:
    """An engine that runs everything before ready, and runs only graphs from then on."""
    return LLM(model, **ROOMY, **THINKING, skip_warmup=False, on_cold="raise")


@pytest.fixture(scope="module")
def ahead(model: str) -> LLM:
    """An engine with few blocks, small steps, graphs and a step in flight."""
    return LLM(model, **TIGHT, **THINKING, async_scheduling=True)


@pytest.fixture(scope="module")
def in_step(model: str) -> LLM:
    """An engine with few blocks, small steps and graphs that waits for each step."""
    return LLM(model, **TIGHT, **THINKING, async_scheduling=False)


@pytest.fixture(scope="module")
def eager(model: str) -> LLM:
    """An engine that runs operation by operation, so that faults planted by a test take effect.

    It has steps of prompts and steps of decoding.
    """
    llm = LLM(model, **EAGER, **THINKING)
    programs = [item.program for item in llm.loop.packer.plan.items if item.program]
    llm.loop.executor.compile(programs, os.cpu_count() or 1)  # in parallel, to save time
    return llm


def load() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests with every kind of parameter, of all lengths, some with common beginnings."""
    chance = random.Random(7)
    prompts: list[list[int]] = []
    params = []
    for number in range(REQUESTS):
        length = SPLIT + 30 if number % 20 == 3 else min(int(chance.expovariate(1 / 50)) + 1, 300)
        prompt = [chance.randrange(VOCAB) for _ in range(length)]
        if prompts and chance.random() < 0.3:
            prompt = [*prompts[-1], *prompt][: SPLIT + 30]
        prompts.append(prompt)
        asked = draw(chance, FIELDS)
        params.append(structs.replace(asked, seed=number, max_tokens=chance.randint(8, 50)))
    return prompts, params


def ignore_other_engines(llm: LLM) -> None:
    """Count only cold events of this engine: kernels that other engines of this process build are not cold here."""
    assert isinstance(llm.loop.listener, ColdMonitor)
    llm.loop.listener._sources = ColdSources(llm.loop.executor.backend)


def answers(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Bits:
    """Return tokens, texts, ends and exact log-probabilities.

    Checks that no block stays in use.
    """
    ignore_other_engines(llm)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.loop.scheduler.check()
    assert llm.loop.scheduler.stats().blocks_used == 0
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def forget(llm: LLM) -> None:
    """Empty the prefix cache."""
    llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def expected(warm: LLM) -> Bits:
    forget(warm)
    return answers(warm, *load())


# First, before other engines build anything in this process.
def test_nothing_is_cold_and_nothing_is_missed(warm: LLM) -> None:
    assert run(warm, 400, seed=1, every=FIELDS) == {"done": 400}
    record = Record.from_json(warm.loop.listener.report())
    assert not any(record.cold.values()), record.events
    assert record.misses == {}


def test_without_warm_up_first_runs_are_told(eager: LLM) -> None:
    assert run(eager, 30, seed=1, every=FIELDS) == {"done": 30}
    assert Record.from_json(eager.loop.listener.report()).cold["first run"] >= 5


def test_alone_and_with_its_prefix_in_the_cache_a_request_gets_the_same(warm: LLM, expected: Bits) -> None:
    prompts, params = load()
    forget(warm)
    for number in (0, 3, 4, 11, 23, 43):
        assert answers(warm, prompts[number : number + 1], params[number : number + 1]) == [expected[number]]
    hits = warm.loop.scheduler.stats().prefix_hits
    assert answers(warm, prompts, params) == expected
    assert warm.loop.scheduler.stats().prefix_hits > hits


@pytest.mark.parametrize("form", ["ahead", "in_step"])
def test_chunks_preemption_compaction_and_working_ahead_change_no_bit(
    form: str, expected: Bits, request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(form)
    assert llm.loop.overlap is (form == "ahead")
    forget(llm)
    assert answers(llm, *load()) == expected
    stats = llm.loop.scheduler.stats()
    assert min(stats.preemptions, stats.blocks_moved, stats.prefix_hits) > 0


def test_eager_in_two_phases_and_large_blocks_changes_no_bit(eager: LLM, expected: Bits) -> None:
    forget(eager)
    assert answers(eager, *load()) == expected


def test_moving_every_block_changes_no_bit(in_step: LLM, expected: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "compact", move_everything)
    forget(in_step)
    some = [part[:20] for part in load()]
    assert answers(in_step, *some) == expected[:20]


@pytest.mark.parametrize("fault", ["tables", "contents"])
def test_a_swap_of_one_without_the_other_is_noticed(
    fault: str, in_step: LLM, expected: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "compact", move_everything)
    if fault == "tables":
        monkeypatch.setattr(RunningSequences, "swap", forgets_tables)
    else:
        monkeypatch.setattr(in_step.loop.executor, "swap", lambda swaps: None)
    forget(in_step)
    some = [part[:20] for part in load()]
    assert answers(in_step, *some) != expected[:20]


def test_a_token_that_is_not_fed_back_is_noticed(ahead: LLM, expected: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is told that each newly drawn token was 0."""
    tell = Packer._write_tokens

    def wrong(self: Packer, columns: list[np.ndarray], *rest: Any) -> None:
        tell(self, columns, *rest)
        np.maximum(columns[0], 0, out=columns[0])

    monkeypatch.setattr(Packer, "_write_tokens", wrong)
    forget(ahead)
    some = [part[:20] for part in load()]
    assert answers(ahead, *some) != expected[:20]


def test_a_norm_that_looks_at_its_batch_is_noticed(eager: LLM, expected: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's rounding depends on the number of rows."""
    from preheat.backends.cuda.pointwise import norm

    right = norm.CudaNorm.add
    monkeypatch.setattr(norm.CudaNorm, "add", lambda self, x, *rest: right(self, x, *rest) * (1 + 2**-7 * (len(x) > 8)))
    forget(eager)
    some = [part[:20] for part in load()]
    assert answers(eager, *some) != expected[:20]


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
SEEDED = structs.replace(GREEDY, temperature=0.9, top_p=0.9, top_k=50, seed=11)
PENALISED = structs.replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=3, stop_token_ids=[5])


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], set[Level]]:
    """Return a function that records the levels of an engine's sampling from now on."""

    def watch(llm: LLM) -> set[Level]:
        samples, found = llm.loop.executor.samples, set[Level]()
        right = samples.run
        monkeypatch.setattr(samples, "run", lambda key, **how: (found.add(key.level), right(key, **how))[1])
        return found

    return watch


def side_by_side(llm: LLM, kinds: Sequence[SamplingParams]) -> Bits:
    """Return the answers of one row of each kind, in one batch from beginning to end."""
    forget(llm)
    return answers(llm, [[7 + i, 8, 9] for i in range(len(kinds))], kinds)


def test_a_row_has_the_same_token_at_every_level(warm: LLM, levels: Callable[[LLM], set[Level]]) -> None:
    found = levels(warm)
    alone = side_by_side(warm, [GREEDY])
    assert found == {Level.GREEDY}
    found.clear()
    beside_seeded = side_by_side(warm, [GREEDY, SEEDED])
    assert found == {Level.FILTERED}
    found.clear()
    beside_all = side_by_side(warm, [GREEDY, SEEDED, PENALISED])
    assert found == {Level.FULL}
    assert alone == beside_seeded[:1] == beside_all[:1]
    assert beside_seeded[1:] == beside_all[1:2]


def test_a_level_with_logits_of_its_own_is_noticed(eager: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = side_by_side(eager, [GREEDY])
    assert side_by_side(eager, [GREEDY, PENALISED])[:1] == alone
    right = CudaSampler._edit
    monkeypatch.setattr(CudaSampler, "_edit", lambda self, *rest: right(self, *rest).roll(1, 1))
    assert side_by_side(eager, [GREEDY, PENALISED])[:1] != alone
