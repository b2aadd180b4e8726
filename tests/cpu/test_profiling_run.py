"""The profiling run measures a step's memory on the real model before memory is divided."""

from __future__ import annotations

import logging
import mmap

import pytest

from preheat import LLM
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import SettingsError
from preheat.execution.executor import Executor
from preheat.plan.plan import Plan
from preheat.utils import memory
from preheat.warmup import fitting
from preheat.warmup.record import Record

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 16, "boot_check": "off"}
MIB = 2**20
SLACK = MIB
"""Tolerance in bytes: the kernel's count lags, since each processor counts pages for itself and reports in batches."""


def boot(**options) -> tuple[Plan, Record]:
    llm = LLM(**SMALL | {"skip_warmup": False, "cache_dir": "off"} | options)
    return llm.loop.packer.plan, Record.from_json(llm.loop.listener.report())


def test_the_peak_includes_memory_freed_during_the_run():
    def run() -> None:
        pages = mmap.mmap(-1, 64 * MIB)
        pages.write(b"x" * 64 * MIB)
        pages.close()

    assert memory.peak_memory(run) >= 64 * MIB - SLACK
    assert memory.peak_memory(lambda: None) < 16 * MIB  # the peak of the run before is forgotten


def test_where_the_kernel_keeps_one_peak_it_counts(monkeypatch):
    write = memory.Path.write_text
    monkeypatch.setattr(memory.Path, "write_text", lambda self, text: write(memory.Path("/proc/no/such/file"), text))
    assert memory.peak_memory(lambda: None) >= 0


@pytest.mark.parametrize("policy", ["unified", "split"])
def test_the_largest_bucket_runs_through_the_model_before_there_is_a_cache(policy, monkeypatch):
    ran = []
    execute = Executor.execute

    def watch(self, batch):
        ran.append((batch.bucket, self.cache.data.shape[1]))
        return execute(self, batch)

    monkeypatch.setattr(Executor, "execute", watch)
    plan, record = boot(bucketing_policy=policy)
    assert ran[0] == (plan.largest, 2)
    assert {blocks for _, blocks in ran[1:]} == {plan.limits.num_blocks}
    assert plan.largest.tokens == max(item.bucket.tokens for item in plan.items if hasattr(item, "bucket"))
    assert "profiling_run" in record.memory


def test_the_measured_peak_is_left_out_of_the_cache(monkeypatch):
    """A device that takes a share of its free memory leaves the measured peak out of the cache."""
    monkeypatch.setattr(CpuBackend, "free_memory", lambda self: 64 * MIB)
    monkeypatch.setattr(CpuBackend, "kv_cache_memory", lambda self: None)
    found = {}
    for peak in (0, 24 * MIB):
        monkeypatch.setattr(CpuBackend, "peak_memory", lambda self, run, peak=peak: run() or peak)
        plan, record = boot(max_num_seqs=64, max_model_len=2048)
        assert record.memory["usable"] == int((64 * MIB - peak) * 0.9)
        found[peak] = plan.limits.num_blocks
    assert found[24 * MIB] < found[0] * 0.7


def test_a_step_that_does_not_fit_names_the_option_to_change(monkeypatch):
    def fail(self, batch):
        raise MemoryError("no room")

    monkeypatch.setattr(Executor, "execute", fail)
    with pytest.raises(SettingsError, match=r"a step of .* lower --max-num-batched-tokens .*no room"):
        boot()


def test_the_profiling_run_is_skipped_where_nothing_needs_it(monkeypatch):
    monkeypatch.setattr(fitting, "profile_run", None)
    _, record = boot(skip_warmup=True)
    assert "profiling_run" not in record.memory


def test_the_lines_of_a_start(caplog):
    with caplog.at_level(logging.DEBUG):
        boot()
    info = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(info) <= 20
    for begin in ("Loading model weights took in total ", "Model profiling run took ", "Free device memory: ",
                  "Mixed bucket config ", "# device blocks: ", "Initializing cache engine took ", "Warmup finished in ",
                  "init_cache_engine took in total "):  # fmt: skip
        assert [line for line in info if line.startswith(begin)], begin
    (division,) = (line for line in info if line.startswith("Free device memory: "))
    assert "(VLLM_GRAPH_RESERVED_MEM=0.1; execution mode llvm captures none)" in division
    assert not [line for line in info if "device memory" in line and line != division]
    assert not [line for line in info if line.startswith(("[Warmup]", "temp=", "Pre-loading"))]
    debug = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    for begin in ("[Warmup][Mixed][1/", "temp=0.0, top_p=1.0", "Pre-loading model weights on cpu took "):
        assert [line for line in debug if line.startswith(begin)], begin


@pytest.mark.parametrize("asked", [{"debug": ("warmup",)}, {"log_step_graph_compilation": True}], ids=str)
def test_who_asks_sees_every_item(asked, caplog):
    with caplog.at_level(logging.INFO):
        plan, _ = boot(**asked)
    told = [message for message in caplog.messages if message.startswith("[Warmup]")]
    assert len(told) == sum(item.kind in ("mixed", "decode") for item in plan.items)
    assert "Sampler warmup completed successfully" in caplog.messages
