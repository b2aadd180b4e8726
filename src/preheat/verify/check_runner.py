"""Test sequences on real blocks of the pool.

Their steps go through the packer and the executor that serve. A test sequence owns a slot, as every running one. Rows
follow the scheduler's rules: a row that lacks a single token decodes, a row that lacks more prefills, and a row samples
once it lacks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from preheat.core import OWN_ID, Request, Schedule, Segment, Swaps
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.execution.mixers import Mixers
from preheat.plan.buckets import Bucket
from preheat.plan.cache_items import SWAP_SIZES
from preheat.plan.item import NothingToRun
from preheat.plan.plan import Plan
from preheat.schedule.blocks import BlockPool
from preheat.schedule.defrag import PAIRS_AT_ONCE
from preheat.schedule.images import EncoderCache
from preheat.schedule.slots import Slots
from preheat.verify.kept_states import KeptStates
from preheat.warmup.dummy_batch import GREEDY

ZEROS, NOT_NUMBERS = 0, 255
"""Fill bytes of a block: numbers of every type are then 0, or NaN."""


class Row(NamedTuple):
    """Another row of a step: it has ``cached`` tokens and lacks ``lacking`` more."""

    cached: int
    lacking: int


@dataclass
class CheckRunner:
    """Runs test sequences through the packer and the executor that serve.

    ``images`` is the encoder cache, for sequences with images. ``bucket`` is the last step's. ``eager`` runs steps
    operation by operation; ``layers`` are then the last step's residual stream after each layer, [hidden] each, at the
    token of the returned logits. A sequence that finds too few free slots or blocks raises NothingToRun.
    """

    pool: BlockPool
    packer: Packer
    executor: Executor
    eager: bool = False
    images: EncoderCache | None = None
    bucket: Bucket | None = None
    layers: list[Tensor] = field(default_factory=list)
    kept: KeptStates = field(init=False)

    def __post_init__(self) -> None:
        self.kept = KeptStates(self.pool.states, self.slots.num_slots)

    @property
    def slots(self) -> Slots:
        return self.packer.slots

    @property
    def plan(self) -> Plan:
        return self.packer.plan

    @property
    def vocab_size(self) -> int:
        return self.executor.decoder.spec.vocab_size

    @contextmanager
    def sequence(
        self,
        tokens: np.ndarray,
        *,
        cached: int = 0,
        of: int = 0,
        prompt: int | None = None,
        segments: Sequence[Segment] = (),
        ends: Sequence[int] = (),
    ) -> Iterator[int]:
        """Yield the slot of a sequence of ``tokens``, int32.

        It has blocks of its own. Slot and blocks are given back afterwards. The blocks of its first ``cached`` tokens,
        a multiple of the block size, are the first blocks of slot ``of``. The first ``prompt`` tokens, by default all,
        are its prompt, with images at ``segments``; it has generated the others. Its states at ``ends`` stay, for
        sequences that share its blocks.
        """
        slots, shared = self.slots, cached // self.slots.block_size
        slot = self._take_slot(tokens, cached, prompt=prompt, segments=segments)
        own: list[int] = []
        try:
            if self.has_states:
                self.kept.begin(slot, ends, of, cached)
            groups, count = slots.tables.shape[1], int(slots.num_blocks[slot]) - shared
            own = self._allocate(count * groups)
            slots.set_blocks(slot, slice(shared), slots.tables[of, :, :shared], slice(None))
            slots.set_blocks(slot, slice(shared, shared + count), np.reshape(own, (groups, count)), slice(None))
            yield slot
        finally:
            if own:  # read from the table: :meth:`move` may have replaced them
                self.pool.release(self.blocks_of(slot, shared))
            self.kept.end(slot)
            slots.give_back(slot)

    def blocks_of(self, slot: int, first: int = 0) -> list[int]:
        """Return the blocks of ``slot`` in all cache groups, from column ``first`` on."""
        found: list[int] = self.slots.tables[slot, :, first : self.slots.num_blocks[slot]].ravel().tolist()
        return found

    @contextmanager
    def poisoned(self, tokens: np.ndarray, cached: int = 0) -> Iterator[int]:
        """Yield a slot as :meth:`sequence`, on blocks full of NaN.

        NaN is also the content of the keys and values of its first ``cached`` tokens.
        """
        with self.sequence(tokens) as slot:
            blocks = self.blocks_of(slot)
            self.slots.cached_len[slot] = cached
            try:
                for block in blocks:
                    self.executor.fill_block(block, NOT_NUMBERS)
                yield slot
            finally:
                for block in blocks:
                    self.executor.fill_block(block, ZEROS)

    @contextmanager
    def neighbours(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """Yield slots for other rows of a step.

        Nobody reads their results, and their blocks are the pad block.
        """
        taken: list[int] = []
        try:
            for number, (cached, lacking) in enumerate(rows, 1):
                tokens = (np.arange(cached + lacking, dtype=np.int32) * 7 + number) % self.vocab_size
                taken.append(self._take_slot(tokens, cached, number))
            yield taken
        finally:
            for slot in taken:
                self.slots.give_back(slot)

    def _take_slot(
        self,
        tokens: np.ndarray,
        cached: int,
        number: int = 0,
        prompt: int | None = None,
        segments: Sequence[Segment] = (),
    ) -> int:
        slots = self.slots
        room, known = slots.max_model_len - len(tokens), tokens[:prompt].tolist()
        slot = self.take(Request(OWN_ID - number, known, GREEDY, 0, room, segments=list(segments)), tokens)
        slots.cached_len[slot] = cached
        slots.num_blocks[slot] = -(-len(tokens) // slots.block_size)
        return slot

    def take(self, request: Request, tokens: np.ndarray) -> int:
        """Return a slot for ``request``, with ``tokens`` known.

        The caller gives it back.
        """
        if not self.slots.num_free:
            raise NothingToRun(f"all {self.slots.num_slots} slots are taken")
        return self.slots.take(request, tokens)

    def _allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            raise NothingToRun(f"it needs {count} blocks, {self.pool.num_free} are free")
        return self.pool.allocate(count)

    def restore(self, slot: int, of: int, count: int) -> None:
        """Copy blocks of slot ``of`` to ``slot`` by way of the host.

        The first ``count`` blocks go into the own blocks of ``slot``.
        """
        tier, slots = self.pool.tier, self.slots
        if tier is None:
            raise NothingToRun("nothing is kept on the host")
        for index in range(count):
            key, block = b"check %d" % index, int(slots.block_table[slot, index])
            tier.store(int(slots.block_table[of, index]), key)
            self.executor.fill_block(block, ZEROS)
            if not tier.load(block, key):
                raise NothingToRun("the host holds too few blocks")
        tier.forget()
        slots.cached_len[slot] = count * slots.block_size

    def lengthen(self, slot: int, known: int) -> None:
        """Set the number of the sequence's known tokens."""
        self.slots.device_len[slot] = known

    def bucket_of(self, rows: Sequence[Row]) -> Bucket | None:
        """Return the bucket of a step of ``rows``, or None.

        The rows compute everything they lack.
        """
        limits, lacking = self.plan.limits, [row.lacking for row in rows]
        lengths = [sum(row) for row in rows]
        blocks = sum(-(-length // limits.block_size) for length in lengths)
        if max(lengths) > limits.max_model_len or len(rows) > limits.max_num_seqs:
            return None
        if sum(lacking) > limits.max_num_batched_tokens or blocks > limits.columns:
            return None
        decodes = max(lacking) <= 1
        longest = max(lengths if decodes else lacking)
        size = self.plan.policy.step_size(len(rows), sum(lacking), decodes=decodes, longest=longest, blocks=blocks)
        return self.plan.dispatcher.find(size)

    def read(self, slot: int, count: int) -> None:
        """Compute the next ``count`` tokens of ``slot`` in a step of its own."""
        self._run(self._schedule([slot], [count]))

    def hidden(self, slot: int, count: int) -> np.ndarray:
        """Compute the next ``count`` tokens of ``slot``.

        Returns the hidden states that it reports.
        """
        batch = self.packer.pack(self._schedule([slot], [count]))
        self.bucket = batch.bucket
        states = self.executor.execute(batch).hidden or {}
        self.slots.cached_len[slot] += count
        return states[0]

    def states(self, slot: int, before: Sequence[int] = (), behind: Sequence[int] = ()) -> np.ndarray:
        """Return the hidden states that ``slot`` reports from a step with other rows, as :meth:`step` runs it."""
        schedule = self._schedule([*before, slot, *behind])
        batch = self.packer.pack(schedule)
        self.bucket = batch.bucket
        found = self.executor.execute(batch).hidden or {}
        self.slots.cached_len[schedule.slots] += schedule.extend
        return found[int(np.flatnonzero(schedule.slots == slot)[0])]

    @property
    def encodes(self) -> bool:
        """Whether a text is computed in one step alone."""
        return self.executor.decoder.spec.encodes

    @property
    def most_drafts(self) -> int:
        """The most drafts of a row; each needs a state slot in a model with states."""
        most, states = self.plan.limits.num_speculative_tokens, self.plan.limits.states
        return min(most, states) if self.has_states else most

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state of each sequence."""
        return self.executor.decoder.spec.has_states

    def fill_states(self, number: float) -> None:
        """Overwrite the states of all slots of sequences."""
        attention = self.executor.attention
        assert isinstance(attention, Mixers), "no layer has states"
        for each in attention.states:
            each.window[1 : 1 + self.slots.num_slots].fill_(number)
            each.matrix[1 : 1 + self.slots.num_slots].fill_(number)

    def draw(self, slot: int) -> int:
        """Return the token behind all tokens of ``slot``, as :func:`preheat.core.marked` marks it."""
        batch = self.packer.pack(self._schedule([slot]))
        self.bucket = batch.bucket
        (token,) = self.executor.execute(batch).tokens.tolist()
        self.slots.cached_len[slot] = self.slots.device_len[slot]
        return int(token)

    def step(self, slot: int, before: Sequence[int] = (), behind: Sequence[int] = ()) -> Tensor:
        """Return the logits after the last token of ``slot``, fp32 [vocab] on the host.

        ``slot`` and the rows ``before`` and ``behind`` it compute everything they lack in one step; decoding rows go
        first.
        """
        schedule = self._schedule([*before, slot, *behind])
        row = int(np.flatnonzero(schedule.slots == slot)[0])
        return self._run(schedule, row)[row].cpu().clone()  # on a host the next step may overwrite them

    def write(self, slot: int, begin: int, tokens: np.ndarray) -> None:
        """Replace the sequence from its token ``begin`` on by ``tokens``.

        None of the new tokens are computed.
        """
        slots = self.slots
        slots.tokens[slot, begin : begin + len(tokens)] = tokens
        slots.cached_len[slot] = min(slots.cached_len[slot], begin)
        self.kept.forget(slot, begin)
        slots.device_len[slot] = begin + len(tokens)

    def verify(self, slot: int, before: Sequence[int] = ()) -> Tensor:
        """Return the logits after each token that ``slot`` lacks.

        They are fp32 [tokens, vocab] on the host. All tokens but the first are drafts. The slot computes them behind
        the decoding rows ``before``.
        """
        slots, chosen = self.slots, np.array([*before, slot], np.int64)
        extend = slots.device_len[chosen] - slots.cached_len[chosen]
        first = slots.cached_len[chosen].copy()
        schedule = Schedule(chosen, first, extend, extend.copy(), len(before), num_drafted=1)
        schedule.states = self.kept.states(schedule) if self.has_states else None
        return self._run(schedule, len(before))[len(before) :].cpu().clone()

    def _schedule(self, chosen: Sequence[int], extend: Sequence[int] | None = None) -> Schedule:
        """Return a step of the slots ``chosen``.

        Each computes ``extend`` tokens, by default everything it lacks.
        """
        cached = self.slots.cached_len[np.array(chosen)]
        lacking = self.slots.device_len[np.array(chosen)] - cached
        some = lacking if extend is None else np.array(extend, np.int32)
        order = np.argsort(lacking > 1, kind="stable")
        slots, decoding = np.array(chosen, np.int64)[order], int((lacking == 1).sum())
        samples = (some == lacking)[order].astype(np.int32)
        schedule = Schedule(slots, cached[order], some[order], samples, decoding)
        if self.images is not None:
            self.images.attach(schedule, self.slots)
        schedule.states = self.kept.states(schedule) if self.has_states else None
        return schedule

    def _run(self, schedule: Schedule, row: int = 0) -> Tensor:
        """Run the step and return its logits; keep :attr:`layers` for ``row``."""
        batch = self.packer.pack(schedule)
        self.bucket, self.layers = batch.bucket, []
        token, final = int(schedule.extend[: row + 1].sum()) - 1, self.executor.decoder.spec.num_layers - 1
        place = int(schedule.num_sampled[: row + 1].sum()) - 1

        def tap(layer: int, residual: Tensor) -> None:
            self.layers.append(residual[place if layer == final else token].cpu().clone())  # it is overwritten

        tapped = self.eager and bool(schedule.samples.all())
        logits = self.executor.logits(batch, eager=self.eager, tap=tap if tapped else None)
        self.slots.cached_len[schedule.slots] += schedule.extend
        return logits

    def swap_sizes(self, slot: int, *, every: bool) -> list[int]:
        """Return the swap sizes that can move the blocks of ``slot``.

        They are the least size, and larger sizes that free blocks can fill. Without graphs no size is a program of its
        own: unless ``every`` size is asked for, the least size and one of several parts stand for all.
        """
        count = len(self.blocks_of(slot))
        sizes = [size for size in SWAP_SIZES if size >= count]
        if not (every or self.executor.backend.facts.captures):
            sizes = [size for size in sizes if size == sizes[0] or size == 4 * PAIRS_AT_ONCE]
        return [size for size in sizes if size == sizes[0] or 2 * size - count <= self.pool.num_free]

    def move(self, slot: int, size: int) -> None:
        """Swap the blocks of ``slot`` with free ones, as compaction does.

        They are the last pairs of a swap of ``size``, behind as many pairs of other free blocks as there are.
        """
        slots, here = self.slots, self.blocks_of(slot)
        count = len(here)
        others = max(min(size - count, (self.pool.num_free - count) // 2), 0)
        free = self._allocate(count + 2 * others)
        there, left = free[:count], free
        try:
            own = np.array([here, there], np.int32).T
            pairs = np.concatenate([np.array(free[count:], np.int32).reshape(-1, 2), own])
            self.executor.swap(Swaps(pairs, size))
            slots.set_blocks(
                slot, slice(slots.num_blocks[slot]), np.reshape(there, (slots.tables.shape[1], -1)), slice(None)
            )
            left = [*here, *free[count:]]
        finally:
            self.pool.release(left)
