"""Packing for a device that replays programs: the step's integers, written where its programs read them.

What a row computes is cut into work: a row of one token into the splits of its context, each of which any block of the
device's grid may take; a longer row into tiles of queries, which walk their context alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from preheat.batch.buffers import MAX_LISTS, Layout, StepBuffers
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
    padded to ``sampling_size``. Those of them at the places ``reporting`` are to report logprobs of so many
    ``alternatives``.
    """

    shape: Shape
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


class FlatPacker:
    """Builds batches in ``buffers``. Host work is a few numpy gathers, whatever the number of rows."""

    def __init__(self, slots: Slots, plan: Plan, buffers: StepBuffers) -> None:
        self.slots, self.plan, self.buffers = slots, plan, buffers

    def pack(self, schedule: Schedule) -> FlatBatch:
        """Every row's next ``extend`` tokens, at their positions, with the blocks that hold their sequence."""
        slots = self.slots
        shape = self.plan.fit(need_of(schedule, slots, self.plan.options.bucketing_policy))
        layout, (turn, words) = self.buffers.layout(shape), self.buffers.turn()
        ends = schedule.extend.cumsum()
        self._tokens(words, layout, schedule, ends)
        pieces = self._work(words, layout, schedule, ends)
        self.buffers.table.write(turn, slots)
        sampled_rows = schedule.samples.nonzero()[0]
        sampled_slots, size = schedule.slots[sampled_rows], self.plan.sampler_rows(len(sampled_rows))
        alternatives = slots.logprobs[sampled_slots]
        reporting = (alternatives != NO_LOGPROBS).nonzero()[0]
        sampled = words[MAX_LISTS : MAX_LISTS + size]
        sampled[: len(sampled_rows)] = ends[sampled_rows] - 1
        sampled[len(sampled_rows) :] = 0
        return FlatBatch(
            shape=shape,
            turn=turn,
            pieces=pieces,
            sampling=SamplingBatch.build(slots, sampled_slots, schedule.ends[sampled_rows]),
            sampled_rows=sampled_rows,
            sampled_slots=sampled_slots,
            sampling_size=size,
            reporting=reporting,
            alternatives=alternatives[reporting],
            prompt_parts=self._prompt_parts(schedule, ends),
        )

    def _tokens(self, words: np.ndarray, layout: Layout, schedule: Schedule, ends: np.ndarray) -> None:
        """What each token is: its id, its slot, its position. The rest pads."""
        count = int(ends[-1])
        tokens, slots, positions = words[layout.tokens_at : layout.tiles_at].reshape(3, layout.tokens)
        if count == schedule.rows:
            slots[:count], positions[:count] = schedule.slots, schedule.first
        else:
            extend = schedule.extend
            slots[:count] = schedule.slots.repeat(extend)
            positions[:count] = np.arange(count) + (schedule.ends - ends).repeat(extend)
        tokens[:count] = self.slots.tokens[slots[:count], positions[:count]]
        tokens[count:] = positions[count:] = 0
        slots[count:] = self.buffers.pad_slot

    def _work(self, words: np.ndarray, layout: Layout, schedule: Schedule, ends: np.ndarray) -> list[slice]:
        """The lists of work, of which the pieces that must be copied are returned."""
        buffers, extend = self.buffers, schedule.extend
        longer = (extend > 1).nonzero()[0]
        single = (extend == 1).nonzero()[0]
        token_index, positions = ends[single] - 1, schedule.first[single]
        words[0] = 0
        if len(longer):
            starts = ends[longer] - extend[longer]
            tiles = prefill_tiles(starts, extend[longer], schedule.first[longer], buffers.tile)
            words[0] = len(tiles)
            words[layout.tiles_at : layout.tiles_at + tiles.size] = tiles.reshape(-1)
        pieces = []
        begin = 0
        for index, (window, at) in enumerate(zip(buffers.windows, layout.splits_at, strict=False)):
            work = decode_work(token_index, positions, buffers.split, window)
            words[1 + index] = len(work)
            words[at : at + work.size] = work.reshape(-1)
            pieces.append(slice(begin, at + work.size))
            begin = layout.splits_at[index + 1]
        return pieces

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
