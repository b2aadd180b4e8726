"""Packing for a device that replays programs: the step's integers, written where its programs read them.

What a row computes is cut into work: a row of one token into the splits of its context, each of which any block of the
device's grid may take; a longer row into tiles of queries, which walk their context alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from preheat.batch.buffers import MAX_LISTS, StepBuffers
from preheat.batch.need import need_of
from preheat.batch.sampling import SamplingBatch
from preheat.core import Schedule
from preheat.ops.cuda.work import decode_work, prefill_tiles
from preheat.plan.plan import Plan
from preheat.plan.shape import Shape
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
    padded to ``sampling_size``, and ``logprobs`` how many alternatives each reports (-1: none).
    """

    shape: Shape
    turn: int
    pieces: list[slice]
    sampling: SamplingBatch
    sampled_rows: np.ndarray  # int64, the schedule's row of each
    sampled_slots: np.ndarray  # int64, and its slot
    sampling_size: int
    logprobs: np.ndarray
    prompt_parts: list[PromptPart]

    @property
    def padded_tokens(self) -> int:
        """What the step computes, padding included."""
        return self.shape.tokens


class FlatPacker:
    """Builds batches in ``buffers``. Host work is a few numpy gathers, whatever the number of rows."""

    def __init__(self, slots: Slots, plan: Plan, buffers: StepBuffers) -> None:
        self.slots, self.plan, self.buffers = slots, plan, buffers

    def pack(self, schedule: Schedule) -> FlatBatch:
        """Every row's next ``extend`` tokens, at their positions, with the blocks that hold their sequence."""
        slots, rows = self.slots, schedule.slots
        shape = self.plan.fit(need_of(schedule, slots, self.plan.options.bucketing_policy))
        turn, words, table = self.buffers.turn()
        ends = np.cumsum(schedule.extend)
        self._tokens(words, shape, schedule, ends)
        pieces = self._work(words, shape, schedule, ends)
        used = -(-int(schedule.ends.max()) // slots.block_size)
        table[rows, :used] = slots.block_table[rows, :used]
        sampled_rows = np.flatnonzero(schedule.samples)
        size = self.plan.sampler_rows(len(sampled_rows))
        sampled = words[MAX_LISTS : MAX_LISTS + size]
        sampled[: len(sampled_rows)] = ends[sampled_rows] - 1
        sampled[len(sampled_rows) :] = 0
        return FlatBatch(
            shape=shape,
            turn=turn,
            pieces=pieces,
            sampling=SamplingBatch.build(slots, rows[sampled_rows], schedule.ends[sampled_rows]),
            sampled_rows=sampled_rows,
            sampled_slots=rows[sampled_rows],
            sampling_size=size,
            logprobs=slots.logprobs[rows[sampled_rows]],
            prompt_parts=self._prompt_parts(schedule, ends - schedule.extend),
        )

    def _tokens(self, words: np.ndarray, shape: Shape, schedule: Schedule, ends: np.ndarray) -> None:
        """What each token is: its id, its slot, its position. The rest pads."""
        layout, count = self.buffers.layout(shape), int(ends[-1])
        tokens, slots, positions = words[layout.tokens_at : layout.tiles_at].reshape(3, shape.tokens)
        if count == schedule.rows:
            slots[:count], positions[:count] = schedule.slots, schedule.first
        else:
            extend = schedule.extend
            slots[:count] = np.repeat(schedule.slots, extend)
            positions[:count] = np.arange(count) + np.repeat(schedule.ends - ends, extend)
        tokens[:count] = self.slots.tokens[slots[:count], positions[:count]]
        tokens[count:] = positions[count:] = 0
        slots[count:] = self.buffers.pad_slot

    def _work(self, words: np.ndarray, shape: Shape, schedule: Schedule, ends: np.ndarray) -> list[slice]:
        """The lists of work, of which the pieces that must be copied are returned."""
        buffers, layout, extend = self.buffers, self.buffers.layout(shape), schedule.extend
        single, longer = np.flatnonzero(extend == 1), np.flatnonzero(extend > 1)
        words[0] = 0
        if len(longer):
            starts = ends[longer] - extend[longer]
            tiles = prefill_tiles(starts, extend[longer], schedule.first[longer], buffers.tile)
            words[0] = len(tiles)
            words[layout.tiles_at : layout.tiles_at + tiles.size] = tiles.reshape(-1)
        pieces = []
        begin = 0
        for index, (window, at) in enumerate(zip(buffers.windows, layout.splits_at, strict=False)):
            work = decode_work(ends[single] - 1, schedule.first[single], buffers.split, window)
            words[1 + index] = len(work)
            words[at : at + work.size] = work.reshape(-1)
            pieces.append(slice(begin, at + work.size))
            begin = layout.splits_at[index + 1]
        return pieces

    def _prompt_parts(self, schedule: Schedule, starts: np.ndarray) -> list[PromptPart]:
        """The prefilling rows that want prompt logprobs; a token that ends the prompt has no successor."""
        slots, found, most = self.slots, list[PromptPart](), self.plan.sampler_sizes[-1]
        wanted = slots.prompt_logprobs[schedule.slots[schedule.num_decode :]] != NO_LOGPROBS
        for row in (np.flatnonzero(wanted) + schedule.num_decode).tolist():
            slot = schedule.slots[row]
            first = int(schedule.first[row]) + 1
            last = min(first + schedule.extend[row], slots.prompt_len[slot])
            for at in range(0, last - first, most):
                part = slots.tokens[slot, first + at : min(first + at + most, last)].copy()
                before = np.zeros(self.plan.sampler_rows(len(part)), np.int32)
                before[: len(part)] = np.arange(len(part)) + starts[row] + at
                found.append(PromptPart(row, int(slots.prompt_logprobs[slot]), before, part))
        return found
