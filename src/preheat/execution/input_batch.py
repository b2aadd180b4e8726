"""Packing: a Schedule and the slots become one InputBatch.

It is padded to a bucket of the plan. The step's integers are written where its programs read them. Host work is a few
numpy gathers, whatever the number of rows. Results and words that the step shares with the one before it, or with the
last step of its host copy, are neither computed nor written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from preheat.backends.base.attention import AttentionWork, StepRows
from preheat.backends.base.device import HOST_COPIES
from preheat.core import NO_PERSISTENT_BATCH, POOLS, Schedule
from preheat.execution.buffers import MAX_LISTS, Layout, StepBuffers
from preheat.execution.logit_stages import STAGES, LogitStage, sampling_input
from preheat.execution.step_size import step_size_of
from preheat.ops.sampling import SamplingInput
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.plan.programs import Program
from preheat.schedule.pooled import SUMMED
from preheat.schedule.slots import NO_LOGPROBS, Slots

_IS_SUMMED = np.isin(np.arange(len(POOLS) + 1), SUMMED)
"""Whether a pool follows from a sum, by its place in POOLS; NO_LOGPROBS names the last entry, which is false."""


@dataclass(slots=True)
class PromptPart:
    """Consecutive tokens of a prompt with logprobs wanted.

    ``before`` int32 [rows] are the indices of the step's tokens just before them, padded with 0 to a number of rows
    that logits are computed for. ``successors`` int32 [n] are the tokens with logprobs.
    """

    row: int
    alternatives: int
    before: np.ndarray
    successors: np.ndarray


@dataclass(slots=True)
class InputBatch:
    """One step's input, in host copy ``turn``, padded to ``bucket``.

    ``pieces`` are the used parts of the host copy, ``work`` is attention's. ``sampling`` says how to draw from the
    logits of ``sampled_rows`` (a row that samples k positions is there k times), padded to ``sampling_size``. The
    entries of ``sampled_rows`` at the indices ``reporting`` report logprobs of ``alternatives`` tokens each. In an
    engine that pools, ``sampled_rows`` has an entry for each wanted state, in the order of the step's tokens.
    ``bounds`` [texts + 1] are the bounds of texts among these entries if only the sums of their states are wanted.
    """

    schedule: Schedule
    bucket: Bucket
    turn: int
    pieces: list[slice]
    work: AttentionWork
    sampling: SamplingInput
    sampled_rows: np.ndarray  # int64, index of each in the schedule
    sampled_slots: np.ndarray  # int64, its slot
    sampling_size: int
    reporting: np.ndarray  # int64
    alternatives: np.ndarray  # int32
    prompt_parts: list[PromptPart]
    digested: bool = False  # a row wants the digest of its logits
    bounds: np.ndarray | None = None
    adapters: np.ndarray | None = None  # int32 [rows] adapter slots, negative for none; None: no row has an adapter

    @property
    def padded_tokens(self) -> int:
        """Tokens that the step computes, padding included."""
        return self.bucket.tokens

    @property
    def forward_program(self) -> Program[Bucket]:
        """The program that runs the step's tokens."""
        return Program("forward", self.bucket, adapted=self.adapters is not None)

    @property
    def sampler_program(self) -> Program[int]:
        """The program that draws for the sampling rows."""
        return Program("sampler", self.sampling_size, self.sampling.level, self.adapters is not None)


@dataclass(slots=True)
class _Rows:
    """Everything that depends only on the rows of a step.

    The steps of a persistent batch share it. ``ends`` int64 [rows] count the step's tokens up to each row's last;
    ``sampled_tokens`` are the indices of sampled tokens. ``sampling`` belongs to the step with the first row at
    position ``begin``. The other fields are as in :class:`InputBatch`.
    """

    persistent_batch: int
    begin: int
    ends: np.ndarray
    sampled_tokens: np.ndarray
    sampled_rows: np.ndarray
    sampled_slots: np.ndarray
    sampling_size: int
    sampling: SamplingInput
    reporting: np.ndarray
    alternatives: np.ndarray
    digested: bool
    adapters: np.ndarray | None
    bucket: Bucket | None = None  # None: each step asks the plan for its own


@dataclass(slots=True)
class _Work:
    """Attention's work for a step of ``rows`` in ``bucket``.

    ``pieces`` are the used parts of the buffers. Both are valid until the first row is beyond the position ``until``.
    """

    rows: _Rows
    bucket: Bucket
    until: int
    work: AttentionWork
    pieces: list[slice]


class Packer:
    """Builds batches in ``buffers``; ``stages`` edit logits.

    Each position reads the token ``ahead`` positions later, and draws its successor. ``ahead`` is 0, or 1 for a head
    that also reads the model's state at the position. ``first``: a row samples at its first token; the rows of such a
    model have all tokens of a text in one step.
    """

    def __init__(
        self,
        slots: Slots,
        plan: Plan,
        buffers: StepBuffers,
        stages: Sequence[LogitStage] = STAGES,
        *,
        ahead: int = 0,
        first: bool = False,
    ) -> None:
        self.slots, self.plan, self.buffers, self.ahead, self._stages = slots, plan, buffers, ahead, stages
        self._first = first
        self._rows: _Rows | None = None
        self._work: _Work | None = None
        self._written: list[_Work | None] = [None] * HOST_COPIES
        self._columns: list[tuple[Layout, list[np.ndarray]] | None] = [None] * HOST_COPIES

    def pack(self, schedule: Schedule) -> InputBatch:
        """Pack every row's next ``extend`` tokens.

        They come with their positions and the blocks of their sequence.
        """
        slots = self.slots
        rows = self._rows = self._rows_of(schedule)
        bucket = rows.bucket or self._bucket_of(schedule, rows)
        layout, (turn, words) = self.buffers.layout(bucket), self.buffers.turn()
        work = self._work = self._work_of(schedule, rows, bucket, layout)
        before, self._written[turn] = self._written[turn], None  # after an error the copy's content is unknown
        columns = self._columns_of(turn, words, layout)
        if before is None or before.rows is not rows or before.bucket != bucket:
            self._write_rows(words, columns, schedule, rows)
        if before is not work:
            _write_work(words, layout, work.work)
        self._write_tokens(columns, schedule, rows)
        self.buffers.attention.write(turn, slots)
        self._written[turn] = work
        return InputBatch(
            schedule=schedule,
            bucket=bucket,
            turn=turn,
            pieces=work.pieces,
            work=work.work,
            sampling=self._sampling_of(schedule, rows),
            sampled_rows=rows.sampled_rows,
            sampled_slots=rows.sampled_slots,
            sampling_size=rows.sampling_size,
            reporting=rows.reporting,
            alternatives=rows.alternatives,
            prompt_parts=self._prompt_parts(schedule, rows.ends),
            digested=rows.digested,
            adapters=rows.adapters,
            bounds=self._bounds_of(schedule, rows.sampled_rows) if self.plan.limits.pools else None,
        )

    def _rows_of(self, schedule: Schedule) -> _Rows:
        kept, slots = self._rows, self.slots
        if kept is not None and kept.persistent_batch == schedule.persistent_batch != NO_PERSISTENT_BATCH:
            return kept
        ends = schedule.extend.cumsum()
        sampled_rows, positions = schedule.sampled()
        sampled_slots = schedule.slots[sampled_rows]
        sampled_tokens = ends[sampled_rows] - 1 - (schedule.ends[sampled_rows] - positions)
        if not self.plan.limits.pools:
            sampling = sampling_input(slots, sampled_slots, positions + self.ahead, self._stages)
        else:
            sampling = SamplingInput(len(sampled_rows), random=None, penalties=None, edits=None)  # nothing is drawn
            sampled_rows, sampled_tokens = self._states_of(schedule, ends, sampled_rows, sampled_tokens)
            sampled_slots = schedule.slots[sampled_rows]
        alternatives, adapters = slots.logprobs[sampled_slots], slots.adapter[schedule.slots]
        reporting = (alternatives != NO_LOGPROBS).nonzero()[0]
        return _Rows(
            persistent_batch=schedule.persistent_batch,
            begin=int(schedule.first[0]),
            ends=ends,
            sampled_tokens=sampled_tokens,
            sampled_rows=sampled_rows,
            sampled_slots=sampled_slots,
            sampling_size=self.plan.sampler_rows(len(sampled_rows)),
            sampling=sampling,
            reporting=reporting,
            alternatives=alternatives[reporting],
            digested=bool(slots.has_receipt[sampled_slots].any()),
            adapters=adapters if self.plan.options.enable_lora and (adapters >= 0).any() else None,
        )

    def _bucket_of(self, schedule: Schedule, rows: _Rows) -> Bucket:
        """Return the bucket of a step, and keep it for all steps of ``rows`` if it depends on nothing else.

        The plan counts each step that takes a fallback.
        """
        size = step_size_of(schedule, self.slots, self.plan)
        bucket = self.plan.fit(size)
        if not self.plan.policy.pads_length and bucket is self.plan.dispatcher.find(size):
            rows.bucket = bucket
        return bucket

    def _states_of(
        self, schedule: Schedule, ends: np.ndarray, rows: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the row and the index of each token with a wanted state, int64 [n].

        These are all computed tokens of a row that pools all, and one token of each other row in ``rows``: its entry
        of ``tokens``, or its first token.
        """
        every = self.slots.prompt_logprobs[schedule.slots] != NO_LOGPROBS
        if every.all():
            return np.arange(schedule.rows).repeat(schedule.extend), np.arange(ends[-1])
        begins = ends - schedule.extend
        counts, first = np.where(every, schedule.extend, 0).astype(np.int64), begins.astype(np.int64)
        one = ~every[rows]
        counts[rows[one]] = 1
        if not self._first:
            first[rows[one]] = tokens[one]
        before = counts.cumsum() - counts
        found = np.arange(schedule.rows).repeat(counts)
        return found, np.arange(len(found)) + (first - before).repeat(counts)

    def _bounds_of(self, schedule: Schedule, rows: np.ndarray) -> np.ndarray | None:
        """Return the bounds of the texts among the wanted states of ``rows``, None if more than sums are wanted.

        A sum is enough for a mean of a text that the step holds as a whole, and a sum of one state is this state.
        """
        kinds = self.slots.prompt_logprobs[schedule.slots]
        whole = (schedule.first == 0) & (schedule.num_sampled == 1) & _IS_SUMMED[kinds]
        if not whole.any() or not (whole | (kinds == NO_LOGPROBS)).all():
            return None
        edges = np.ones(len(rows) + 1, bool)
        np.not_equal(rows[1:], rows[:-1], out=edges[1:-1])
        return edges.nonzero()[0]

    def _sampling_of(self, schedule: Schedule, rows: _Rows) -> SamplingInput:
        at = int(schedule.first[0])
        later = rows.sampling.later(at - rows.begin)
        if later is None:
            positions = schedule.sampled()[1] + self.ahead
            later = sampling_input(self.slots, rows.sampled_slots, positions, self._stages)
            rows.sampling, rows.begin = later, at
        return later

    def _work_of(self, schedule: Schedule, rows: _Rows, bucket: Bucket, layout: Layout) -> _Work:
        """Return how the step is cut into work.

        Where all rows decode it often stays the same for many steps.
        """
        kept, first = self._work, int(schedule.first[0])
        same = kept is not None and kept.rows is rows and kept.bucket == bucket and first <= kept.until
        same = same and schedule.states is None
        if kept is not None and same and kept.work.table_writes in (-1, self.slots.table_writes):
            return kept
        step = StepRows(
            schedule.slots, schedule.first, schedule.extend, rows.ends, schedule.num_decode, layout.tokens,
            bucket.width, schedule.states,
        )  # fmt: skip
        work = self.buffers.attention.plan(step, self.slots)
        pieces = layout.pieces([len(entries) for entries in work.lists])
        return _Work(rows, bucket, first + work.steady, work, pieces)

    def _columns_of(self, turn: int, words: np.ndarray, layout: Layout) -> list[np.ndarray]:
        """Return views of the tokens, slots and positions of host copy ``turn``, and of the tokens' places."""
        kept = self._columns[turn]
        if kept is None or kept[0] is not layout:
            columns = list(words[layout.tokens_at : layout.lists_at[0]].reshape(-1, layout.tokens))
            kept = self._columns[turn] = layout, columns
        return kept[1]

    def _write_rows(self, words: np.ndarray, columns: list[np.ndarray], schedule: Schedule, rows: _Rows) -> None:
        """Write each token's slot, and the indices of sampled tokens.

        The rest is padding.
        """
        count, size = int(rows.ends[-1]), rows.sampling_size
        tokens, slots, positions, *places = columns
        slots[:count] = schedule.slots.repeat(schedule.extend)
        for each in (tokens, positions, *places):
            each[count:] = 0
        slots[count:] = self.buffers.pad_slot
        sampled, wanted = words[MAX_LISTS : MAX_LISTS + size], len(rows.sampled_tokens)
        sampled[:wanted] = rows.sampled_tokens
        sampled[wanted:] = 0

    def _write_tokens(self, columns: list[np.ndarray], schedule: Schedule, rows: _Rows) -> None:
        """Write each token's id and position."""
        tokens, slots, positions, *places = columns
        count = schedule.rows if schedule.num_decode == schedule.rows else int(rows.ends[-1])
        if count == schedule.rows:
            positions[:count] = schedule.first
            tokens[:count] = self.slots.tokens[schedule.slots, self._read(schedule.first)]
        else:
            positions[:count] = np.arange(count) + (schedule.ends - rows.ends).repeat(schedule.extend)
            tokens[:count] = self.slots.tokens[slots[:count], self._read(positions[:count])]
        if schedule.images is not None:
            for row, first, last, source in schedule.images.spans:
                at = int(rows.ends[row] - schedule.ends[row]) + first
                tokens[at : at + last - first] = image_ids(source, last - first)
        if places:
            for each in places:
                each[:count] = positions[:count] + self.slots.shift[slots[:count]]
            self._write_places(places, schedule, rows)

    def _write_places(self, places: list[np.ndarray], schedule: Schedule, rows: _Rows) -> None:
        """Write the places of tokens before the end of their prompt's last image."""
        for row in range(schedule.num_decode, schedule.rows):
            own = self.slots.places.get(int(schedule.slots[row]))
            if own is not None and (known := own[:, schedule.first[row] : schedule.ends[row]]).size:
                at = int(rows.ends[row] - schedule.extend[row])
                for each, values in zip(places, known, strict=True):
                    each[at : at + len(values)] = values

    def _read(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions of the tokens that are read at ``positions``.

        At the last position no token is ahead; only dummy rows come there.
        """
        if not self.ahead:
            return positions
        read: np.ndarray = np.minimum(positions + self.ahead, self.slots.max_model_len - 1)
        return read

    def _prompt_parts(self, schedule: Schedule, ends: np.ndarray) -> list[PromptPart]:
        """Return the prompt parts of prefilling rows; none in an engine that pools.

        A token that ends the prompt has no successor.
        """
        slots, found, most = self.slots, list[PromptPart](), self.plan.sampler_sizes[-1]
        if self.plan.limits.pools:
            return found
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


def image_ids(source: int, count: int) -> np.ndarray:
    """Return ids that stand for ``count`` embeddings of images, from ``source`` on.

    They are below -1, the id of the device's last token; see :meth:`preheat.backends.base.backend.Operations.embed`.
    """
    return -2 - np.arange(source, source + count, dtype=np.int32)


def _write_work(words: np.ndarray, layout: Layout, work: AttentionWork) -> None:
    for index, (at, entries) in enumerate(zip(layout.lists_at, work.lists, strict=False)):
        words[index] = len(entries)
        words[at : at + entries.size] = entries.reshape(-1)
