"""The scheduler: which rows run in the next step, and what their outcome means for everyone else.

A step is mixed. First every decoding row, one token each, so that nobody's stream stutters; then, with what is left of
the budget, the next chunk of prompts already begun; then waiting sequences, strictly by arrival. The budget counts
*padded* tokens: what the step will cost once it has the shape that the device runs (source: the padding-aware
scheduling of vLLM on Gaudi).

When a row needs a block and none is free, the latest arrival is preempted: it gives back its blocks, keeps its tokens,
returns to the front of the queue and is later computed again up to where it was. The earliest arrival therefore
always advances, and so, in their turn, do all.

A step is booked when it is scheduled: its tokens count as computed and the ones that it draws as known, so that the
next step can be scheduled while this one runs. What a token *is* matters to few decisions. Whether it ends its sequence
is one: then the row has been scheduled once more in vain, and is dropped when that step is settled. That a sequence has
reached its length is known ahead. Preempting is another, since the tokens must be kept: it waits until all is settled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from preheat.core import ALONE, Delta, Request, Schedule, Stats, StepResult, Swaps
from preheat.errors import InvalidRequest, SettingsError
from preheat.limits import Limits
from preheat.schedule import defrag
from preheat.schedule import results as settle
from preheat.schedule.blocks import BlockPool
from preheat.schedule.persistent_batch import PersistentBatch
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.queue import WaitingQueue
from preheat.schedule.running import Running
from preheat.schedule.sequence import Sequence
from preheat.schedule.slots import UNSEEN, Slots

WATERMARK = 0.01
"""The share of blocks that stay free when a sequence is admitted, lest the running ones be preempted at once."""

Padded = Callable[[int, int, int], int]
"""(rows, tokens, longest row) of a step -> the tokens it is padded to; grows with each of the three."""


def unpadded(rows: int, tokens: int, longest: int) -> int:
    """A flat batch that is not padded."""
    return tokens


@dataclass(slots=True)
class _Step:
    """The step in the making: ``decode`` slots, then the ``prefill`` slots with their ``chunks``."""

    decode: np.ndarray
    prefill: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    longest: int = 1
    started: dict[int, int] = field(default_factory=dict)
    preempted: bool = False

    def with_row(self, chunk: int) -> tuple[int, int, int]:
        """Rows, tokens and longest row of the step with one more row of ``chunk`` tokens."""
        decode = len(self.decode)
        return decode + len(self.prefill) + 1, decode + self.prefill_tokens + chunk, max(self.longest, chunk)

    def add(self, slot: int, chunk: int) -> None:
        """Append a prefill row."""
        self.prefill.append(slot)
        self.chunks.append(chunk)
        self.prefill_tokens += chunk
        self.longest = max(self.longest, chunk)


class _Unsettled(Exception):
    """The next step depends on the outcome of one in flight."""


class Scheduler:
    """Continuous batching within ``limits``. A step is in flight from :meth:`schedule` until :meth:`settle` or
    :meth:`fail`. Several may be: the device runs them in order, and in order they are settled. Requests come and go at
    any time; blocks are compacted, and sequences preempted, only when nothing is in flight.

    ``padded`` says what a step costs (see :data:`Padded`), ``defrag_threshold`` when to compact (None: never). A step
    in which others decode has ``mixed_tokens`` at most, so that these do not wait for long; without ``mixed_steps`` it
    either reads prompts or decodes, prompts first (source: the two phases of vLLM on Gaudi).
    Raises SettingsError, naming the options, for limits under which some sequence could never run.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        mixed_steps: bool = True,
        mixed_tokens: int | None = None,
        padded: Padded = unpadded,
        defrag_threshold: int | None = None,
    ) -> None:
        _check_limits(limits, padded)
        self.limits, self.padded, self.chunked = limits, padded, enable_chunked_prefill
        self.mixed_steps, self._mixed_tokens = mixed_steps, mixed_tokens
        self.slots = Slots(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.prefix = PrefixCache(self.pool, enable_prefix_caching)
        self.running = Running(self.slots, self.pool)
        self.waiting = WaitingQueue()
        self._defrag_threshold = defrag_threshold
        self._watermark = int(WATERMARK * self.pool.num_usable)
        self._max_prefills = limits.max_num_prefill_seqs or limits.max_num_seqs
        self.forget()
        self._in_flight: deque[Schedule] = deque()
        self._persistent_batch: PersistentBatch | None = None
        self._batches = ALONE

    def forget(self) -> None:
        """Count from zero again."""
        self._totals = Stats(blocks_total=self.pool.num_usable)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run, nor anything in flight."""
        return not self.running and not self.waiting and not self._in_flight

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest for one that could never run; the front door refuses those before."""
        length = len(request.prompt)
        if request.id in self.waiting or self.running.slot_of(request.id) is not None:
            raise InvalidRequest(f"request {request.id} is already here")
        if not length or request.max_tokens < 1 or length + request.max_tokens > self.limits.max_model_len:
            raise InvalidRequest(
                f"a prompt of {length} tokens and max_tokens of {request.max_tokens} must both be positive and fit "
                f"max_model_len ({self.limits.max_model_len}) together"
            )
        if not self.chunked and not self._fits_alone(length):
            raise InvalidRequest(
                f"a prompt of {length} tokens does not fit max_num_batched_tokens "
                f"({self.limits.max_num_batched_tokens}) in one step: raise it or enable chunked prefill"
            )
        self.waiting.append(Sequence(request))

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free what it holds, at once; False if it is not here (any more)."""
        slot = self.running.slot_of(request_id)
        if slot is None:
            return self.waiting.remove(request_id)
        self.running.stop([slot])
        return True

    def cancel_all(self) -> None:
        """Forget everyone."""
        self.waiting.clear()
        self.running.stop(self.running.order.tolist())

    @property
    def scattered(self) -> bool:
        """Whether :meth:`compact` has something to do, which may be asked while a step is in flight."""
        return self._defrag_threshold is not None and defrag.is_due(self.pool, self._defrag_threshold)

    def compact(self) -> Swaps | None:
        """Where the blocks in use lie scattered, the swaps that bring them together, already booked: the device must
        exchange the contents before the next step. None when there is nothing to do.
        """
        self._nothing_in_flight()
        if self._defrag_threshold is None:
            return None
        swaps = defrag.compact(self.running, self._defrag_threshold)
        if swaps is not None:
            self._totals.blocks_moved += len(swaps.pairs)
        return swaps

    def lose_cache(self, error: Exception) -> Delta:
        """Nobody knows what the cache holds: end all running requests with an error, keep nothing for later prompts."""
        self._nothing_in_flight()
        return settle.lose_cache(self.running, error)

    def schedule(self) -> Schedule | None:
        """The next step, its blocks allocated and its outcome booked; it must be packed before another is scheduled.

        None when nothing can run now. With nothing in flight that is exactly when :attr:`idle`; else what runs next
        depends on what is in flight: settle the oldest and ask again.
        """
        try:
            step = self._compose()
        except _Unsettled:
            return None
        if not len(step.decode) + len(step.prefill):
            return None
        schedule = self._book(step)
        self._in_flight.append(schedule)
        self._totals.steps += 1
        return schedule

    def settle(self, schedule: Schedule, result: StepResult) -> Delta:
        """Book what the device computed for ``schedule``; see :func:`preheat.schedule.results.settle`."""
        self._must_be_oldest(schedule)
        delta = settle.settle(self.running, self.prefix, schedule, result, self._totals)
        self._in_flight.popleft()
        return delta

    def fail(self, schedule: Schedule, error: Exception) -> Delta:
        """The step failed: end its requests with an error and free what they hold; the others go on.

        Rows of the same requests in later steps are dropped when those are settled.
        """
        self._must_be_oldest(schedule)
        self._in_flight.popleft()
        return settle.fail(self.running, schedule, error)

    def stats(self) -> Stats:
        """Counters since the start and gauges of this moment, a new object each time.

        Prefix queries and hits are prompt tokens of sequences as they start; prompt tokens count with the first
        token generated.
        """
        totals = self._totals
        totals.running, totals.waiting, totals.blocks_used = len(self.running), len(self.waiting), self.pool.num_used
        return copy(totals)

    def check(self) -> None:
        """Prove that blocks and slots are exactly those of the running sequences. RuntimeError if not."""
        self.running.check()

    def _compose(self) -> _Step:
        """Choose the rows of the next step and allocate their blocks."""
        step = self._decoding() if self.mixed_steps else _Step(np.zeros(0, np.int64))
        self._continue_prefills(step)
        self._admit(step)
        return step if self.mixed_steps or step.prefill else self._decoding()

    def _book(self, step: _Step) -> Schedule:
        """Take the outcome of ``step`` as known: lengths move, and each token to be drawn has its place."""
        slots, schedule = self.slots, self._schedule_of(step)
        rows, ends = schedule.slots, schedule.ends
        slots.cached_len[rows] = ends
        if schedule.num_decode < schedule.rows:
            rows, ends = rows[schedule.samples], ends[schedule.samples]
        slots.tokens[rows, ends] = UNSEEN
        slots.device_len[rows] = ends + 1
        return schedule

    def _schedule_of(self, step: _Step) -> Schedule:
        """``step`` as others are to see it."""
        slots = self.slots
        if not step.prefill and len(step.decode) == len(self.running):
            persistent_batch = self._last_batch()
            if persistent_batch is None:
                self._batches += 1
                persistent_batch = self._persistent_batch = PersistentBatch.of(self.running, self._batches, step.decode)
            return persistent_batch.step(self.running, step.started)
        decode = len(step.decode)
        rows = np.concatenate((step.decode, np.array(step.prefill, np.int64)))
        extend = np.concatenate((np.ones(decode, np.int32), np.array(step.chunks, np.int32)))
        first = slots.cached_len[rows]
        samples = first + extend == slots.device_len[rows]
        return Schedule(rows, first, extend, samples, decode, self.running.ids[rows], step.started)

    def _last_batch(self) -> PersistentBatch | None:
        """The last step's line-up, if it is the next one's too."""
        last = self._persistent_batch
        return last if last is not None and last.goes_on(self.running) else None

    def _due(self) -> np.ndarray:
        """The tokens int32 that each running sequence has to compute, by arrival: none once it reaches its length."""
        slots = self.slots
        due = slots.device_len - slots.cached_len  # of all slots, which is cheaper than to pick them first
        due *= slots.device_len < slots.max_len
        running: np.ndarray = due[self.running.order]
        return running

    def _decoding(self) -> _Step:
        """Begin a step with the rows that have one token to compute; a missing block may cost the latest arrivals."""
        slots, persistent_batch = self.slots, self._last_batch()
        step = _Step(self.running.order[self._due() == 1] if persistent_batch is None else persistent_batch.slots)
        full = slots.cached_len == slots.num_blocks * slots.block_size
        at_edge = self._make_room(step, step.decode[full[step.decode]])
        if len(at_edge):
            self.running.grow_each(at_edge)
        return step

    def _continue_prefills(self, step: _Step) -> None:
        """Add the next chunk of the prompts already begun, earliest first."""
        slots = self.slots
        if len(step.decode) == len(self.running):
            return
        for slot in self.running.order[self._due() > 1].tolist():
            if len(step.prefill) == self._max_prefills or self.running.sequences[slot] is None:  # preempted just now
                return
            cached = int(slots.cached_len[slot])
            if self.running.blocks_lacking(slot, cached + 1) and not len(self._make_room(step, np.array([slot]))):
                return
            space = (int(slots.num_blocks[slot]) + self.pool.num_free) * slots.block_size - cached
            chunk = self._chunk(step, min(int(slots.device_len[slot]) - cached, space))
            if not chunk:
                return
            self._add_prefill(step, slot, chunk)

    def _admit(self, step: _Step) -> None:
        """Start waiting sequences, in order, while slots, budget and blocks last."""
        while self.waiting and self.slots.num_free and len(step.prefill) < self._max_prefills and not step.preempted:
            sequence = self.waiting.first()
            cached = self.prefix.lookup(sequence)
            extend = len(sequence.tokens) - len(cached) * self.pool.block_size
            chunk = self._chunk(step, extend)
            whole = self.chunked or chunk == extend or not self._fits_alone(extend)
            if not chunk or not whole or not self._blocks_last(sequence, cached):
                return
            self.waiting.remove(sequence.request.id)
            self._count_start(step, sequence, len(cached) * self.pool.block_size)
            self._add_prefill(step, self.running.start(sequence, cached), chunk)

    def _add_prefill(self, step: _Step, slot: int, chunk: int) -> None:
        self.running.grow(slot, int(self.slots.cached_len[slot]) + chunk)
        step.add(slot, chunk)

    def _count_start(self, step: _Step, sequence: Sequence, cached_tokens: int) -> None:
        if sequence.started:
            return
        sequence.started = True
        step.started[sequence.request.id] = cached_tokens
        if self.prefix.reads_for(sequence):
            self._totals.prefix_queries += len(sequence.tokens)
            self._totals.prefix_hits += cached_tokens

    def _chunk(self, step: _Step, wanted: int) -> int:
        """The most tokens, up to ``wanted``, that one more row may have within the budget."""
        budget = self._budget(len(step.decode))
        if self.padded(*step.with_row(wanted)) <= budget:
            return wanted
        fits, too_many = 0, wanted
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.padded(*step.with_row(middle)) <= budget:
                fits = middle
            else:
                too_many = middle
        return fits

    def _budget(self, decoding: int) -> int:
        """The most tokens of a step in which so many rows decode: never so few that nobody else could join them."""
        most = self.limits.max_num_batched_tokens
        if self._mixed_tokens is None or not decoding or not self.chunked:
            return most
        return min(most, max(self._mixed_tokens, 2 * decoding, self.padded(decoding + 1, decoding + 2, 2)))

    def _blocks_last(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all that is known of ``sequence`` has a place besides what the running ones still need.

        Asking for the whole of it, not just the first chunk, keeps a long prompt from being begun, preempted and
        begun again. Someone alone always has a place.
        """
        if not self.running:
            return True
        needed = -(-len(sequence.tokens) // self.pool.block_size) - len(cached) + self.pool.count_cached(cached)
        return needed + self.running.blocks_promised() + self._watermark <= self.pool.num_free

    def _make_room(self, step: _Step, slots: np.ndarray) -> np.ndarray:
        """See that each of ``slots`` can have a block, preempting from the end; those that were not preempted."""
        while len(slots) > self.pool.num_free:
            if self._in_flight:
                raise _Unsettled
            left, sequence = self.running.preempt_last()
            self.waiting.return_to_front(sequence)
            slots, step.decode = slots[slots != left], step.decode[step.decode != left]
            step.preempted = True
            self._totals.preemptions += 1
        return slots

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt that :meth:`add` accepts."""
        possible = range(1, self.limits.max_model_len)
        return len(possible) if self.chunked else bisect_left(possible, True, key=lambda n: not self._fits_alone(n))

    def _fits_alone(self, tokens: int) -> bool:
        return self.padded(1, tokens, tokens) <= self.limits.max_num_batched_tokens

    def _nothing_in_flight(self) -> None:
        if self._in_flight:
            raise RuntimeError("a step is in flight: settle it or let it fail first")

    def _must_be_oldest(self, schedule: Schedule) -> None:
        if not self._in_flight or schedule is not self._in_flight[0]:
            raise RuntimeError("this step is not the oldest in flight: steps are settled once, in the order they run")


def _check_limits(limits: Limits, padded: Padded) -> None:
    """Every sequence must be able to run alone, and every slot to advance by a token in one step."""
    if limits.num_blocks - 1 < limits.max_blocks_per_seq:
        raise SettingsError(
            f"max_model_len {limits.max_model_len} needs {limits.max_blocks_per_seq} blocks of {limits.block_size} "
            f"tokens, but the cache has {limits.num_blocks - 1}: lower max_model_len or give the cache more memory "
            f"(gpu_memory_utilization, kv_cache_memory_bytes, num_gpu_blocks_override)"
        )
    seqs, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if padded(seqs, seqs, 1) > budget:
        raise SettingsError(
            f"max_num_batched_tokens {budget} is too few for a token of each of max_num_seqs {seqs} sequences, which "
            f"take {padded(seqs, seqs, 1)} with padding: raise the one or lower the other"
        )
    if limits.max_num_prefill_seqs is not None and limits.max_num_prefill_seqs < 1:
        raise SettingsError(f"max_num_prefill_seqs must be 1 or more, or unset; got {limits.max_num_prefill_seqs}")
