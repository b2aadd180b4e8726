"""The guard on the real engine.

A cold event after ready is counted, told, or fails its step and no other.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cpu.sampler import CpuSampler
from preheat.core import Level
from preheat.errors import ColdStep, PreheatError
from preheat.frontend.request_state import RequestState
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.dispatcher import WarnOnce
from preheat.warmup.cold_monitor import FIRST_RUN, ColdMonitor
from preheat.warmup.cold_sources import ColdSources
from preheat.warmup.record import MAX_EVENTS, Record

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=2, max_model_len=64)


def watch(llm: LLM, on_cold: str, *, hot: bool = True) -> ColdMonitor:
    """Return a guard with every source of this platform.

    Every item of its record has run (``hot``), or none.
    """
    plan = llm.loop.packer.plan
    record = Record.of(plan)
    for entry in record.entries:
        if hot and entry.outcome == "pending":
            entry.outcome = "ready"
    guard = ColdMonitor(record, plan, on_cold, ColdSources(CpuBackend()))
    llm.loop.listener = guard
    return guard


def compile_something() -> None:
    """Trace a new function with Dynamo, and hand it to no compiler."""
    made: dict[str, Any] = {}
    exec("def triple(x): return x * 3", made)
    torch.compile(made["triple"], backend="eager", dynamic=False)(torch.ones(3))


def serve(llm: LLM, count: int, then_compile: int = -1) -> list[RequestState]:
    """Run ``count`` requests to their end; compile something before step ``then_compile``."""
    states = [
        llm.frontend.prepare(PROMPT, GREEDY, request_id=str(i), add_special_tokens=False, cap_length=True)
        for i in range(count)
    ]
    llm.frontend.start(states)
    step = 0
    while llm.frontend.busy:
        if step == then_compile:
            compile_something()
        llm.loop.take(0)
        llm.loop.step()
        llm._receive()
        step += 1
    llm.loop.scheduler.check()
    assert llm.loop.scheduler.stats().blocks_used == 0
    return states


def tokens(state: RequestState) -> list[int]:
    return state.output().outputs[0].token_ids


def test_a_module_that_a_step_imports_is_cold(llm, tmp_path, monkeypatch):
    (tmp_path / "rare_branch.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    sample = CpuSampler.sample

    def lazily(self: CpuSampler, level: Level, logits: torch.Tensor) -> None:
        importlib.import_module("rare_branch")
        sample(self, level, logits)

    monkeypatch.setattr(CpuSampler, "sample", lazily)
    guard = watch(llm, "raise")
    failed, served = serve(llm, 1) + serve(llm, 1)
    assert "import: rare_branch was imported" in str(failed.error)
    assert guard.record.cold == {"import": 1}
    assert served.error is None


@pytest.mark.parametrize("on_cold", ["off", "count", "warn", "raise"])
def test_a_hot_engine_is_quiet(llm, on_cold, caplog):
    guard = watch(llm, on_cold)
    with caplog.at_level(logging.WARNING):
        states = serve(llm, 3)
    assert [state.error for state in states] == [None] * 3
    assert guard.record.cold == {}
    assert guard.record.events == []
    assert caplog.records == []
    assert bool(sum(entry.hits for entry in guard.record.entries)) == (on_cold != "off")


@pytest.mark.parametrize("on_cold", ["off", "count", "warn"])
def test_a_compilation_is_counted_and_reported(llm, on_cold, caplog):
    guard = watch(llm, on_cold)
    with caplog.at_level(logging.WARNING):
        states = serve(llm, 1, then_compile=2)
    assert [len(tokens(state)) for state in states] == [4]
    if on_cold == "off":
        assert guard.record.cold == {}
    else:
        assert guard.record.cold["dynamo"] == 1
        (event,) = [event for event in guard.record.events if event.source == "dynamo"]
        assert event.detail.startswith("triple (")
    assert ("Cold after ready: dynamo: triple" in caplog.text) == (on_cold == "warn")


@pytest.mark.parametrize("booted", [True, False])
def test_compilations_of_another_booting_engine_do_not_count(llm, booted):
    guard = watch(llm, "count")
    compile_something()
    if booted:
        plan = llm.loop.packer.plan
        ColdMonitor(Record.of(plan), plan, "count", ColdSources(CpuBackend()))
    serve(llm, 1)
    assert ("dynamo" in guard.record.cold) == (not booted)


def test_raise_fails_the_steps_requests_with_the_sources_name_and_no_others(llm):
    guard = watch(llm, "raise")
    expected = tokens(serve(llm, 1)[0])
    states = serve(llm, 4, then_compile=2)  # two run at a time: the other two wait
    assert guard.record.cold["dynamo"] == 1
    errors = [state.error for state in states[:2]]
    assert all(type(error) is ColdStep and "dynamo: triple" in str(error) for error in errors), errors
    assert [tokens(state) for state in states[2:]] == [expected] * 2
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_an_engine_with_on_cold_raise_watches_from_its_first_request():
    llm = LLM(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, skip_warmup=False, on_cold="raise")
    expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    compile_something()
    with pytest.raises(PreheatError, match="dynamo: triple"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_an_offline_cold_step_raises_an_error_that_names_its_cause(llm):
    watch(llm, "raise")
    compile_something()
    with pytest.raises(PreheatError, match="dynamo: triple"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_without_warm_up_each_program_is_cold_once(llm):
    guard = watch(llm, "count", hot=False)
    serve(llm, 2)
    first = guard.record.cold[FIRST_RUN]
    assert first >= 3  # at least a prefill, a decode and the sampler
    assert set(guard.record.cold) == {FIRST_RUN}
    serve(llm, 2)
    assert guard.record.cold[FIRST_RUN] == first
    ran = [entry for entry in guard.record.entries if entry.hits]
    assert all(entry.outcome == "ready" and "first run" in entry.reason for entry in ran)


def test_steps_of_the_same_rows_count_for_the_programs_that_they_ran(llm):
    """Stop tokens are banned for the first three tokens, so these steps draw with another program."""
    guard = watch(llm, "count")
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=3, ignore_eos=False, stop_token_ids=[4095])
    llm.generate([PROMPT], params, use_tqdm=False)
    entries, hits = guard.record.by_name(), dict.fromkeys(Level, 0)
    for item in llm.loop.packer.plan.items:
        if item.program is not None and item.program.level is not None:
            hits[item.program.level] = max(hits[item.program.level], entries[item.name].hits)
    assert hits == {Level.FULL: 3, Level.FILTERED: 0, Level.GREEDY: 5}


def test_only_cold_steps_are_logged_as_cold(llm, caplog):
    """A cold step is told as on vLLM for Gaudi.

    A step beyond the bucket sizes is not, since its fallback is warm.
    """
    with caplog.at_level(logging.WARNING):
        watch(llm, "warn", hot=False)
        serve(llm, 1)
        first = [text for text in caplog.messages if "was not warmed-up!" in text]
        assert "Configuration: (decode, 1) was not warmed-up!" in first
        assert len(first) == len(set(first))
        serve(llm, 1)
        WarnOnce()(StepSize("decode", 9, 9), Bucket.decode(16))
    assert [text for text in caplog.messages if "was not warmed-up!" in text] == first


def test_without_warm_up_raise_fails_first_runs_only(llm):
    watch(llm, "raise", hot=False)
    failed = 0
    for _ in range(8):
        (state,) = serve(llm, 1)
        if state.error is None:
            break
        assert FIRST_RUN in str(state.error)
        failed += 1
    assert failed > 0
    assert len(tokens(state)) == 4


def test_all_events_are_counted_and_some_are_kept(llm):
    guard = watch(llm, "count")
    for _ in range(MAX_EVENTS + 3):
        guard._report([("dynamo", "again")])
    assert guard.record.cold == {"dynamo": MAX_EVENTS + 3}
    assert len(guard.record.events) == MAX_EVENTS
    assert Record.from_json(guard.report()).cold == guard.record.cold
