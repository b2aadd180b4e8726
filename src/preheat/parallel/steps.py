"""The message of a step, and the batch made from it.

The leader sends it to the other ranks. The leader alone schedules and packs. It sends the step's integers as they lie
in its buffers, the rows, and the block tables that have changed. Each rank's attention cuts the same work from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from preheat.backends.base.attention import AttentionWork, StepRows
from preheat.core import Image, Level, Schedule, StepImages, StepStates
from preheat.execution.buffers import StepBuffers
from preheat.execution.input_batch import InputBatch, PromptPart
from preheat.ops.sampling import SamplingInput
from preheat.plan.buckets import Bucket
from preheat.schedule.slots import Slots


@dataclass(slots=True)
class StepMessage:
    """A step as a message.

    ``words`` are the contents of the ``pieces`` of the buffers; ``tables`` are rows of the block table, for ``slots``.
    ``same_work``: attention's work is the same as in the step before. ``prompt_parts`` are parts of prompts with
    logprobs wanted. ``adapters`` are the adapter slots of rows, ``states`` the state slots that the rows use, if not
    their own. ``encode`` are the images that the step encodes, each with its place.
    """

    rows: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]
    bucket: Bucket
    turn: int
    pieces: list[slice]
    words: list[np.ndarray]
    slots: np.ndarray
    tables: np.ndarray
    same_work: bool
    level: Level
    sampled: tuple[np.ndarray, np.ndarray, int]
    prompt_parts: list[PromptPart]
    adapters: np.ndarray | None
    states: StepStates | None
    encode: list[tuple[int, Image]] | None


class StepWriter:
    """Makes messages of batches in ``buffers``.

    ``tables`` has the block tables of their sequences.
    """

    def __init__(self, buffers: StepBuffers, tables: Slots) -> None:
        self._buffers, self._tables = buffers, tables
        self._sent = np.full(tables.num_slots, -1, np.int64)
        self._work: AttentionWork | None = None

    def message(self, batch: InputBatch) -> StepMessage:
        schedule, tables = batch.schedule, self._tables
        words = self._buffers.words(batch.turn)
        slots = np.unique(schedule.slots)
        slots = slots[self._sent[slots] != tables.table_version[slots]]
        self._sent[slots] = tables.table_version[slots]
        same, self._work = batch.work is self._work, batch.work
        return StepMessage(
            rows=(schedule.slots, schedule.first, schedule.extend, schedule.num_sampled, schedule.num_decode),
            bucket=batch.bucket,
            turn=batch.turn,
            pieces=batch.pieces,
            words=[words[piece] for piece in batch.pieces],
            slots=slots,
            tables=tables.block_table[slots],
            same_work=same,
            level=batch.sampling.level,
            sampled=(batch.sampled_rows, batch.sampled_slots, batch.sampling_size),
            prompt_parts=batch.prompt_parts,
            adapters=batch.adapters,
            states=schedule.states,
            encode=None if schedule.images is None else schedule.images.encode,
        )


class StepReader:
    """Makes batches of messages, in this rank's ``buffers`` and ``tables``."""

    def __init__(self, buffers: StepBuffers, tables: Slots) -> None:
        self._buffers, self._tables = buffers, tables
        self._work: AttentionWork | None = None

    def batch(self, message: StepMessage) -> InputBatch:
        slots, first, extend, num_sampled, num_decode = message.rows
        images = None if message.encode is None else StepImages(message.encode, [])
        schedule = Schedule(slots, first, extend, num_sampled, num_decode, images=images)
        words, tables = self._buffers.take(message.turn), self._tables
        for piece, values in zip(message.pieces, message.words, strict=True):
            words[piece] = values
        for slot, row in zip(message.slots.tolist(), message.tables, strict=True):
            tables.set_blocks(slot, slice(None), row)
        if self._work is None or not message.same_work:
            tokens = self._buffers.layout(message.bucket).tokens
            step = StepRows(slots, first, extend, extend.cumsum(), num_decode, tokens, states=message.states)
            self._work = self._buffers.attention.plan(step, tables)
        self._buffers.attention.write(message.turn, tables)
        sampled_rows, sampled_slots, sampling_size = message.sampled
        return InputBatch(
            schedule=schedule,
            bucket=message.bucket,
            turn=message.turn,
            pieces=message.pieces,
            work=self._work,
            sampling=_KnownLevel(message.level, len(sampled_rows)),
            sampled_rows=sampled_rows,
            sampled_slots=sampled_slots,
            sampling_size=sampling_size,
            reporting=np.empty(0, np.int64),
            alternatives=np.empty(0, np.int32),
            prompt_parts=message.prompt_parts,
            adapters=message.adapters,
        )


class _KnownLevel(SamplingInput):
    """Sampling of a ``level``, done by the leader."""

    def __init__(self, level: Level, size: int) -> None:
        super().__init__(size, None, None, None)
        self._level = level

    @property
    def level(self) -> Level:
        return self._level
