"""The contents of a device's buffers, step by step, against the same step described in plain Python."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.backends.base.attention import AttentionLayer
from preheat.backends.cpu.backend import CpuBackend
from preheat.core import NO_PERSISTENT_BATCH, Schedule, StepResult
from preheat.execution.buffers import StepBuffers
from preheat.execution.input_batch import InputBatch, Packer
from preheat.execution.step_size import step_size_of
from preheat.ops.sampling import SamplingInput
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.schedule.scheduler import Scheduler
from tests.controls import fails
from tests.pure.paper import limits, request

pytest.importorskip("triton")  # attention on CUDA cuts its work on the host, and its kernels are not run here

from preheat.backends.cuda.attention import layers as attention
from preheat.backends.cuda.attention.layers import CudaAttention

TILE, SPLIT, WINDOWS = 4, 8, (None, 5)
CACHE, ROPE = torch.zeros(1, 2, 1, 4, 64), torch.zeros(1, 2, 1, 64)
LAYERS = [
    AttentionLayer(
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        scale=1.0,
        window=window,
        cache=CACHE,
        dtype=CACHE.dtype,
        rope=ROPE,
        qk_norm=None,
    )
    for window in WINDOWS
]


class Steps:
    """A scheduler and its packer.

    ``pack`` also returns the buffers that the device must see once the batch is sent. Each batch is compared with the
    batch of a packer that has seen no other step.
    """

    def __init__(self, **changes) -> None:
        self.limits = limits(**changes)
        self.plan = plan = make_plan(self.limits, PlanOptions())
        self.scheduler = Scheduler(self.limits, padded=plan.padded)
        self.buffers = self.new_buffers()
        self.packer = Packer(self.scheduler.slots, plan, self.buffers)
        self.batch_numbers: list[int] = []

    def new_buffers(self) -> StepBuffers:
        backend = CpuBackend()
        return StepBuffers(self.limits, CudaAttention(LAYERS, self.limits, backend, tile=TILE, split=SPLIT), backend)

    def pack(self) -> tuple[Schedule, InputBatch, dict] | None:
        schedule = self.scheduler.schedule()
        if schedule is None:
            return None
        batch = self.packer.pack(schedule)
        self.batch_numbers.append(schedule.persistent_batch)
        fresh = Packer(self.scheduler.slots, self.plan, self.new_buffers()).pack(schedule)
        assert plain(batch) == plain(fresh)
        return schedule, batch, self.expected(schedule, batch)

    def settle(self, schedule: Schedule) -> None:
        tokens = np.arange(np.count_nonzero(schedule.samples), dtype=np.int32)
        self.scheduler.process_results(schedule, StepResult(tokens))

    def expected(self, schedule: Schedule, batch: InputBatch) -> dict:
        slots, tokens, tiles, last = self.scheduler.slots, [], [], []
        splits: list[list[list[int]]] = [[] for _ in WINDOWS]
        for slot, first, extend in zip(
            schedule.slots.tolist(), schedule.first.tolist(), schedule.extend.tolist(), strict=True
        ):
            begin = len(tokens)
            tokens += [(int(slots.tokens[slot, at]), slot, at) for at in range(first, first + extend)]
            last.append(len(tokens) - 1)
            if extend > 1:
                tiles += [[at, min(TILE, begin + extend - at)] for at in range(begin, begin + extend, TILE)]
                continue
            for listed, window in zip(splits, WINDOWS, strict=True):
                oldest = max(first - window + 1, 0) // SPLIT if window else 0
                listed += [[begin, split] for split in range(oldest, first // SPLIT + 1)]
        pad = self.buffers.layout(batch.bucket).tokens - len(tokens)
        sampled = [at for at, samples in zip(last, schedule.samples, strict=True) if samples]
        return {
            "tokens": tokens + [(0, self.limits.max_num_seqs, 0)] * pad,
            "tiles": sorted(tiles),
            "splits": splits,
            "sampled": sampled + [0] * (batch.sampling_size - len(sampled)),
            "table": {slot: slots.block_table[slot].tolist() for slot in schedule.slots.tolist()},
        }

    def seen(self, batch: InputBatch, chosen: list[int]) -> dict:
        """Return the contents of the device's buffers."""
        inputs, table = self.buffers.inputs(batch.bucket), self.table
        tiles, *splits = (entries[:count] for entries, count in zip(inputs.lists, inputs.counts.tolist(), strict=False))
        assert not table[self.limits.max_num_seqs].any()
        return {
            "tokens": list(zip(inputs.tokens.tolist(), inputs.slots.tolist(), inputs.positions.tolist(), strict=True)),
            "tiles": sorted(tiles.tolist()),
            "splits": [entries.tolist() for entries in splits],
            "sampled": self.buffers.sampled[: batch.sampling_size].tolist(),
            "table": {slot: table[slot].tolist() for slot in chosen},
        }

    def sent(self, schedule: Schedule, batch: InputBatch) -> dict:
        """Send a batch, and return the contents of the device's buffers."""
        self.send(batch)
        return self.seen(batch, schedule.slots.tolist())

    def send(self, batch: InputBatch) -> None:
        self.buffers.send(batch.turn, batch.pieces)
        self.buffers.attention.send(batch.turn, batch.work, self.buffers.inputs(batch.bucket))

    @property
    def table(self) -> torch.Tensor:
        """The device's block table."""
        assert isinstance(self.buffers.attention, CudaAttention)
        return self.buffers.attention.table.of_group[0]


MAY_DIFFER = {"turn", "steady"}


def plain(value: object) -> object:
    """Return a batch as lists and numbers.

    The index of its host copy and the count of its steady steps are left out.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in fields(value) if field.name not in MAY_DIFFER
        }
    return value


PARAMS: tuple[dict, ...] = (
    {"temperature": 0.0},
    {"temperature": 0.5, "top_k": 3, "logprobs": 1},
    {"temperature": 0.0, "stop_ids": [3], "min_tokens": 4},
    {"presence_penalty": 1.0},
)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 40), st.integers(4, 20), st.sampled_from(PARAMS)), min_size=1, max_size=9
    ),
    spare=st.sampled_from([16, 20, 64]),
    events=st.lists(st.sampled_from(["nothing", "again", "clear", "lose", "cancel"]), max_size=8),
)
def test_the_device_sees_every_step(prompts, spare, events) -> None:
    """The device sees every step, with another step in flight.

    Batches are sent again or never, the device is wiped, and few blocks change hands.
    """
    steps, before, events = Steps(num_blocks=1 + spare), None, events.copy()
    for number, (length, more, params) in enumerate(prompts):
        steps.scheduler.add(request(number, [number * 50 + at for at in range(length)], more, **params))
    while not steps.scheduler.idle:
        packed = steps.pack()
        event = events.pop() if events else "nothing"
        sending = [packed if event != "lose" else None, packed if event == "again" else None]
        for schedule, batch, expected in filter(None, sending):
            assert steps.sent(schedule, batch) == expected
        if event == "clear":
            steps.buffers.clear()
        if event == "cancel" and packed:
            steps.scheduler.cancel(int(packed[0].ids[0]))
        if before:
            steps.settle(before[0])
        before = packed
    steps.scheduler.check()


def test_only_rows_that_changed_travel() -> None:
    steps = Steps()
    steps.scheduler.add(request(0, [1, 2], 8))
    steps.scheduler.add(request(1, [1, 2, 3], 8))
    for sent in ([0, 1], [], [1], [0], []):  # of blocks of four tokens each row gets one, the longer fills it first
        steps.table.fill_(-1)
        schedule, batch, _ = steps.pack()
        steps.send(batch)
        written = (steps.table >= 0).all(1).nonzero().flatten().tolist()
        assert written == sent
        steps.settle(schedule)


def run_steady(steps: Steps) -> None:
    """Run two rows that only decode, across blocks, KV splits and the edges of a window."""
    for number, length in ((0, 9), (1, 1)):
        steps.scheduler.add(request(number, [number] * length, 24, temperature=float(number)))
    while packed := steps.pack():
        schedule, batch, expected = packed
        assert steps.sent(schedule, batch) == expected
        assert batch.bucket == steps.plan.fit(step_size_of(schedule, steps.scheduler.slots, steps.plan))
        steps.settle(schedule)


def test_rows_that_only_decode_are_one_persistent_batch() -> None:
    steps = Steps()
    run_steady(steps)
    assert steps.batch_numbers == [NO_PERSISTENT_BATCH] + [1] * 23


@pytest.mark.parametrize("later", [SamplingInput.later, attention.steady_steps])
def test_stale_positions_and_splits_are_noticed(later, monkeypatch) -> None:
    """Control: positions that do not move, or KV splits that never begin, break the comparison."""
    if later is SamplingInput.later:
        monkeypatch.setattr(SamplingInput, "later", lambda self, steps: self)
    else:
        monkeypatch.setattr(attention, "steady_steps", lambda *_: 1000)
    with fails():
        run_steady(Steps())


def test_rows_of_another_persistent_batch_are_noticed() -> None:
    """Control: rows in another order, but with the number of the persistent batch before, break the comparison."""
    steps = Steps()
    for number in range(2):
        steps.scheduler.add(request(number, [number], 9))
    for _ in range(3):
        schedule, _, _ = steps.pack()
        steps.settle(schedule)
    schedule = steps.scheduler.schedule()
    slots, first = schedule.slots[::-1].copy(), schedule.first[::-1].copy()
    liar = Schedule(slots, first, schedule.extend, schedule.num_sampled, 2, persistent_batch=schedule.persistent_batch)
    batch = steps.packer.pack(liar)
    assert steps.sent(liar, batch) != steps.expected(liar, batch)


def test_the_block_table_is_written_in_one_place_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Steps().scheduler.slots.block_table[0, 0] = 1


def test_a_row_without_a_new_version_is_missed() -> None:
    """Control: a changed row that keeps its version is missed."""
    steps = Steps()
    steps.scheduler.add(request(0, [1, 2, 3, 4], 8))
    schedule, batch, expected = steps.pack()
    assert steps.sent(schedule, batch) == expected
    steps.settle(schedule)
    version = steps.scheduler.slots.table_version.copy()
    schedule = steps.scheduler.schedule()
    steps.scheduler.slots.table_version[:] = version
    batch = steps.packer.pack(schedule)
    assert steps.sent(schedule, batch) != steps.expected(schedule, batch)


@pytest.mark.parametrize("served", [True, False])
def test_a_step_has_adapters_only_where_the_plan_serves_some(served):
    """A step has adapters only if its plan serves some.

    A draft model's plan has none for the target's rows.
    """
    steps = Steps()
    steps.scheduler.add(request(0, [1, 2, 3]))
    schedule = steps.scheduler.schedule()
    steps.scheduler.slots.adapter[schedule.slots] = 0
    plan = make_plan(steps.limits, PlanOptions(enable_lora=served))
    batch = Packer(steps.scheduler.slots, plan, steps.new_buffers()).pack(schedule)
    assert {batch.forward_program, batch.sampler_program} <= {item.program for item in plan.items}
    assert (batch.adapters is not None) == batch.forward_program.adapted == batch.sampler_program.adapted == served
