"""What a device that replays programs finds in its buffers: every step said again in plain Python."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core import ALONE, Schedule, StepResult
from preheat.execution import flat
from preheat.execution.buffers import StepBuffers
from preheat.execution.flat import FlatBatch, FlatPacker
from preheat.execution.sampling import SamplingBatch
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.schedule.scheduler import Scheduler
from tests.pure.paper import limits, request

TILE, SPLIT, WINDOWS = 4, 8, (None, 5)


class Steps:
    """A scheduler and its packer. ``pack`` says what the device must see of each step once the batch is sent.

    Each batch is compared with that of a packer which has seen no other step.
    """

    def __init__(self, **changes) -> None:
        self.limits = limits(**changes)
        self.plan = plan = make_plan(self.limits, PlanOptions())
        self.scheduler = Scheduler(self.limits, padded=plan.padded)
        self.buffers = self.new_buffers()
        self.packer = FlatPacker(self.scheduler.slots, plan, self.buffers)
        self.line_ups: list[int] = []

    def new_buffers(self) -> StepBuffers:
        return StepBuffers(self.limits, tile=TILE, split=SPLIT, windows=WINDOWS, device=torch.device("cpu"))

    def pack(self) -> tuple[Schedule, FlatBatch, dict] | None:
        schedule = self.scheduler.schedule()
        if schedule is None:
            return None
        batch = self.packer.pack(schedule)
        self.line_ups.append(schedule.persistent_batch)
        fresh = FlatPacker(self.scheduler.slots, self.plan, self.new_buffers()).pack(schedule)
        assert plain(batch) == plain(fresh)
        return schedule, batch, self.expected(schedule, batch)

    def settle(self, schedule: Schedule) -> None:
        tokens = np.arange(np.count_nonzero(schedule.samples), dtype=np.int32)
        self.scheduler.settle(schedule, StepResult(tokens))

    def expected(self, schedule: Schedule, batch: FlatBatch) -> dict:
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
        pad = batch.shape.tokens - len(tokens)
        sampled = [at for at, samples in zip(last, schedule.samples, strict=True) if samples]
        return {
            "tokens": tokens + [(0, self.limits.max_num_seqs, 0)] * pad,
            "tiles": sorted(tiles),
            "splits": splits,
            "sampled": sampled + [0] * (batch.sampling_size - len(sampled)),
            "table": {slot: slots.block_table[slot].tolist() for slot in schedule.slots.tolist()},
        }

    def seen(self, batch: FlatBatch, chosen: list[int]) -> dict:
        """What lies on the device."""
        inputs = self.buffers.inputs(batch.shape)
        table = self.buffers.table.rows
        assert not table[self.limits.max_num_seqs].any()
        return {
            "tokens": list(zip(inputs.tokens.tolist(), inputs.slots.tolist(), inputs.positions.tolist(), strict=True)),
            "tiles": sorted(inputs.tiles[: int(inputs.num_tiles)].tolist()),
            "splits": [inputs.splits[i][: int(inputs.num_splits(i))].tolist() for i in range(len(WINDOWS))],
            "sampled": self.buffers.sampled[: batch.sampling_size].tolist(),
            "table": {slot: table[slot].tolist() for slot in chosen},
        }

    def sent(self, schedule: Schedule, batch: FlatBatch) -> dict:
        """What lies there once a batch was sent."""
        self.buffers.send(batch.turn, batch.pieces)
        return self.seen(batch, schedule.slots.tolist())


def plain(value: object) -> object:
    """A batch as lists and numbers, without the host copy that it is in."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.name != "turn"}
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
    """With a step in flight; batches are sent again or never, the device is wiped, blocks are few and change hands."""
    steps, before, events = Steps(num_blocks=1 + spare), None, events.copy()
    for number, (length, more, params) in enumerate(prompts):
        steps.scheduler.add(request(number, [number * 50 + at for at in range(length)], more, **params))
    while not steps.scheduler.idle:
        packed = steps.pack()
        event = events.pop() if events else "nothing"
        sending = [packed if event != "lose" else None, before if event == "again" else None]
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
        steps.buffers.table.rows.fill_(-1)
        schedule, batch, _ = steps.pack()
        steps.buffers.send(batch.turn, batch.pieces)
        written = (steps.buffers.table.rows >= 0).all(1).nonzero().flatten().tolist()
        assert written == sent
        steps.settle(schedule)


def run_steady(steps: Steps) -> None:
    """Two rows that decode alone, across blocks, splits and the edges of a window."""
    for number, length in ((0, 9), (1, 1)):
        steps.scheduler.add(request(number, [number] * length, 24, temperature=float(number)))
    while packed := steps.pack():
        schedule, batch, expected = packed
        assert steps.sent(schedule, batch) == expected
        steps.settle(schedule)


def test_rows_that_only_decode_are_one_line_up() -> None:
    steps = Steps()
    run_steady(steps)
    assert steps.line_ups == [ALONE] + [1] * 23


@pytest.mark.parametrize("later", [SamplingBatch.later, flat.steady_steps])
def test_what_is_kept_for_too_long_is_noticed(later, monkeypatch) -> None:
    """The control: positions that do not move, splits that are never begun."""
    if later is SamplingBatch.later:
        monkeypatch.setattr(SamplingBatch, "later", lambda self, steps: self)
    else:
        monkeypatch.setattr(flat, "steady_steps", lambda *_: 1000)
    with pytest.raises(AssertionError):
        run_steady(Steps())


def test_rows_of_another_line_up_are_noticed() -> None:
    """The control: rows in another order, of which it is said that they are the line-up before."""
    steps = Steps()
    for number in range(2):
        steps.scheduler.add(request(number, [number], 9))
    for _ in range(3):
        schedule, _, _ = steps.pack()
        steps.settle(schedule)
    schedule = steps.scheduler.schedule()
    slots, first = schedule.slots[::-1].copy(), schedule.first[::-1].copy()
    liar = Schedule(slots, first, schedule.extend, schedule.samples, 2, persistent_batch=schedule.persistent_batch)
    batch = steps.packer.pack(liar)
    assert steps.sent(liar, batch) != steps.expected(liar, batch)


def test_nobody_writes_the_block_table_by_the_way() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Steps().scheduler.slots.block_table[0, 0] = 1


def test_a_row_without_a_new_version_is_missed() -> None:
    """The control: versions are what tells."""
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
