"""The composer: the rows of the next step, and their blocks.

The order of rows, the rank of sequences and preemption are described in :mod:`preheat.schedule.scheduler`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from preheat.core import Request, Schedule, Stats
from preheat.limits import Limits
from preheat.schedule.booking import Booking
from preheat.schedule.budget import Budget
from preheat.schedule.drafting import Drafting
from preheat.schedule.images import EncoderCache, inside
from preheat.schedule.next_step import NextStep
from preheat.schedule.persistent_batch import room_of
from preheat.schedule.prefix import Hit, PrefixCache
from preheat.schedule.running import RunningSequences
from preheat.schedule.sequence import Sequence
from preheat.schedule.waiting import WaitingQueue

WATERMARK = 0.01
"""The share of blocks that stays free at an admission.

No sequence is then preempted right away.
"""


class MustWait(Exception):
    """The next step depends on the outcome of one in flight."""


class Composer:
    """Chooses the rows of steps within ``limits`` and ``budget``, from the ``running`` and the ``waiting`` sequences.

    Without ``mixed_steps`` a step either reads prompts or decodes. ``prefix`` has the blocks that sequences may begin
    with, and ``images`` the images of a model that sees images. ``in_flight`` are the steps in flight.
    """

    def __init__(
        self,
        limits: Limits,
        budget: Budget,
        running: RunningSequences,
        waiting: WaitingQueue,
        *,
        prefix: PrefixCache,
        images: EncoderCache | None,
        booking: Booking,
        in_flight: Collection[Schedule],
        mixed_steps: bool,
    ) -> None:
        self.limits, self.budget, self.mixed_steps = limits, budget, mixed_steps
        self.running, self.waiting, self.prefix, self.images = running, waiting, prefix, images
        self.slots, self.pool, self.adapters = running.slots, running.pool, running.adapters
        self.in_flight, self._booking = in_flight, booking
        self._watermark = int(WATERMARK * self.pool.num_usable)
        self._max_prefills = limits.max_num_prefill_seqs or limits.max_num_seqs
        self._drafts: Drafting | None = None  # of the step that is composed
        self.totals = Stats(blocks_total=self.pool.num_usable)

    def compose(self, drafting: Drafting | None) -> NextStep:
        """Return the next step: choose its rows and allocate their blocks.

        ``drafting`` is None if nothing drafts. Raises MustWait.
        """
        self._drafts = drafting
        if self.waiting and self.running and self.running.last.yields:
            self._make_way()
        self.budget.hurries = self.waiting.resumes
        step = self._decoding() if self.mixed_steps else NextStep(np.zeros(0, np.int64))
        self._continue_prefills(step)
        self._admit(step)
        if self._drafts:
            most_rows, tokens = self._max_prefills, self.budget.of(len(step.decode))
            self._drafts.add(step, self.running, lambda wanted, size: self.budget.most(wanted, tokens, size), most_rows)
        return step if self.mixed_steps or step.prefill else self._decoding()

    def _make_way(self) -> None:
        """Preempt yielding rows until the first waiting sequence that does not yield can start."""
        first = self.waiting.first()
        while first is not None and not first.yields and self.running and self.running.last.yields:
            if self.slots.num_free and self._blocks_last(first, self.prefix.lookup(first)):
                return
            if self.in_flight:
                raise MustWait
            self.waiting.wait(self.running.preempt_last()[1])
            self.totals.preemptions += 1

    def _decoding(self) -> NextStep:
        """Begin a step with the rows that have one token to compute.

        Preempt if blocks are lacking.
        """
        slots, batch = self.slots, self._booking.batch
        known = batch is not None and not self._drafts
        step = NextStep(batch.slots if batch is not None and known else self._decode_slots())
        if batch is not None and known and batch.room > 0:
            return step
        full = slots.cached_len == slots.num_blocks * slots.block_size
        at_edge = self._make_room(step, step.decode[full[step.decode]])
        if len(at_edge):
            self.running.grow_each(at_edge)
        if batch is not None and known and batch.goes_on(self.running):
            batch.room = room_of(self.running, batch.slots)
        return step

    def _decode_slots(self) -> np.ndarray:
        """Return the slots with one token to compute.

        With drafting, only slots with known tokens.
        """
        decode: np.ndarray = self.running.order[self.due() == 1]
        return self._drafts.visible(self.slots, decode) if self._drafts else decode

    def _continue_prefills(self, step: NextStep) -> None:
        """Add the next chunk of the prompts already begun, in order of rank."""
        slots = self.slots
        if len(step.decode) == len(self.running):
            return
        for slot in self.running.order[self.due() > 1].tolist():
            if len(step.prefill) == self._max_prefills or self.running.sequences[slot] is None:  # preempted just now
                return
            cached = int(slots.cached_len[slot])
            if self.running.blocks_lacking(slot, cached + 1) and not len(self._make_room(step, np.array([slot]))):
                return
            space = (int(slots.num_blocks[slot]) + self.running.columns_free) * slots.block_size - cached
            request, wanted = self.running.sequence(slot).request, min(int(slots.device_len[slot]) - cached, space)
            chunk = self._chunk(step, self._before_images(step, request, cached, wanted))
            if not chunk:
                return
            self._add_prefill(step, slot, chunk)

    def _admit(self, step: NextStep) -> None:
        """Start waiting sequences, in order, as far as slots, budget and blocks go.

        A sequence without an adapter slot is passed over, see :mod:`preheat.schedule.adapters`.
        """
        passed_over = set[str]()
        while self.waiting and self.slots.num_free and len(step.prefill) < self._max_prefills and not step.preempted:
            sequence = self.waiting.first(passed_over)
            if sequence is None:
                return
            if not self.adapters.has_room_for(sequence.adapter):
                passed_over.add(sequence.adapter_digest)
                if (claimed := self.adapters.claimed(passed_over)) is not None:
                    passed_over.add(claimed)
                continue
            hit, restored = self._cached(step, sequence)
            first = hit.columns * self.pool.block_size
            extend = len(sequence.tokens) - first
            wanted = min(extend, self._room_behind(hit))
            chunk = self._chunk(step, self._before_images(step, sequence.request, first, wanted))
            whole = self.budget.chunked or chunk == extend or not self.budget.fits_alone(extend)
            if not chunk or not whole or not self._blocks_last(sequence, hit):
                return
            del self.waiting[sequence.request.id]
            self._count_start(step, sequence, first, restored * self.pool.block_size)
            self._add_prefill(step, self.running.start(sequence, hit), chunk)

    def _cached(self, step: NextStep, sequence: Sequence) -> tuple[Hit, int]:
        """Return the blocks that ``sequence`` may begin with.

        Also return how many of them come from the host. Blocks are brought back from the host once the sequence can
        start.
        """
        hit = self.prefix.lookup(sequence)
        if self.pool.tier is None or not self._chunk(step, 1) or not self._blocks_last(sequence, hit):
            return hit, 0
        self.prefix.restore(sequence)
        found = self.prefix.lookup(sequence)
        return found, found.columns - hit.columns

    def _room_behind(self, hit: Hit) -> int:
        """Return for how many tokens behind ``hit`` there are free blocks in every group."""
        free = self.pool.num_free - self.pool.count_cached(hit.all_blocks)
        return free // len(self.limits.groups) * self.pool.block_size

    def _before_images(self, step: NextStep, request: Request, first: int, wanted: int) -> int:
        """Return how many of ``wanted`` tokens a row may have.

        Each image of them must have a place.
        """
        if self.images is None:
            return wanted
        return self.images.reach(step.images, request, first, wanted)

    def _add_prefill(self, step: NextStep, slot: int, chunk: int) -> None:
        first = int(self.slots.cached_len[slot])
        self.running.grow(slot, first + chunk)
        step.add_row(slot, chunk)
        if segments := self.running.sequence(slot).request.segments:
            step.images |= {segment.image.hash for segment in inside(segments, first, first + chunk)}

    def _count_start(self, step: NextStep, sequence: Sequence, cached_tokens: int, restored_tokens: int) -> None:
        if sequence.started:
            return
        sequence.started = True
        step.started[sequence.request.id] = cached_tokens
        if self.prefix.reads_for(sequence):
            self.totals.prefix_queries += len(sequence.tokens)
            self.totals.prefix_hits += cached_tokens - restored_tokens
            if self.pool.tier is not None:
                self.totals.external_queries += len(sequence.tokens) - cached_tokens + restored_tokens
                self.totals.external_hits += restored_tokens

    def _chunk(self, step: NextStep, wanted: int) -> int:
        """Return the most tokens that one more row may have.

        They are at most ``wanted`` and within the budget.
        """
        return self.budget.most(wanted, self.budget.of(len(step.decode)), step.with_row)

    def _blocks_last(self, sequence: Sequence, hit: Hit) -> bool:
        """Return whether there are enough free blocks for ``sequence``.

        Its known tokens and the running sequences' need blocks. If only the first chunk had to fit, a long
        prompt could be started, preempted and started again. A sequence alone always fits.
        """
        if not self.running:
            return True
        needed = self.running.blocks_needed(sequence, hit)
        return needed + self.running.blocks_promised() + self._watermark <= self.pool.num_free

    def _make_room(self, step: NextStep, slots: np.ndarray) -> np.ndarray:
        """Make room for a block for each of ``slots``.

        The last in rank are preempted. Returns the remaining slots.
        """
        while len(slots) > self.running.columns_free:
            if self.in_flight:
                raise MustWait
            left, sequence = self.running.preempt_last()
            self.waiting.wait(sequence)
            slots, step.decode = slots[slots != left], step.decode[step.decode != left]
            step.preempted = True
            self.totals.preemptions += 1
        return slots

    def due(self) -> np.ndarray:
        """Return how many tokens each running sequence has to compute.

        The result is int32, in order of rank. It is 0 at the maximum length. It is one more before the end of the last
        image, as decoding rows have no image.
        """
        slots = self.slots
        due = slots.device_len - slots.cached_len  # of all slots: cheaper than selecting first
        due *= slots.device_len < slots.max_len
        if self.images is not None:
            due += slots.cached_len < slots.image_end
        running: np.ndarray = due[self.running.order]
        return running
