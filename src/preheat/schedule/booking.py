"""The booking of steps: a composed step becomes a schedule, and the lengths of its rows move."""

from __future__ import annotations

import numpy as np

from preheat.core import NO_PERSISTENT_BATCH, Schedule
from preheat.schedule.images import EncoderCache
from preheat.schedule.next_step import NextStep
from preheat.schedule.persistent_batch import PersistentBatch
from preheat.schedule.running import RunningSequences
from preheat.schedule.slots import UNSEEN


class Booking:
    """The schedules of steps with rows of ``running``; ``images`` are kept for a model that sees images."""

    def __init__(self, running: RunningSequences, images: EncoderCache | None) -> None:
        self._running, self._slots, self._images = running, running.slots, images
        self._last: PersistentBatch | None = None
        self._batches = NO_PERSISTENT_BATCH

    @property
    def batch(self) -> PersistentBatch | None:
        """The persistent batch of the last step, or None.

        The next step must have the same rows.
        """
        last = self._last
        return last if last is not None and last.goes_on(self._running) else None

    def again(self) -> Schedule | None:
        """Return the last step's rows, one token further; None where more may change."""
        batch = self.batch
        if batch is None or batch.plain is None or batch.room < 1:
            return None
        schedule = batch.step(self._running, {})
        self._move(schedule.slots, schedule.ends)
        return schedule

    def book(self, step: NextStep) -> Schedule:
        """Move the lengths of the rows of ``step``.

        They move as if the step had run. Returns its schedule. A row with drafts counts them as known and has nothing
        left to compute, so that it is in no other step until its results are processed.
        """
        slots, schedule = self._slots, self._schedule_of(step)
        if step.images and self._images is not None:
            self._images.attach(schedule, slots)
        if self._running.states is not None:
            schedule.states = self._running.states.book(schedule, self._running)
        rows, ends = schedule.slots, schedule.ends
        if schedule.num_decode < schedule.rows:
            slots.cached_len[rows] = ends
            one = schedule.num_sampled == 1
            rows, ends = rows[one], ends[one]
        self._move(rows, ends)
        for slot, drafts in step.drafts.items():
            end = int(slots.cached_len[slot])
            slots.tokens[slot, end - len(drafts) : end] = drafts
            slots.device_len[slot] = end
        return schedule

    def _move(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Count the tokens of ``rows`` up to ``ends`` as computed, and a sampled one as known."""
        slots = self._slots
        slots.cached_len[rows] = ends
        slots.tokens[rows, ends] = UNSEEN
        slots.device_len[rows] = ends + 1

    def _schedule_of(self, step: NextStep) -> Schedule:
        """Return ``step`` in the packer's form."""
        slots, running = self._slots, self._running
        if not step.prefill and not step.drafts and len(step.decode) == len(running):
            batch = self.batch
            if batch is None:
                self._batches += 1
                batch = self._last = PersistentBatch.of(running, self._batches, step.decode)
            return batch.step(running, step.started)
        self._last = None
        drafted = list(step.drafts)
        decode = step.decode[~np.isin(step.decode, drafted)] if drafted else step.decode
        rows = np.concatenate((decode, np.array(step.prefill + drafted, np.int64)))
        chunks = step.chunks + [1 + len(drafts) for drafts in step.drafts.values()]
        extend = np.concatenate((np.ones(len(decode), np.int32), np.array(chunks, np.int32)))
        first = slots.cached_len[rows]
        num_sampled = (first + extend == slots.device_len[rows]).astype(np.int32)
        if drafted:
            num_sampled[-len(drafted) :] = extend[-len(drafted) :]
        ids = running.ids[rows]
        return Schedule(rows, first, extend, num_sampled, len(decode), ids, step.started, num_drafted=len(drafted))
