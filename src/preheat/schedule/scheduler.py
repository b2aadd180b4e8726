"""The scheduler: the rows of the next step.

A step has one token of every decoding row. Within the rest of the budget follow the next chunk of prompts already
begun, then waiting sequences in order of rank (priority, then arrival), last the drafts of a proposer, if there is one.
The budget counts *padded* tokens, as in the bucket that the device runs (source: the padding-aware scheduling of vLLM
on Gaudi).

If a row needs a block and none is free, the last sequence in rank is preempted. It gives back its blocks, keeps its
tokens, returns to its place in the queue and is recomputed later. The first in rank therefore always advances.

Lengths move when a step is scheduled: its tokens count as computed and the sampled ones as known. The next step can
then be scheduled while this one runs. Few decisions depend on a token's value. If a token ends its sequence, the row
has been scheduled once too often; it is dropped when that step's results are processed. Reaching the maximum length is
known ahead. Preemption must keep the tokens, so it waits until nothing is in flight. The next step of a row with drafts
depends on the number of accepted drafts, so that row waits for its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from typing import NamedTuple

from preheat.core import Delta, Finish, Request, Schedule, Stats, StepResult, Swaps
from preheat.errors import InvalidRequest, SettingsError
from preheat.limits import Limits
from preheat.schedule import defrag, results
from preheat.schedule.adapters import BASE, Adapter, AdapterSlotTable
from preheat.schedule.blocks import BlockPool
from preheat.schedule.booking import Booking
from preheat.schedule.budget import Budget
from preheat.schedule.composer import Composer, MustWait
from preheat.schedule.drafting import Drafting
from preheat.schedule.grammar import GrammarState
from preheat.schedule.images import EncoderCache
from preheat.schedule.padded import Padded, check_limits, unpadded
from preheat.schedule.prefix import PrefixCache
from preheat.schedule.resume import check_resume
from preheat.schedule.running import RunningSequences
from preheat.schedule.sequence import Sequence
from preheat.schedule.slots import Slots
from preheat.schedule.states import NO_ENDS, Ends, StateSlots
from preheat.schedule.waiting import WaitingQueue


class Caching(NamedTuple):
    """Prefixes of a model with ``contents`` are cached if ``enabled``, and its states at the ends ``kept``."""

    enabled: bool = True
    contents: str = ""
    kept: Ends = NO_ENDS


CACHING = Caching()


class Scheduler:
    """Continuous batching within ``limits``.

    A step is in flight from :meth:`schedule` until :meth:`process_results` or :meth:`fail`. Several may be; results are
    processed in the order in which the steps run. Requests come and go at any time. Blocks are compacted, and sequences
    preempted, only when nothing is in flight.

    ``padded`` is the cost of a step (see :data:`Padded`). ``defrag_threshold`` is the threshold of
    :func:`defrag.is_due` (None: never compact). A step with decoding rows has at most ``mixed_tokens`` tokens, so that
    they do not wait for long; the bound is off while a sequence that resumes is next in the queue. Without
    ``mixed_steps`` a step either reads prompts or decodes, prompts first (source: the two phases of vLLM on Gaudi).
    ``drafting`` gives decoding rows draft tokens. There are ``max_loras`` adapter slots. ``head`` makes a text's
    numbers of its pooled state. Raises SettingsError for limits under which some sequence could never run.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        caching: Caching = CACHING,
        enable_chunked_prefill: bool = True,
        mixed_steps: bool = True,
        mixed_tokens: int | None = None,
        padded: Padded = unpadded,
        defrag_threshold: int | None = None,
        drafting: Drafting | None = None,
        max_loras: int = 0,
        head: Callable[[bytes], bytes] | None = None,
    ) -> None:
        check_limits(limits, padded)
        self.drafting = drafting if drafting is not None and drafting.proposer.num_speculative_tokens else None
        if self.drafting is not None and not mixed_steps:
            raise SettingsError("speculative decoding needs steps that mix prompts and decoding: use unified bucketing")
        self._head = head
        self.limits = limits
        self.budget = Budget(limits, padded, mixed_tokens, chunked=enable_chunked_prefill)
        groups = limits.groups
        self.slots = Slots(limits.max_num_seqs, limits.max_model_len, limits.block_size, len(groups))
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        states = StateSlots(limits.max_num_seqs, limits.states, caching.kept) if limits.states else None
        self.pool.states = None if states is None else states.pool
        self.prefix = PrefixCache(self.pool, caching.enabled, caching.contents, groups)
        self.adapters = AdapterSlotTable(max_loras)
        self.running = RunningSequences(self.slots, self.pool, self.adapters, groups, limits.in_flight, states=states)
        self.images = EncoderCache(limits.max_images, limits.image_tokens) if limits.image_tokens else None
        self.waiting = WaitingQueue()
        self._defrag_threshold = defrag_threshold
        self._scattered = 0, False  # by the changes of the pool
        self._in_flight: deque[Schedule] = deque()
        self._booking = Booking(self.running, self.images)
        self.composer = Composer(
            limits, self.budget, self.running, self.waiting, prefix=self.prefix, images=self.images,
            booking=self._booking, in_flight=self._in_flight, mixed_steps=mixed_steps,
        )  # fmt: skip

    def forget(self) -> None:
        """Reset the counters."""
        self.composer.totals = Stats(blocks_total=self.pool.num_usable)

    @property
    def kept_ends(self) -> Ends | None:
        """The ends of blocks with kept states, None for a model without states."""
        return None if self.running.states is None else self.running.states.ends

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run, nor anything in flight."""
        return not self.running and not self.waiting and not self._in_flight

    def add(self, request: Request, grammar: GrammarState | None = None, adapter: Adapter | None = None) -> None:
        """Queue a request.

        It may have an adapter and the initial state of its grammar. Raises InvalidRequest for a request that could
        never run; the frontend rejects such requests already.
        """
        length = len(request.prompt)
        if request.id in self.waiting or self.running.slot_of(request.id) is not None:
            raise InvalidRequest(f"request {request.id} is already here")
        if not length or request.max_tokens < 1 or length + request.max_tokens > self.limits.max_model_len:
            raise InvalidRequest(
                f"a prompt of {length} tokens and max_tokens of {request.max_tokens} must both be positive and fit "
                f"max_model_len ({self.limits.max_model_len}) together"
            )
        if not self.budget.chunked and not self.budget.fits_alone(length):
            raise InvalidRequest(
                f"a prompt of {length} tokens does not fit max_num_batched_tokens "
                f"({self.limits.max_num_batched_tokens}) in one step: raise it or enable chunked prefill"
            )
        if self.images is not None:
            self.images.share(request)
        elif request.segments:
            raise InvalidRequest("the model sees no images")
        if bool(request.lora_name) != (adapter is not None) or (adapter is not None and not self.adapters.count):
            raise InvalidRequest(f"there is no adapter {request.lora_name!r}", param="model")
        if request.resume is not None:
            if any(request.id in step.ids for step in self._in_flight):
                raise InvalidRequest(f"request {request.id} has a step in flight here: resume it behind that step")
            check_resume(request, BASE if adapter is None else adapter.digest)
        self.waiting.arrive(Sequence(request, grammar, adapter))

    def cancel(self, request_id: int) -> bool:
        """Drop a request and free its slot and blocks at once.

        Returns False if it is not here (any more).
        """
        slot = self.running.slot_of(request_id)
        if slot is None:
            return self.waiting.pop(request_id, None) is not None
        self.running.stop([slot])
        return True

    def cancel_all(self) -> None:
        """Drop all requests."""
        self.waiting.clear()
        self.running.stop(self.running.order.tolist())

    def abort_all(self) -> Delta:
        """End all requests with reason "abort"."""
        self._nothing_in_flight()
        ids = [*self.running.ids[self.running.order].tolist(), *self.waiting]
        self.cancel_all()
        return Delta(finished=dict.fromkeys(ids, Finish("abort")))

    def requeue_all(self) -> None:
        """Preempt all running sequences: their keys and values are computed again, from their tokens.

        Waiting sequences forget the hashes of their blocks, which may be keyed anew.
        """
        self._nothing_in_flight()
        while self.running:
            self.waiting.wait(self.running.preempt_last()[1])
            self.composer.totals.preemptions += 1
        for sequence in self.waiting.values():
            sequence.block_hashes.clear()

    @property
    def scattered(self) -> bool:
        """Whether :meth:`compact` has blocks to move; a step may be in flight."""
        if self._defrag_threshold is None:
            return False
        if self._scattered[0] != self.pool.changes:
            self._scattered = self.pool.changes, defrag.is_due(self.pool, self._defrag_threshold)
        return self._scattered[1]

    def compact(self) -> Swaps | None:
        """Return the swaps that bring scattered blocks together, or None.

        Pool and tables are updated already, so the device must exchange the contents before the next step.
        """
        self._nothing_in_flight()
        if self._defrag_threshold is None:
            return None
        swaps = defrag.compact(self.running, self._defrag_threshold)
        if swaps is not None:
            self.composer.totals.blocks_moved += len(swaps.pairs)
        return swaps

    def lose_cache(self, error: Exception) -> Delta:
        """End all running requests with an error.

        The cache's contents are unknown, so the prefix cache is emptied.
        """
        self._nothing_in_flight()
        return results.lose_cache(self.running, error)

    def reset_prefix_cache(self) -> None:
        """Forget the contents of all computed blocks and encoded images.

        No later sequence finds them. Running sequences keep their blocks. Blocks that they fill from now on may be
        found again.
        """
        self._nothing_in_flight()
        self.pool.forget_contents()
        if self.images is not None:
            self.images.forget()

    def forget_inputs(self) -> None:
        """Forget the adapters and embeddings on the device: a check has put its own there."""
        self._nothing_in_flight()
        self.adapters.forget()
        if self.images is not None:
            self.images.forget()

    def rekey(self, contents: str) -> None:
        """Empty the prefix cache, key it by ``contents``, and compute all running sequences again.

        Blocks computed from now on differ from earlier ones.
        """
        self.requeue_all()
        self.prefix.rekey(contents)
        self.reset_prefix_cache()

    def schedule(self) -> Schedule | None:
        """Return the next step, with its blocks allocated and its lengths moved.

        Pack it before scheduling another. Returns None when nothing can run now: with nothing in flight that means
        :attr:`idle`, otherwise the oldest results must be processed first.
        """
        if self.drafting is not None:
            batch = self._booking.batch
            self.drafting.begin(int((self.composer.due() == 1).sum()) if batch is None else len(batch.slots))
        drafting = self.drafting if self.drafting is not None and self.drafting.most else None
        schedule = None if self.waiting or drafting else self._booking.again()
        if schedule is None:
            try:
                step = self.composer.compose(drafting)
            except MustWait:
                return None
            if not len(step.decode) + len(step.prefill):
                return None
            schedule = self._booking.book(step)
        schedule.loads = self.adapters.take_loads()
        if self.pool.tier is not None:
            schedule.transfers = self.pool.tier.take_transfers()
        self._in_flight.append(schedule)
        self.composer.totals.steps += 1
        return schedule

    def process_results(self, schedule: Schedule, result: StepResult) -> Delta:
        """Apply the results of ``schedule``; see :func:`preheat.schedule.results.process_results`."""
        self._must_be_oldest(schedule)
        totals, drafting = self.composer.totals, self.drafting
        adapters = self.running.adapter_digests(schedule.started) if self.adapters.count else {}
        delta = results.process_results(self.running, self.prefix, schedule, result, totals=totals, drafting=drafting)
        delta.adapters = adapters
        self._in_flight.popleft()
        if self._head is not None:
            delta.pooled = {id: self._head(pooled) for id, pooled in delta.pooled.items()}
        return delta

    def fail(self, schedule: Schedule, error: Exception) -> Delta:
        """End the requests of a failed step with an error.

        Their slots and blocks are freed; the other requests go on. Rows of ended requests in later steps are dropped
        when the results of these steps are processed. A request also ends if a later step of it sees an image that the
        failed step should have encoded.
        """
        self._must_be_oldest(schedule)
        self._in_flight.popleft()
        delta = results.fail(self.running, schedule, error)
        if self.running.states is not None:
            self.running.states.drop(schedule)
        self.adapters.lose(schedule.loads)
        if self.images is not None and schedule.images is not None:
            for later, rows in self.images.lose(schedule.images, self._in_flight):
                delta.finished |= results.fail(self.running, later, error, rows).finished
        return delta

    def stats(self) -> Stats:
        """Return a copy of the counters and gauges.

        Prefix queries and hits are tokens of sequences as they start; prompt tokens count with the first generated
        token.
        """
        totals = self.composer.totals
        totals.running, totals.waiting, totals.blocks_used = len(self.running), len(self.waiting), self.pool.num_used
        found = copy(totals)
        if self.drafting is not None:
            places = self.drafting.proposer.num_speculative_tokens
            found.accepted_per_pos = totals.accepted_per_pos + [0] * (places - len(totals.accepted_per_pos))
        return found

    def serves(self, lora_name: str) -> bool:
        """Return whether a request with the adapter ``lora_name`` waits or runs."""
        running = map(self.running.sequence, self.running.order.tolist())
        return any(each.request.lora_name == lora_name for each in (*self.waiting.values(), *running))

    def check(self) -> None:
        """Raise RuntimeError unless blocks, slots and sequences agree.

        Exactly the running sequences must own the used blocks and slots.
        """
        self.running.check()

    def _nothing_in_flight(self) -> None:
        if self._in_flight:
            raise RuntimeError("a step is in flight: process its results or let it fail first")

    def _must_be_oldest(self, schedule: Schedule) -> None:
        if not self._in_flight or schedule is not self._in_flight[0]:
            raise RuntimeError("this step is not the oldest in flight: results are processed once, in launch order")
