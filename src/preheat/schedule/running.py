"""The running sequences with their slots, blocks and adapter slots.

Every block reference is taken and dropped here. A freed block may be reused at once. A step in flight may still write
a token of the former owner to it, but steps run in order, so the new owner writes later. Such a block is not in the
prefix cache: only blocks with all tokens processed are published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from preheat.core import NO_PERSISTENT_BATCH
from preheat.schedule.adapters import AdapterSlotTable
from preheat.schedule.blocks import BlockPool
from preheat.schedule.sequence import Sequence
from preheat.schedule.slots import NO_LOGPROBS, Slots

FREE = np.iinfo(np.int64).min


class RunningSequences:
    """The sequences in slots, with the blocks and adapter slots that they own.

    ``order`` int64 lists the running slots by rank: priority, then arrival. ``ids`` int64 [slots] are the request ids,
    FREE for a free slot. ``changes`` counts arrivals and departures. ``begun`` is a persistent batch: the results of
    its first step are known, and so its rows are past their prompts.
    """

    def __init__(self, slots: Slots, pool: BlockPool, adapters: AdapterSlotTable | None = None) -> None:
        self.slots, self.pool, self.adapters = slots, pool, adapters or AdapterSlotTable()
        self.order = np.zeros(0, np.int64)
        self.ids = np.full(slots.num_slots, FREE, np.int64)
        self.sequences: list[Sequence | None] = [None] * slots.num_slots
        self._slot_of: dict[int, int] = {}
        self.changes, self.begun = 0, NO_PERSISTENT_BATCH

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot_of(self, request_id: int) -> int | None:
        """Return the slot of a running request, or None."""
        return self._slot_of.get(request_id)

    def sequence(self, slot: int) -> Sequence:
        """Return the sequence in an occupied ``slot``."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def adapter_digests(self, request_ids: Iterable[int]) -> dict[int, str]:
        """Return the digests of the adapters of running requests, by id; a request without an adapter has none."""
        slots = {id: slot for id in request_ids if (slot := self.slot_of(id)) is not None}
        digests = {id: self.sequence(slot).adapter_digest for id, slot in slots.items()}
        return {id: digest for id, digest in digests.items() if digest}

    @property
    def last(self) -> Sequence:
        """The sequence that is last in rank."""
        return self.sequence(int(self.order[-1]))

    def start(self, sequence: Sequence, cached: list[int]) -> int:
        """Give ``sequence`` a slot that begins with the blocks ``cached``, now shared.

        Returns the slot.
        """
        slots = self.slots
        slot = slots.take(sequence.request, sequence.tokens)
        self.pool.share(cached)
        slots.set_blocks(slot, slice(len(cached)), cached)
        slots.num_blocks[slot] = len(cached)
        slots.cached_len[slot] = len(cached) * slots.block_size
        if not sequence.owes_prompt_logprobs:
            slots.prompt_logprobs[slot] = NO_LOGPROBS  # a resumed sequence has reported them
        if sequence.grammar is not None:
            slots.grammars[slot] = sequence.grammar
        if sequence.adapter is not None:
            slots.adapter[slot] = self.adapters.begin(sequence.adapter)
        self.sequences[slot] = sequence
        self.ids[slot] = sequence.request.id
        self._slot_of[sequence.request.id] = slot
        self.order = np.insert(self.order, self._place_of(sequence), slot)
        self.changes += 1
        return slot

    def _place_of(self, sequence: Sequence) -> int:
        """Return the position of ``sequence`` in the order, nearly always the end."""
        place = len(self.order)
        while place and self.sequence(int(self.order[place - 1])).rank > sequence.rank:
            place -= 1
        return place

    def blocks_lacking(self, slot: int, length: int) -> int:
        """Return how many more blocks the first ``length`` tokens of the sequence need."""
        return max(-(-length // self.slots.block_size) - int(self.slots.num_blocks[slot]), 0)

    def grow(self, slot: int, length: int) -> None:
        """Allocate blocks for the first ``length`` tokens; enough must be free."""
        lacking = self.blocks_lacking(slot, length)
        if lacking:
            count = int(self.slots.num_blocks[slot])
            self.slots.set_blocks(slot, slice(count, count + lacking), self.pool.allocate(lacking))
            self.slots.num_blocks[slot] = count + lacking

    def grow_each(self, grown: np.ndarray) -> None:
        """Allocate one more block for each of the slots ``grown``.

        Enough must be free.
        """
        slots = self.slots
        slots.set_blocks(grown, slots.num_blocks[grown], self.pool.allocate(len(grown)))
        slots.num_blocks[grown] += 1

    def blocks_promised(self) -> int:
        """Return how many blocks the running sequences still need for their known tokens."""
        slots = self.slots
        wanted = -(-slots.device_len[self.order] // slots.block_size)
        return int(np.maximum(wanted - slots.num_blocks[self.order], 0).sum())

    def stop(self, stopped: list[int]) -> None:
        """Free these slots and their blocks."""
        for slot in stopped:
            self.pool.release(self.slots.block_table[slot, : self.slots.num_blocks[slot]].tolist())
            self.slots.give_back(slot)
            if (adapter := self.sequence(slot).adapter) is not None:
                self.adapters.end(adapter)
            del self._slot_of[int(self.ids[slot])]
            self.ids[slot] = FREE
            self.sequences[slot] = None
            self.changes += 1
        self.order = self.order[self.ids[self.order] != FREE]

    def preempt_last(self) -> tuple[int, Sequence]:
        """Stop the last sequence in rank; its tokens must be known.

        Returns its former slot and the sequence.
        """
        slot = int(self.order[-1])
        sequence = self.sequence(slot)
        sequence.preempted(self.slots.tokens[slot, : self.slots.device_len[slot]])
        self.stop([slot])
        return slot, sequence

    def swap(self, pairs: np.ndarray) -> None:
        """Update pool and tables for a swap of blocks.

        The contents of both blocks of each of the ``pairs`` [n, 2] are swapped, no id twice. Block ids are kept nowhere
        else: waiting sequences have none.
        """
        moved = np.arange(self.pool.num_blocks, dtype=np.int32)
        moved[pairs] = pairs[:, ::-1]
        self.pool.swap(pairs, moved)
        self.slots.set_blocks(self.order, slice(None), moved[self.slots.block_table[self.order]])

    def check(self) -> None:
        """Raise RuntimeError unless the pool's references are exactly the blocks of the running sequences."""
        slots = self.slots
        used = np.arange(slots.max_blocks) < slots.num_blocks[:, None]
        counts = np.bincount(slots.block_table[used], minlength=self.pool.num_blocks)
        self.pool.check(counts.astype(np.int32))
        if sorted(self.order.tolist()) != sorted(self._slot_of.values()):
            raise RuntimeError("running order and slots disagree")
        if slots.num_free + len(self) != slots.num_slots:
            raise RuntimeError("a slot was lost")
        running = (self.sequence(slot) for slot in self.order.tolist())
        if self.adapters.held != Counter(each.adapter_digest for each in running if each.adapter is not None):
            raise RuntimeError("an adapter slot is held by a sequence that does not run")
