"""Warm-up on the real engine: every item is run and booked, and nothing of it stays behind."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.errors import PreheatError, SettingsError
from preheat.execution.executor import Executor
from preheat.execution.input_batch import InputBatch
from preheat.warmup.record import Record

SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "max_model_len": 96, "block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
EVERYTHING = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5,
    repetition_penalty=1.2, logit_bias={5: 1.0}, min_tokens=2, stop_token_ids=[7], seed=1, logprobs=5,
    prompt_logprobs=5, max_tokens=6,
)  # fmt: skip


def warm(**options) -> LLM:
    return LLM(**SMALL | {"skip_warmup": False, "on_cold": "raise"} | options)


def record(llm: LLM) -> Record:
    return Record.from_json(llm.loop.listener.report())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return warm()


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 12, "num_gpu_blocks_override": 7}], ids=["", "few blocks"])
@pytest.mark.parametrize("policy", ["unified", "split"])
def test_every_item_is_accounted_for(policy, limits):
    llm = warm(bucketing_policy=policy, **limits)
    plan, entries = llm.loop.packer.plan, record(llm).entries
    assert [entry.name for entry in entries] == [*(i.name for i in plan.items), *(str(d.bucket) for d in plan.dropped)]
    assert {entry.outcome for entry in entries[: len(plan.items)]} == {"ready"}
    assert {(entry.outcome, bool(entry.reason)) for entry in entries[len(plan.items) :]} <= {("dropped", True)}
    assert all(entry.touch_seconds > 0 for entry in entries[: len(plan.items)])


def test_nothing_is_cold_afterwards(llm):
    results = llm.generate(["def add(a, b):"] * 5, [GREEDY, EVERYTHING, *[SamplingParams(max_tokens=9)] * 3])
    assert len(results) == 5
    assert not any(record(llm).cold.values())
    assert sum(entry.hits for entry in record(llm).entries if entry.kind in ("mixed", "decode")) > 0


def test_a_bucket_runs_one_layer_of_each_kind_at_first(monkeypatch):
    """A bucket runs one layer of each kind.

    Whole steps are left to the checks.
    """
    forward, layers = Executor._forward, []

    def count(self: Executor, bucket, which, tap=None):
        layers.append((bucket, len(which)))
        return forward(self, bucket, which, tap)

    monkeypatch.setattr(Executor, "_forward", count)
    llm = warm(boot_check="off", determinism_warmup_iterations=0)
    profiled = next(index for index, (_, count) in enumerate(layers) if count == 1)
    first = dict(reversed(layers[profiled:]))
    assert {bucket for bucket, _ in layers[:profiled]} <= {llm.loop.packer.plan.largest, min(first)}
    assert set(first) == set(llm.loop.packer.plan.dispatcher.buckets)
    assert set(first.values()) == {1}


def test_without_warm_up_everything_is_cold_once():
    llm = warm(skip_warmup=True, on_cold="count")
    assert {entry.outcome for entry in record(llm).entries if entry.kind not in ("dropped", "function")} <= {
        "pending",
        "dropped",
    }
    llm.generate("def add(a, b):", GREEDY)
    first = record(llm).cold
    assert {source for source, count in first.items() if count} == {"first run"}
    assert len(record(llm).events) == sum(first.values()) >= 3  # a prompt, a decode and the sampler
    llm.generate("def add(a, b):", GREEDY)
    assert record(llm).cold == first


def test_raise_fails_the_step_and_the_engine_goes_on(llm):
    entries = llm.loop.listener.record.entries
    cold = [entry for entry in entries if entry.kind == "decode"]
    for entry in cold:
        entry.outcome = "failed"
    with pytest.raises(PreheatError, match="first run"):
        llm.generate("def add(a, b):", GREEDY)
    for entry in cold:
        entry.outcome = "ready"
    llm.loop.scheduler.check()
    assert llm.loop.scheduler.idle
    assert llm.generate("def add(a, b):", GREEDY)[0].outputs[0].token_ids


def test_raise_without_warm_up_is_refused():
    with pytest.raises(SettingsError, match="skip_warmup"):
        LLM(skip_warmup=True, on_cold="raise")


def test_nothing_stays_behind():
    chance = torch.get_rng_state(), np.random.get_state()[1].copy()
    llm = warm(boot_check="off")  # test_boot_check looks at its real blocks
    scheduler, executor = llm.loop.scheduler, llm.loop.executor
    scheduler.check()
    assert scheduler.idle
    assert scheduler.slots.num_free == SMALL["max_num_seqs"]
    assert scheduler.slots.request == [None] * SMALL["max_num_seqs"]
    assert not scheduler.slots.block_table.any()
    assert scheduler.slots.many_stop_ids == {}
    assert scheduler.stats().steps == 0
    counts = executor.sampler._host.counts
    assert not counts.output.any()
    assert not counts.seen.any()
    assert (counts._owner == -1).all()
    assert not executor.cache.data[:, 2:].any()  # warm-up wrote the pad block, the loop warm-up one that it gave back
    assert scheduler.pool.num_used == 0
    assert torch.equal(torch.get_rng_state(), chance[0])
    assert (np.random.get_state()[1] == chance[1]).all()


def test_warm_up_changes_no_token(llm):
    cold = warm(skip_warmup=True, on_cold="off")
    params = [GREEDY, EVERYTHING, SamplingParams(seed=3, max_tokens=9)]
    texts = [[r.outputs[0].token_ids for r in each.generate(["import os"] * 3, params)] for each in (llm, cold)]
    assert texts[0] == texts[1]


def test_out_of_memory_drops_the_item_and_errors_are_loud(monkeypatch, caplog):
    prepare = Executor.prepare

    def fail(self: Executor, batch: InputBatch) -> None:
        if batch.bucket.phase == "decode" and batch.bucket.rows == 2:
            raise MemoryError("no room")
        if batch.bucket.phase == "decode" and batch.bucket.rows == 4:
            raise ValueError("broken")
        prepare(self, batch)

    monkeypatch.setattr(Executor, "prepare", fail)
    llm = warm()
    found = {entry.name: (entry.outcome, entry.reason) for entry in record(llm).entries if entry.kind == "decode"}
    assert found["(decode, 2)"] == ("dropped", "out of memory: no room")
    assert found["(decode, 4)"] == ("failed", "ValueError: broken")
    assert found["(decode, 1)"] == ("ready", "")
    assert "(decode, 4) failed" in caplog.text


def test_the_log_has_the_lines_of_vllm_for_gaudi(caplog):
    with caplog.at_level(logging.INFO):
        llm = warm(
            bucketing_policy="split",
            bucketing_strategy="linear",
            prompt_bs_bucket_step=1,
            prompt_bs_bucket_max=2,
            decode_bs_bucket_step=2,
            debug=("warmup",),
        )
    lines = [message for message in caplog.messages if not message.startswith("[Warmup]")]
    start = next(i for i, line in enumerate(lines) if line.startswith("Warming up sampler with batch sizes: [0, 1,"))
    assert lines[start + 1] == "temp=0.0, top_p=1.0, top_k=0, batch_changed=True"
    assert lines[start + 12] == "temp=0.8, top_p=0.85, top_k=0, batch_changed=False"
    assert lines[start + 13 : start + 15] == ["Starting sampler warmup...", "Sampler warmup completed successfully"]
    assert any(line.startswith("Prompt bucket config (min, step, max_warmup) bs:[1, 1, 2], seq:[") for line in lines)
    assert any(line.startswith("Generated ") and " decode buckets: [(1, " in line for line in lines)
    prompts = [message for message in caplog.messages if message.startswith("[Warmup][Prompt][1/")]
    assert len(prompts) == 1
    assert " seq_len:" in prompts[0]
    assert any(message.startswith("[Warmup][Decode][1/") for message in caplog.messages)
    assert any(line.startswith("Warmup finished in ") for line in lines)
    decodes = [entry for entry in record(llm).entries if entry.kind == "decode" and entry.outcome == "ready"]
    ran = [entry.shape["rows"] for entry in decodes if "the same program as" not in entry.reason]
    assert len(ran) == len(set(ran)) < len(decodes)  # the length of contexts is no part of a program here


def test_the_story_of_three_sequences():
    """Three sequences run prompt (4, 512), decode (4, 512), then (2, 512) when two remain; (4, 640) past 512 tokens."""
    ranges = {
        "prompt_bs": (1, 32, 4),
        "prompt_seq": (128, 128, 1024),
        "decode_bs": (1, 128, 4),
        "decode_seq": (128, 128, 2048),
    }
    named = {
        f"{name}_bucket_{part}": value
        for name, values in ranges.items()
        for part, value in zip(("min", "step", "max"), values, strict=True)
    }
    llm = LLM(
        bucketing_policy="split", bucketing_strategy="linear", max_num_seqs=4, max_num_batched_tokens=4096,
        block_size=128, enable_prefix_caching=False, on_cold="off", **named,
    )  # fmt: skip
    shapes: list[tuple[str, int, int]] = []
    observe = llm.loop.listener.step
    llm.loop.listener.step = lambda batch: (
        shapes.append((batch.bucket.phase, batch.bucket.rows, batch.bucket.longest)), observe(batch)
    )  # fmt: skip
    prompts = [[9] * 412, [8] * 400, [7] * 390]
    lengths = [4, 9, 9]
    llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths])
    assert list(dict.fromkeys(shapes)) == [("prompt", 4, 512), ("decode", 4, 512), ("decode", 2, 512)]
    shapes.clear()
    llm.generate([[9] * 505, [8] * 480, [7] * 350], [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 3)
    assert list(dict.fromkeys(shapes)) == [("prompt", 4, 512), ("decode", 4, 512), ("decode", 4, 640)]
