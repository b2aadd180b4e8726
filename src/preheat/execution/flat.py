"""Packing for a device that replays programs: the step's integers, written where its programs read them.

What a row computes is cut into work: a row of one token into the splits of its context, each of which any block of the
device's grid may take; a longer row into tiles of queries, which walk their context alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from preheat.backends.cuda.work import decode_work, prefill_tiles, steady_steps
from preheat.core import ALONE, Schedule
from preheat.execution.buffers import HOST_COPIES, MAX_LISTS, Layout, StepBuffers
from preheat.execution.sampling import SamplingBatch
from preheat.execution.step_size import step_size_of
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.schedule.slots import NO_LOGPROBS, Slots


@dataclass(slots=True)
class PromptPart:
    """Tokens of a prompt whose logprobs are wanted, each after another: ``before`` int32 [rows] are the step's tokens
    that they follow, padded with 0 to a size that logits are computed at; ``successors`` int32 [n] are theirs.
    """

    row: int
    alternatives: int
    before: np.ndarray
    successors: np.ndarray


@dataclass(slots=True)
class FlatBatch:
    """One step's input, in host copy ``turn`` of the buffers, padded to ``shape``.

    ``pieces`` of the copy are in use. ``sampling`` says what to do with the logits that are wanted, of ``sampled_rows``
    padded to ``sampling_size``. Those of them at the places ``reporting`` are to report logprobs of so many
    ``alternatives``.
    """

    shape: Bucket
    turn: int
    pieces: list[slice]
    sampling: SamplingBatch
    sampled_rows: np.ndarray  # int64, the schedule's row of each
    sampled_slots: np.ndarray  # int64, and its slot
    sampling_size: int
    reporting: np.ndarray  # int64
    alternatives: np.ndarray  # int32
    prompt_parts: list[PromptPart]

    @property
    def padded_tokens(self) -> int:
        """What the step computes, padding included."""
        return self.shape.tokens


@dataclass(slots=True)
class _Rows:
    """What follows from who is in a step, and nothing else: the steps of a line-up have it in common.

    ``ends`` int64 [rows] count the step's tokens up to each row's last. ``sampling`` is that of the step in which the
    first row was at position ``begin``. What else there is, see :class:`FlatBatch`.
    """

    persistent_batch: int
    begin: int
    ends: np.ndarray
    sampled_rows: np.ndarray
    sampled_slots: np.ndarray
    sampling_size: int
    sampling: SamplingBatch
    reporting: np.ndarray
    alternatives: np.ndarray


@dataclass(slots=True)
class _Work:
    """The lists of work of a step of ``rows`` in ``shape``: (place, words) of each, and the ``pieces`` of the buffers
    that are in use with them. They stay what they are until the first row is beyond the position ``until``.
    """

    rows: _Rows
    shape: Bucket
    until: int
    counts: np.ndarray  # int32, the length of each list
    lists: list[tuple[int, np.ndarray]]
    pieces: list[slice]


class FlatPacker:
    """Builds batches in ``buffers``. Host work is a few numpy gathers, whatever the number of rows.

    What a step has in common with the one before it, or with what its host copy holds, is neither worked out nor
    written again.
    """

    def __init__(self, slots: Slots, plan: Plan, buffers: StepBuffers) -> None:
        self.slots, self.plan, self.buffers = slots, plan, buffers
        self._rows: _Rows | None = None
        self._work: _Work | None = None
        self._written: list[_Work | None] = [None] * HOST_COPIES

    def pack(self, schedule: Schedule) -> FlatBatch:
        """Every row's next ``extend`` tokens, at their positions, with the blocks that hold their sequence."""
        slots = self.slots
        shape = self.plan.fit(step_size_of(schedule, slots, self.plan.policy))
        layout, (turn, words) = self.buffers.layout(shape), self.buffers.turn()
        rows = self._rows = self._rows_of(schedule)
        work = self._work = self._work_of(schedule, rows, shape, layout)
        before, self._written[turn] = self._written[turn], None  # what an error leaves is nobody's
        if before is None or before.rows is not rows or before.shape != shape:
            self._write_rows(words, layout, schedule, rows)
        if before is not work:
            _write_work(words, work)
        self._write_tokens(words, layout, schedule, rows)
        self.buffers.table.write(turn, slots)
        self._written[turn] = work
        return FlatBatch(
            shape=shape,
            turn=turn,
            pieces=work.pieces,
            sampling=self._sampling_of(schedule, rows),
            sampled_rows=rows.sampled_rows,
            sampled_slots=rows.sampled_slots,
            sampling_size=rows.sampling_size,
            reporting=rows.reporting,
            alternatives=rows.alternatives,
            prompt_parts=self._prompt_parts(schedule, rows.ends),
        )

    def _rows_of(self, schedule: Schedule) -> _Rows:
        kept, slots = self._rows, self.slots
        if kept is not None and kept.persistent_batch == schedule.persistent_batch != ALONE:
            return kept
        sampled_rows = schedule.samples.nonzero()[0]
        sampled_slots = schedule.slots[sampled_rows]
        alternatives = slots.logprobs[sampled_slots]
        reporting = (alternatives != NO_LOGPROBS).nonzero()[0]
        return _Rows(
            persistent_batch=schedule.persistent_batch,
            begin=int(schedule.first[0]),
            ends=schedule.extend.cumsum(),
            sampled_rows=sampled_rows,
            sampled_slots=sampled_slots,
            sampling_size=self.plan.sampler_rows(len(sampled_rows)),
            sampling=SamplingBatch.build(slots, sampled_slots, schedule.ends[sampled_rows]),
            reporting=reporting,
            alternatives=alternatives[reporting],
        )

    def _sampling_of(self, schedule: Schedule, rows: _Rows) -> SamplingBatch:
        at = int(schedule.first[0])
        later = rows.sampling.later(at - rows.begin)
        if later is None:
            later = SamplingBatch.build(self.slots, rows.sampled_slots, schedule.ends[rows.sampled_rows])
            rows.sampling, rows.begin = later, at
        return later

    def _work_of(self, schedule: Schedule, rows: _Rows, shape: Bucket, layout: Layout) -> _Work:
        """How the step is cut into work. Where all decode, nothing of it changes until a row begins a split."""
        kept, buffers, extend = self._work, self.buffers, schedule.extend
        if kept is not None and kept.rows is rows and kept.shape == shape and schedule.first[0] <= kept.until:
            return kept
        single = (extend == 1).nonzero()[0]
        token_index, positions = rows.ends[single] - 1, schedule.first[single]
        work = _Work(rows, shape, 0, np.zeros(MAX_LISTS, np.int32), [], [])
        if len(single) < len(extend):
            longer = (extend > 1).nonzero()[0]
            starts = rows.ends[longer] - extend[longer]
            tiles = prefill_tiles(starts, extend[longer], schedule.first[longer], buffers.tile)
            work.counts[0] = len(tiles)
            work.lists.append((layout.tiles_at, tiles.reshape(-1)))
        begin, steady = 0, buffers.limits.max_model_len
        for index, (window, at) in enumerate(zip(buffers.windows, layout.splits_at, strict=False), 1):
            splits = decode_work(token_index, positions, buffers.split, window)
            steady = min(steady, steady_steps(positions, buffers.split, window))
            work.counts[index] = len(splits)
            work.lists.append((at, splits.reshape(-1)))
            work.pieces.append(slice(begin, at + splits.size))
            begin = layout.splits_at[index]
        work.until = int(schedule.first[0]) + steady
        return work

    def _write_rows(self, words: np.ndarray, layout: Layout, schedule: Schedule, rows: _Rows) -> None:
        """Whose each token is, and which are sampled. The rest pads."""
        count, size = int(rows.ends[-1]), rows.sampling_size
        tokens, slots, positions = words[layout.tokens_at : layout.tiles_at].reshape(3, layout.tokens)
        slots[:count] = schedule.slots.repeat(schedule.extend)
        tokens[count:] = positions[count:] = 0
        slots[count:] = self.buffers.pad_slot
        sampled = words[MAX_LISTS : MAX_LISTS + size]
        sampled[: len(rows.sampled_rows)] = rows.ends[rows.sampled_rows] - 1
        sampled[len(rows.sampled_rows) :] = 0

    def _write_tokens(self, words: np.ndarray, layout: Layout, schedule: Schedule, rows: _Rows) -> None:
        """What each token is: its id and its position."""
        count = int(rows.ends[-1])
        tokens, slots, positions = words[layout.tokens_at : layout.tiles_at].reshape(3, layout.tokens)
        if count == schedule.rows:
            positions[:count] = schedule.first
            tokens[:count] = self.slots.tokens[schedule.slots, schedule.first]
            return
        positions[:count] = np.arange(count) + (schedule.ends - rows.ends).repeat(schedule.extend)
        tokens[:count] = self.slots.tokens[slots[:count], positions[:count]]

    def _prompt_parts(self, schedule: Schedule, ends: np.ndarray) -> list[PromptPart]:
        """The prefilling rows that want prompt logprobs; a token that ends the prompt has no successor."""
        slots, found, most = self.slots, list[PromptPart](), self.plan.sampler_sizes[-1]
        for row in range(schedule.num_decode, schedule.rows):
            slot = schedule.slots[row]
            if slots.prompt_logprobs[slot] == NO_LOGPROBS:
                continue
            first = int(schedule.first[row]) + 1
            last = min(first + schedule.extend[row], slots.prompt_len[slot])
            for at in range(0, last - first, most):
                part = slots.tokens[slot, first + at : min(first + at + most, last)].copy()
                before = np.zeros(self.plan.sampler_rows(len(part)), np.int32)
                before[: len(part)] = np.arange(len(part)) + ends[row] - schedule.extend[row] + at
                found.append(PromptPart(row, int(slots.prompt_logprobs[slot]), before, part))
        return found


def _write_work(words: np.ndarray, work: _Work) -> None:
    words[:MAX_LISTS] = work.counts
    for at, entries in work.lists:
        words[at : at + len(entries)] = entries
