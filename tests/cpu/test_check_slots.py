"""The boot's cross-check gives back its slots and blocks.

It does so when a check fails, and says why a check could not run.
"""

from __future__ import annotations

import numpy as np
import pytest

from preheat.core import Request, SamplingParams
from preheat.execution.executor import Executor
from preheat.plan.item import NothingToRun
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.transport import InlineTransport
from preheat.verify import boot as boot_module
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.warmup.record import Record

SMALL = {
    "max_num_seqs": 2, "max_num_batched_tokens": 96, "max_model_len": 64, "block_size": 16, "skip_warmup": True,
    "dtype": "float32", "num_gpu_blocks_override": 9,
}  # fmt: skip


@pytest.fixture
def check():
    loop = boot_engine(Settings.load(SMALL), InlineTransport())
    plan, backend = loop.packer.plan, loop.executor.backend
    record = Record.of(plan, model="bundled", platform="cpu", dtype="float32", mode="eager")
    check = BootCheck(CheckRunner(loop.scheduler.pool, loop.packer, loop.executor), record, backend.facts)
    check.begin()
    yield check, loop.scheduler, record
    loop.scheduler.check()


def take_slots(scheduler, count: int) -> list[int]:
    request = Request(1, [1], SamplingParams(temperature=0.0), seed=0, max_tokens=1)
    return [scheduler.slots.take(request, np.ones(1, np.int32)) for _ in range(count)]


@pytest.mark.parametrize("path", ["later run", "chunked", "decode", "compaction"])
def test_without_a_free_slot_a_check_says_so(check, path):
    check, scheduler, record = check
    taken = take_slots(scheduler, 2)
    with pytest.raises(NothingToRun, match="all 2 slots are taken"):
        check.run(path)
    assert scheduler.pool.num_used == record.proof.compared == 0
    for slot in taken:
        scheduler.slots.give_back(slot)
    check.run(path)
    assert record.proof.compared > 0


@pytest.mark.parametrize("path", ["co-batched", "next bucket"])
def test_neighbours_need_slots_too(check, path):
    check, scheduler, _ = check
    taken = take_slots(scheduler, 1)
    with pytest.raises(NothingToRun, match="all 2 slots are taken"):
        check.run(path)
    assert scheduler.pool.num_used == 0
    assert scheduler.slots.num_free == 1
    scheduler.slots.give_back(taken[0])


def test_without_free_blocks_a_check_says_so(check):
    check, scheduler, record = check
    taken = scheduler.pool.allocate(scheduler.pool.num_free)
    with pytest.raises(NothingToRun, match=r"needs 1 blocks, 0 are free"):
        check.run("later run")
    assert scheduler.slots.num_free == 2
    scheduler.pool.release(taken[1:])
    taken = [*taken[:1], *scheduler.pool.allocate(6)]
    with pytest.raises(NothingToRun, match=r"needs \d blocks, \d are free"):
        check.run("compaction")  # each context has room, but not twice
    scheduler.pool.release(taken)
    check.run("compaction")
    assert record.proof.compared > 0


def test_contexts_that_fit_are_compared_even_if_another_does_not(check):
    check, scheduler, record = check
    taken = scheduler.pool.allocate(scheduler.pool.num_free - 1)
    check.run("later run")  # the shortest context has room
    assert record.proof.compared == 1
    scheduler.pool.release(taken)


BREAKS = [("logits", "later run"), ("logits", "co-batched"), ("logits", "chunked"), ("logits", "prefix hit"),
          ("logits", "decode"), ("logits", "compaction"), ("swap", "compaction")]  # fmt: skip


@pytest.mark.parametrize(("part", "path"), BREAKS)
def test_a_check_that_breaks_gives_everything_back(check, part, path, monkeypatch):
    check, scheduler, _ = check
    right, calls = getattr(Executor, part), iter(range(100))

    def broken(self, *args, **options):
        if next(calls) == (1 if part == "logits" and path != "later run" else 0):
            raise RuntimeError("planted")
        return right(self, *args, **options)

    monkeypatch.setattr(Executor, part, broken)
    with pytest.raises(RuntimeError, match="planted") as kept:  # a log may keep the exception, and all of its frames
        check.run(path)
    assert (scheduler.pool.num_used, scheduler.slots.num_free) == (0, 2)
    check.run(path)
    assert kept.value


def test_a_comparison_that_breaks_gives_everything_back(check, monkeypatch):
    check, scheduler, _ = check
    monkeypatch.setattr(boot_module, "same_bits", lambda one, other: 1 / 0)
    with pytest.raises(ZeroDivisionError) as kept:
        check.run("prefix hit")
    assert (scheduler.pool.num_used, scheduler.slots.num_free) == (0, 2)
    assert kept.value
