"""Compaction in the real engine: bits are the same wherever blocks lie.

A swap that fails is never silent.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.core import Swaps
from preheat.errors import PreheatError, SettingsError
from preheat.execution.executor import Executor
from preheat.schedule.defrag import padded_size
from preheat.schedule.running import RunningSequences
from preheat.schedule.scheduler import Scheduler
from preheat.warmup.cold_monitor import ColdMonitor

NEVER = 1_000_000
TIGHT: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "block_size": 16, "num_gpu_blocks_override": 22, "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}  # fmt: skip
IN_PLACE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 640, "block_size": 256, "num_gpu_blocks_override": 9, "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
}  # fmt: skip

Seen = list[tuple[list[int], list[float]]]


def load(count: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters: common beginnings, greedy and seeded, some that end long before others."""
    rng = random.Random(0)
    common = [rng.randrange(10, 4096) for _ in range(longest)]
    prompts, params = [], []
    for number in range(count):
        shared = rng.choice([0, longest // 2, longest])
        prompts.append(common[:shared] + [rng.randrange(10, 4096) for _ in range(rng.randint(1, longest))])
        how: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number, "top_p": 0.9}
        params.append(SamplingParams(**how, max_tokens=rng.randint(2, 40), ignore_eos=True, logprobs=2))
    return prompts, params


def bits(llm: LLM, count: int = 14, longest: int = 40) -> Seen:
    seen = []
    for output in llm.generate(*load(count, longest), use_tqdm=False):
        choice = output.outputs[0]
        assert choice.logprobs is not None
        seen.append((choice.token_ids, [v.logprob for entry in choice.logprobs for v in entry.values()]))
    llm.loop.scheduler.check()
    assert llm.loop.scheduler.pool.num_used == 0
    return seen


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the model is small, and more threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def model(shallow: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TIGHT, "model", shallow)
        patch.setitem(IN_PLACE, "model", shallow)
        yield


@pytest.fixture(scope="module")
def expected() -> Seen:
    """Return the bits of a cache that needs no preemption, without compaction."""
    return bits(LLM(**{**TIGHT, "num_gpu_blocks_override": 400}, defrag_threshold=NEVER))


@pytest.mark.parametrize("caching", [True, False])
def test_compacting_at_every_step_changes_no_bit(expected: Seen, caching: bool) -> None:
    llm = LLM(**TIGHT, defrag_threshold=0, enable_prefix_caching=caching)
    assert bits(llm) == expected
    stats = llm.loop.scheduler.stats()
    assert stats.blocks_moved > 0
    assert stats.preemptions > 0
    assert (stats.prefix_hits > 0) == caching


def move_everything(scheduler: Scheduler) -> Swaps:
    """Exchange half of all blocks, used or not, with the other half: far worse than any compaction."""
    numbers = np.random.default_rng(scheduler.stats().steps).permutation(np.arange(1, scheduler.pool.num_blocks))
    pairs = numbers[: len(numbers) // 2 * 2].reshape(-1, 2).astype(np.int32)
    scheduler.running.swap(pairs)
    return Swaps(pairs, padded_size(len(pairs)))


def at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move everything before every step. A loop asks for no compaction beside a step unless blocks are scattered."""
    monkeypatch.setattr(Scheduler, "compact", move_everything)
    monkeypatch.setattr(Scheduler, "scattered", True)


def test_moving_every_block_at_every_step_changes_no_bit(expected: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    at_every_step(monkeypatch)
    llm = LLM(**TIGHT)
    assert bits(llm) == expected
    assert llm.loop.scheduler.stats().preemptions > 0
    assert llm.loop.scheduler.stats().prefix_hits > 0


def forgets_tables(self: RunningSequences, pairs: np.ndarray) -> None:
    """Plant a swap that leaves the tables as they are.

    The pool need not know, as the engine checks its books only when idle.
    """


@pytest.mark.parametrize("fault", ["tables", "contents"])
def test_control_a_swap_of_one_without_the_other_is_noticed(
    expected: Seen, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_every_step(monkeypatch)
    if fault == "tables":
        monkeypatch.setattr(RunningSequences, "swap", forgets_tables)
    else:
        monkeypatch.setattr(Executor, "swap", lambda self, swaps: None)
    assert bits(LLM(**TIGHT)) != expected


def test_reading_in_place_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bits(LLM(**IN_PLACE, contiguous_pa=False, defrag_threshold=NEVER), 8, 280)
    llm = LLM(**IN_PLACE, contiguous_pa=True, defrag_threshold=0)
    assert bits(llm, 8, 280) == right
    stats = llm.loop.scheduler.stats()
    assert min(stats.prefix_hits, stats.blocks_moved) > 0
    at_every_step(monkeypatch)
    assert bits(LLM(**IN_PLACE, contiguous_pa=True), 8, 280) == right


def test_a_failed_swap_ends_running_requests_and_empties_the_cache(
    expected: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(**TIGHT, defrag_threshold=0)

    def broken(swaps: Swaps) -> None:
        llm.loop.executor.cache.data.fill_(7.0)
        raise RuntimeError("half way")

    monkeypatch.setattr(llm.loop.executor, "swap", broken)
    with pytest.raises(PreheatError, match="RuntimeError: half way"):
        bits(llm)
    monkeypatch.undo()
    assert bits(llm) == expected


def watched(on_cold: str) -> tuple[LLM, ColdMonitor]:
    """Return an engine that believes that it has run everything but swaps."""
    llm = LLM(**TIGHT, defrag_threshold=0)
    guard = llm.loop.listener
    assert isinstance(guard, ColdMonitor)
    guard.on_cold = on_cold
    guard._sources.sources.clear()
    for entry in guard.record.entries:
        entry.outcome = "pending" if entry.kind == "swap" else "ready"
    return llm, guard


def test_the_guard_counts_swaps_and_knows_the_first(expected: Seen) -> None:
    llm, guard = watched("count")
    assert bits(llm) == expected
    entries = [entry for entry in guard.record.entries if entry.kind == "swap"]
    hit = [entry for entry in entries if entry.hits]
    assert hit
    assert sum(entry.hits for entry in hit) > len(hit)
    assert {entry.outcome for entry in hit} == {"ready"}
    assert {entry.outcome for entry in entries if not entry.hits} <= {"pending"}
    assert guard.record.cold["first run"] == sum(guard.record.cold.values()) == len(hit)
    assert [event.detail for event in guard.record.events] == [f"(swap, {entry.shape['size']})" for entry in hit]


def test_a_cold_swap_fails_its_requests_where_that_is_asked_for(expected: Seen) -> None:
    llm, guard = watched("raise")
    with pytest.raises(PreheatError, match=r"cold \(first run: \(swap, 8\)\)"):
        bits(llm)
    for entry in guard.record.entries:
        entry.outcome = "ready"
    assert bits(llm) == expected


def test_only_unified_batches_are_compacted() -> None:
    for policy, moves in (("unified", True), ("split", False)):
        llm = LLM(**TIGHT, bucketing_policy=policy, defrag_threshold=0)
        bits(llm, 8)
        assert bool(llm.loop.scheduler.stats().blocks_moved) is moves
        planned = [item.pairs for item in llm.loop.packer.plan.items if item.kind == "swap"]
        assert planned == ([8, 16] if moves else [])  # 21 blocks: at most ten are swapped at once


def test_debug_lines_are_for_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        caplog.handler.setLevel(logging.NOTSET)  # as the server's handler: loggers decide
        bits(LLM(**TIGHT, defrag_threshold=0), 8)
        assert "Defragmentation" not in caplog.text
        llm = LLM(**TIGHT, defrag_threshold=0, debug=("defrag",))
        bits(llm, 8)
        lines = [record.args for record in caplog.records if record.name == "preheat.schedule.defrag"]
        assert sum(moved for moved, *_ in lines) == llm.loop.scheduler.stats().blocks_moved
        assert all(before > after == 0 for *_, before, after in lines)
        LLM(**TIGHT)
    assert not logging.getLogger("preheat.schedule.defrag").isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"defrag_with_graphs": True}, "no graphs on a CPU"),
        ({"contiguous_pa": True, "block_size": 64}, "set block_size to 256"),
        ({"debug": ("defrog",)}, "did you mean defrag"),
        ({"defrag_threshold": -1}, "at least 0"),
    ],
)
def test_wrong_compaction_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        LLM(**options)
    LLM(**TIGHT, defrag_with_graphs=False)
