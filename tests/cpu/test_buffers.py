"""The device's input: what is packed for a step is where the programs' views find it, and the rest pads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.batch.buffers import HOST_COPIES, MAX_LISTS, StepBuffers
from preheat.batch.flat import FlatPacker
from preheat.core import Schedule
from preheat.limits import Limits
from preheat.ops.cuda.work import decode_work
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.plan.shape import Shape
from preheat.schedule.slots import UNSEEN, Slots
from tests.pure.paper import request

LIMITS = Limits(
    max_model_len=120, max_num_seqs=5, max_num_batched_tokens=48, max_num_prefill_seqs=None, block_size=16,
    num_blocks=99,
)  # fmt: skip
WINDOWS = (None, 20)
TILE, SPLIT = 4, 32
JUNK = 1 << 20  # no program may ever look at it
PLANS = {policy: make_plan(LIMITS, PlanOptions(bucketing_policy=policy)) for policy in ("unified", "split")}

Row = tuple[int, int, bool]
"""Tokens in the cache, tokens to compute, and whether a prompt goes on after them."""


def buffers_of(windows=WINDOWS) -> StepBuffers:
    return StepBuffers(LIMITS, tile=TILE, split=SPLIT, windows=windows, device=torch.device("cpu"))


def token_at(slot: int, position: int) -> int:
    return 1000 * (slot + 1) + position


def filled(policy: str = "unified", **params) -> FlatPacker:
    """Every slot holds a prompt as long as can be, whose tokens say where they are, in blocks of its own."""
    slots = Slots(LIMITS.max_num_seqs, LIMITS.max_model_len, LIMITS.block_size)
    for slot in range(LIMITS.max_num_seqs):
        prompt = [token_at(slot, position) for position in range(LIMITS.max_model_len - 1)]
        assert slots.take(request(slot, prompt, 1, **params), np.array(prompt)) == slot
        slots.block_table[slot] = np.arange(slots.max_blocks) + 1 + 10 * slot
        slots.num_blocks[slot] = slots.max_blocks
    return FlatPacker(slots, PLANS[policy], buffers_of())


def schedule_of(rows: list[Row], order: list[int] | None = None) -> Schedule:
    """A step of ``rows`` in the slots ``order``, those that decode first."""
    rows = sorted(rows, key=lambda row: row[1] > 1 or row[2])
    first, extend, goes_on = (np.array(column) for column in zip(*rows, strict=True))
    decode = sum(count == 1 and not more for _, count, more in rows)
    slots = np.array((order or range(LIMITS.max_num_seqs))[: len(rows)], np.int64)
    return Schedule(slots, first.astype(np.int32), extend.astype(np.int32), ~goes_on, decode)


def sent(packer: FlatPacker, schedule: Schedule):
    """The batch, and its program's input, in buffers that held nothing but junk before."""
    buffers = packer.buffers
    for part in (buffers._device, buffers.table):
        part.fill_(JUNK)
    batch = packer.pack(schedule)
    buffers.send(batch.turn, batch.pieces)
    return batch, buffers.inputs(batch.shape)


def assert_packed(packer: FlatPacker, schedule: Schedule) -> None:
    batch, inputs = sent(packer, schedule)
    buffers, count, starts = packer.buffers, schedule.tokens, schedule.extend.cumsum() - schedule.extend
    slots = np.repeat(schedule.slots, schedule.extend).tolist()
    positions = np.concatenate([np.arange(a, b) for a, b in zip(schedule.first, schedule.ends, strict=True)]).tolist()

    assert batch.shape.tokens == len(inputs.tokens) == len(inputs.slots) == len(inputs.positions) >= count
    assert inputs.slots.tolist() == slots + [buffers.pad_slot] * (batch.shape.tokens - count)
    assert inputs.positions.tolist() == positions + [0] * (batch.shape.tokens - count)
    assert inputs.tokens[:count].tolist() == list(map(token_at, slots, positions))
    assert inputs.tokens[count:].tolist() == [0] * (batch.shape.tokens - count)

    single, longer = schedule.extend == 1, np.flatnonzero(schedule.extend > 1)
    tiles = inputs.tiles[: inputs.num_tiles.item()].tolist()
    assert all(1 <= length <= TILE for _, length in tiles)
    covered = sorted(token for begin, length in tiles for token in range(begin, begin + length))
    assert covered == [int(starts[row]) + i for row in longer for i in range(schedule.extend[row])]
    assert all(slots[begin] == slots[begin + length - 1] for begin, length in tiles)  # none reaches into the next row
    for index, window in enumerate(WINDOWS):
        right = decode_work(starts[single], schedule.first[single], SPLIT, window)
        assert inputs.num_splits(index).item() == len(right) <= len(inputs.splits[index])
        assert inputs.splits[index][: len(right)].tolist() == right.tolist()

    lasts = (starts + schedule.extend - 1)[schedule.samples].tolist()
    assert buffers.sampled[: batch.sampling_size].tolist() == lasts + [0] * (batch.sampling_size - len(lasts))
    assert batch.sampled_slots.tolist() == schedule.slots[schedule.samples].tolist()
    used = -(-int(schedule.ends.max()) // LIMITS.block_size)
    assert np.array_equal(buffers.table[schedule.slots, :used], packer.slots.block_table[schedule.slots, :used])
    assert not buffers.table[buffers.pad_slot].any()
    if batch.shape.phase == "decode":
        assert not len(inputs.tiles)


def rows() -> st.SearchStrategy[list[Row]]:
    row = st.tuples(st.integers(0, 100), st.sampled_from([1, 1, 2, 4, 5, 9, 17]), st.booleans())
    return st.lists(row, min_size=1, max_size=LIMITS.max_num_seqs).filter(
        lambda rows: sum(extend for _, extend, _ in rows) <= LIMITS.max_num_batched_tokens
    )


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(PLANS)), st.lists(rows(), min_size=1, max_size=4), st.permutations(range(5)))
def test_every_step_is_where_its_program_looks(policy, steps, order):
    """Whatever was in the host's copies before."""
    packer = filled(policy)
    for step in steps:
        reading = [row for row in step if row[1] > 1 or row[2]]
        assert_packed(packer, schedule_of(reading if reading and policy == "split" else step, order))


def test_a_token_that_the_host_has_not_seen_is_left_to_the_device():
    packer = filled()
    packer.slots.tokens[1, 40] = UNSEEN
    _, inputs = sent(packer, schedule_of([(7, 1, False), (40, 1, False)]))
    assert inputs.tokens[:2].tolist() == [token_at(0, 7), -1]


def test_only_what_a_step_has_is_copied():
    packer = filled()
    batch, inputs = sent(packer, schedule_of([(100, 1, False), (3, 1, False)]))
    assert inputs.counts.tolist() == [0, 5, 3, 0]  # four splits and one; the window reaches two and one
    everything, window = inputs.splits
    assert (everything[5:] == JUNK).all()
    assert (window[3:] == JUNK).all()
    assert sum(piece.stop - piece.start for piece in batch.pieces) < packer.buffers.layout(batch.shape).words


def test_a_step_can_be_packed_while_the_one_before_it_is_read():
    """Its host copy stays as it is until the step after the next one, and no longer."""
    packer = filled()
    steps = [schedule_of([(10 * i, 1, False)], [i]) for i in range(HOST_COPIES + 1)]
    batches = [packer.pack(schedule) for schedule in steps[:HOST_COPIES]]
    for i, batch in enumerate(batches):
        packer.buffers.send(batch.turn, batch.pieces)
        assert packer.buffers.inputs(batch.shape).tokens[0] == token_at(i, 10 * i)
    assert packer.pack(steps[-1]).turn == batches[0].turn
    packer.buffers.send(batches[0].turn, batches[0].pieces)
    assert packer.buffers.inputs(batches[0].shape).tokens[0] == token_at(HOST_COPIES, 10 * HOST_COPIES)


def test_the_parts_of_a_layout_follow_one_another_and_all_fit():
    buffers = buffers_of()
    shapes = [shape for plan in PLANS.values() for shape in plan.table.shapes]
    for shape in shapes:
        layout, inputs = buffers.layout(shape), buffers.inputs(shape)
        parts = [inputs.counts, buffers.sampled, inputs.tokens, inputs.slots, inputs.positions, inputs.tiles]
        places = [(part.data_ptr(), part.numel()) for part in (*parts, *inputs.splits) if part.numel()]
        assert all(at + 4 * size == after for (at, size), (after, _) in pairwise(places))
        assert sum(size for _, size in places) == layout.words <= len(buffers._device)
        assert all(part.is_contiguous() for part in parts)


def test_cleared_buffers_hold_a_step_of_padding():
    packer = filled()
    _, inputs = sent(packer, schedule_of([(7, 9, False), (40, 1, False)]))
    packer.buffers.clear()
    assert not inputs.counts.any()
    assert not packer.buffers.table.any()


def test_prompt_tokens_whose_logprobs_are_wanted_come_in_parts():
    """A row's successors, each with the token before it; the first token of a prompt follows nothing."""
    packer = filled(prompt_logprobs=3)
    parts = packer.pack(schedule_of([(50, 1, False), (0, 13, True), (106, 13, False)])).prompt_parts
    for row, start, first, count in ((1, 1, 0, 13), (2, 14, 106, 12)):  # the last token of a prompt has no successor
        mine = [part for part in parts if part.row == row]
        assert {part.alternatives for part in mine} == {3}
        assert all(len(part.before) in packer.plan.sampler_sizes for part in mine)
        before = [at for part in mine for at in part.before[: len(part.successors)].tolist()]
        successors = [token for part in mine for token in part.successors.tolist()]
        assert before == [start + i for i in range(count)]
        assert successors == [token_at(row, first + 1 + i) for i in range(count)]
    assert {part.row for part in parts} == {1, 2}


def test_more_windows_than_there_is_room_for_are_refused():
    most = tuple(range(MAX_LISTS - 1))
    assert len(buffers_of(most).inputs(Shape.decode(1)).splits) == len(most)
    with pytest.raises(ValueError, match="at most 3 sliding windows"):
        buffers_of((*most, 99))
