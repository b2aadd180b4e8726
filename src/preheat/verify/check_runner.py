"""The lab: made-up sequences on real blocks of the pool, and steps of them through packer and executor.

A sequence is a slot, as every running one. Its rows go into steps by the scheduler's rules: what lacks one token
decodes, what lacks more prefills, and a token is sampled where nothing is lacking any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from preheat.core import OWN_ID, Request, Schedule, Swaps
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.plan.buckets import Bucket
from preheat.plan.items import SWAP_SIZES
from preheat.plan.plan import Plan
from preheat.schedule.blocks import BlockPool
from preheat.schedule.defrag import padded_size
from preheat.schedule.slots import Slots
from preheat.warmup.dummy_batch import GREEDY


class Row(NamedTuple):
    """A neighbour in a step: it lacks some tokens after its ``cached`` ones."""

    cached: int
    lacking: int


@dataclass
class CheckRunner:
    """``shape`` is that of the last step. ``eager`` runs steps operation by operation, and then ``layers`` are the last
    step's residual stream after each layer, [hidden] each, where its logits come from.
    """

    pool: BlockPool
    packer: Packer
    executor: Executor
    eager: bool = False
    shape: Bucket | None = None
    layers: list[Tensor] = field(default_factory=list)

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
    def sequence(self, tokens: np.ndarray, *, cached: int = 0, of: int = 0) -> Iterator[int]:
        """The slot of a sequence of ``tokens``, int32, on blocks of its own; all is given back after.

        The blocks of its ``cached`` first tokens, a multiple of the block size, are those of slot ``of``.
        """
        slots, shared = self.slots, cached // self.slots.block_size
        own = self.pool.allocate(-(-len(tokens) // slots.block_size) - shared)
        slot = self._take(tokens, cached, 0)
        slots.set_blocks(slot, slice(slots.num_blocks[slot]), [*slots.block_table[of, :shared], *own])
        try:
            yield slot
        finally:
            self.pool.release(slots.block_table[slot, shared : slots.num_blocks[slot]].tolist())
            slots.give_back(slot)

    @contextmanager
    def neighbours(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """Slots for ``rows`` whose outcome nobody reads: their blocks are the pad block."""
        taken: list[int] = []
        try:
            for number, (cached, lacking) in enumerate(rows, 1):
                tokens = (np.arange(cached + lacking, dtype=np.int32) * 7 + number) % self.vocab_size
                taken.append(self._take(tokens, cached, number))
            yield taken
        finally:
            for slot in taken:
                self.slots.give_back(slot)

    def _take(self, tokens: np.ndarray, cached: int, number: int) -> int:
        slots = self.slots
        request = Request(OWN_ID - number, tokens.tolist(), GREEDY, 0, slots.max_model_len - len(tokens))
        slot = slots.take(request, tokens)
        slots.cached_len[slot] = cached
        slots.num_blocks[slot] = -(-len(tokens) // slots.block_size)
        return slot

    def lengthen(self, slot: int, known: int) -> None:
        """From now on, ``known`` tokens of the sequence are known."""
        self.slots.device_len[slot] = known

    def shape_of(self, rows: Sequence[Row]) -> Bucket | None:
        """The bucket of a step in which ``rows`` compute all that they lack; None if there is none."""
        limits, lacking = self.plan.limits, [row.lacking for row in rows]
        lengths = [sum(row) for row in rows]
        blocks = sum(-(-length // limits.block_size) for length in lengths)
        if max(lengths) > limits.max_model_len or len(rows) > limits.max_num_seqs:
            return None
        if sum(lacking) > limits.max_num_batched_tokens or blocks >= limits.num_blocks:
            return None
        decodes = max(lacking) <= 1
        longest = max(lengths if decodes else lacking)
        size = self.plan.policy.step_size(len(rows), sum(lacking), decodes=decodes, longest=longest, blocks=blocks)
        return self.plan.dispatcher.find(size)

    def read(self, slot: int, count: int) -> None:
        """A step of its own, in which ``slot`` computes its next ``count`` tokens."""
        self._run(self._schedule([slot], [count]))

    def step(self, slot: int, before: Sequence[int] = (), behind: Sequence[int] = ()) -> Tensor:
        """A step in which ``slot`` and its neighbours compute all that they lack; decoding rows go first.

        The logits after the slot's last token, fp32 [vocab] on the host.
        """
        schedule = self._schedule([*before, slot, *behind])
        row = int(np.flatnonzero(schedule.slots == slot)[0])
        return self._run(schedule, row)[row].cpu()

    def _schedule(self, chosen: Sequence[int], extend: Sequence[int] | None = None) -> Schedule:
        """A step in which each of ``chosen`` computes ``extend`` tokens, by default all that it lacks."""
        cached = self.slots.cached_len[np.array(chosen)]
        lacking = self.slots.device_len[np.array(chosen)] - cached
        some = lacking if extend is None else np.array(extend, np.int32)
        order = np.argsort(lacking > 1, kind="stable")
        slots, decoding = np.array(chosen, np.int64)[order], int((lacking == 1).sum())
        return Schedule(slots, cached[order], some[order], (some == lacking)[order].astype(np.int32), decoding)

    def _run(self, schedule: Schedule, row: int = 0) -> Tensor:
        """The logits of the step, whose layers are kept of ``row``."""
        batch = self.packer.pack(schedule)
        self.shape, self.layers = batch.bucket, []
        token, final = int(schedule.extend[: row + 1].sum()) - 1, self.executor.decoder.spec.num_layers - 1

        def tap(layer: int, residual: Tensor) -> None:
            self.layers.append(residual[row if layer == final else token].cpu())

        tapped = self.eager and bool(schedule.samples.all())
        logits = self.executor.logits(batch, eager=self.eager, tap=tap if tapped else None)
        self.slots.cached_len[schedule.slots] += schedule.extend
        return logits

    def move(self, slot: int) -> None:
        """The blocks of ``slot`` change places with free ones, as in a compaction."""
        slots, count = self.slots, int(self.slots.num_blocks[slot])
        here = slots.block_table[slot, :count].copy()
        there = np.array(self.pool.allocate(count), np.int32)
        pairs = np.stack([here, there], axis=1)
        for at in range(0, count, SWAP_SIZES[-1]):
            part = pairs[at : at + SWAP_SIZES[-1]]
            self.executor.swap(Swaps(part, padded_size(len(part))))
        slots.set_blocks(slot, slice(count), there)
        self.pool.release(here.tolist())
