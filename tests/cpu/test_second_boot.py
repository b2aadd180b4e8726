"""Two boots of the real engine: the second finds the first's records.

A CPU keeps the budget of graphs too.
"""

from __future__ import annotations

import logging
import mmap
import re
from types import SimpleNamespace

import pytest

from preheat import LLM, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import NotInvariant
from preheat.plan.cost import ModelSizes
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.graphs import CountedGraphs, divide_memory
from preheat.warmup.record import Record
from preheat.warmup.steps import Steps

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def boot(folder, **options) -> LLM:
    return LLM(
        **SMALL | {"skip_warmup": False, "on_cold": "raise", "cache_dir": str(folder), "dtype": "bfloat16"} | options
    )


def record(llm: LLM) -> Record:
    return Record.from_json(llm.loop.listener.report())


def outcomes(llm: LLM) -> set[str]:
    planned = {item.name for item in llm.loop.packer.plan.items}
    return {entry.outcome for entry in record(llm).entries if entry.name in planned}


def test_a_second_boot_reuses_and_another_one_does_not(tmp_path):
    first = boot(tmp_path)
    assert outcomes(first) == {"ready"}
    second = boot(tmp_path)
    assert outcomes(second) == {"reused"}
    assert record(second).fingerprint == record(first).fingerprint != ""
    measured = {e.name: e.compile_seconds + e.touch_seconds for e in record(first).entries}
    estimated = {item.name: item.estimate.seconds for item in second.loop.packer.plan.items if item.kind == "decode"}
    assert estimated == {name: measured[name] for name in estimated}
    tokens = [llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for llm in (first, second)]
    assert tokens[0] == tokens[1]
    assert outcomes(boot(tmp_path, dtype="float32")) == {"ready"}
    assert len(list(tmp_path.glob("*/record.json"))) == 2


def test_the_stages_of_a_boot_are_measured_and_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        llm = boot(tmp_path)
    steps = record(llm).steps
    names = [
        "Loading model weights",
        "Model profiling run",
        "Initializing cache engine",
        "warm-up",
        "Running dummy requests",
        "Waiting for the digest of the weights",
    ]
    assert [step.name for step in steps] == names
    assert all(step.seconds > 0 for step in steps)
    assert [step.started for step in steps] == sorted(step.started for step in steps)
    said = "\n".join(caplog.messages)
    for line in (
        "Loading model weights took in total ", "Model profiling run took ", "Free device memory: ",
        "# device blocks: ", ", # CPU blocks: 0",
        "Initializing cache engine took ",
    ):  # fmt: skip
        assert line in said


def test_a_second_boot_knows_the_most_memory_of_a_step(tmp_path, caplog):
    first = boot(tmp_path)
    with caplog.at_level(logging.INFO):
        second = boot(tmp_path)
    assert "Model profiling run" not in [step.name for step in record(second).steps]
    assert any(line.startswith("Model profiling run left out: ") for line in caplog.messages)
    assert record(second).memory["profiling_run"] == record(first).memory["profiling_run"]
    other = boot(tmp_path, max_num_batched_tokens=64)
    assert "Model profiling run" in [step.name for step in record(other).steps]


def test_the_first_step_of_a_second_boot_is_compared_with_a_later_one(tmp_path, monkeypatch):
    boot(tmp_path)
    logits, calls = DummySteps.logits, []

    def changed(self):
        calls.append(1)
        return logits(self) + (len(calls) == 1)

    monkeypatch.setattr(DummySteps, "logits", changed)
    with pytest.raises(NotInvariant, match="the first step of the process gave other logits"):
        boot(tmp_path)


def test_several_steps_in_total(caplog):
    steps = Steps(CpuBackend())
    with caplog.at_level(logging.INFO), steps.log("Both", in_total=True), steps("one"):
        kept = mmap.mmap(-1, 32 << 20)  # new pages, whatever the allocator has in store
        kept.write(b"x" * len(kept))
    assert [step.name for step in steps.done] == ["one"]
    assert steps.done[0].bytes >= len(kept) // 2
    assert re.match(r"one took \d", caplog.messages[0])
    assert re.match(r"Both took in total \d", caplog.messages[1])


@pytest.mark.parametrize("policy", ["unified", "split"])
def test_the_twin_counts_graphs_of_the_engines_own_plan(policy, caplog):
    llm = LLM(**SMALL, bucketing_policy=policy)
    plan, spec = llm.loop.packer.plan, llm.loop.executor.decoder.spec
    sizes, block_bytes = ModelSizes.of(spec), 16 * spec.kv_bytes_per_token(2)
    free = plan.limits.num_blocks * block_bytes * 2
    split = divide_memory(llm.settings, "graphs", free, block_bytes)
    seen = Record.of(plan)
    CountedGraphs(SimpleNamespace(plan=plan), seen, llm.settings, split, sizes).capture()
    forward = [entry for entry in seen.entries if entry.kind in ("mixed", "prompt", "decode") and not entry.fallback]
    assert 0 < seen.memory["graphs"] <= seen.memory["graph_pool"]
    assert sum(entry.bytes for entry in forward) == seen.memory["graphs"]
    assert all(entry.graph or entry.reason for entry in forward if entry.outcome != "dropped")
