"""The running sequences with their slots, blocks and adapter slots.

Every block reference is taken and dropped here. A freed block may be reused at once. A step in flight may still write
a token of the former owner to it, but steps run in order, so the new owner writes later. Such a block is not in the
prefix cache: only blocks with all tokens processed are published. A group with a window gives back the blocks that no
later token reads, once results have published the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from preheat.cache_groups import WHOLE, CacheGroup
from preheat.core import NO_PERSISTENT_BATCH
from preheat.schedule.adapters import AdapterSlotTable
from preheat.schedule.blocks import BlockPool
from preheat.schedule.prefix import Hit
from preheat.schedule.sequence import Sequence
from preheat.schedule.slots import NO_LOGPROBS, Slots
from preheat.schedule.states import StateSlots

FREE = np.iinfo(np.int64).min


class RunningSequences:
    """The sequences in slots, with the blocks and adapter slots that they own.

    ``order`` int64 lists the running slots by rank: priority, then arrival. ``ids`` int64 [slots] are the request ids,
    FREE for a free slot. ``changes`` counts arrivals and departures. ``begun`` is a persistent batch: the results of
    its first step are known, and so its rows are past their prompts. ``windowed`` are the numbers of the ``groups``
    with a window. At most ``in_flight`` tokens of a sequence are computed at a time. A model with states has ``states``
    beside the blocks.
    """

    def __init__(
        self,
        slots: Slots,
        pool: BlockPool,
        adapters: AdapterSlotTable | None = None,
        groups: tuple[CacheGroup, ...] = WHOLE,
        in_flight: int = 1,
        *,
        states: StateSlots | None = None,
    ) -> None:
        self.slots, self.pool, self.adapters = slots, pool, adapters or AdapterSlotTable()
        self.groups, self._size, self.states = groups, slots.block_size, states
        self.windowed = [number for number, group in enumerate(groups) if group.window is not None]
        # The most blocks that a group holds of any sequence.
        self._most = [group.columns(slots.max_model_len, self._size, in_flight) for group in groups]
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

    def start(self, sequence: Sequence, hit: Hit | None = None) -> int:
        """Give ``sequence`` a slot that begins with the blocks of ``hit``, now shared.

        Returns the slot.
        """
        slots = self.slots
        slot = slots.take(sequence.request, sequence.tokens)
        if hit is not None:
            self.pool.share(hit.all_blocks)
            for group, blocks in enumerate(hit.blocks):
                slots.live_from[slot, group] = hit.columns - len(blocks)
                slots.set_blocks(slot, slice(hit.columns - len(blocks), hit.columns), blocks, group)
            slots.num_blocks[slot] = hit.columns
            slots.cached_len[slot] = hit.columns * slots.block_size
            sequence.branch = hit.branch
            if self.states is not None:
                self.states.begin(slot, sequence, hit, self._size)
        if not sequence.owes_prompt_logprobs:
            slots.prompt_logprobs[slot] = NO_LOGPROBS  # a resumed sequence has reported them
        if sequence.grammar is not None:
            slots.grammars[slot] = sequence.grammar
        if sequence.adapter is not None:
            slots.adapter[slot] = self.adapters.begin(sequence.adapter)
        self.sequences[slot] = sequence
        self.ids[slot] = sequence.request.id
        self._slot_of[sequence.request.id] = slot
        place = self._place_of(sequence)
        self.order = np.concatenate((self.order[:place], (slot,), self.order[place:]))  # np.insert takes far longer
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
            count, groups = int(self.slots.num_blocks[slot]), len(self.groups)
            blocks = np.array(self.pool.allocate(lacking * groups), np.int32).reshape(lacking, groups)
            self.slots.set_blocks(slot, slice(count, count + lacking), blocks.T, slice(None))
            self.slots.num_blocks[slot] = count + lacking

    def grow_each(self, grown: np.ndarray) -> None:
        """Allocate one more block in each group for each of the slots ``grown``.

        Enough must be free.
        """
        slots, groups = self.slots, len(self.groups)
        blocks = np.array(self.pool.allocate(len(grown) * groups), np.int32).reshape(len(grown), groups)
        for group in range(groups):
            slots.set_blocks(grown, slots.num_blocks[grown], blocks[:, group], group)
        slots.num_blocks[grown] += 1

    @property
    def columns_free(self) -> int:
        """How many more blocks a sequence can have in every group."""
        return self.pool.num_free // len(self.groups)

    def blocks_promised(self) -> int:
        """Return how many blocks the running sequences still need for their known tokens."""
        slots, order = self.slots, self.order
        wanted = -(-slots.device_len[order] // slots.block_size)
        lacking = np.maximum(wanted - slots.num_blocks[order], 0)
        if not self.windowed:
            return int(lacking.sum()) * len(self.groups)
        held = slots.num_blocks[order, None] - slots.live_from[order]
        return int(np.minimum(lacking[:, None], np.maximum(np.array(self._most) - held, 0)).sum())

    def blocks_needed(self, sequence: Sequence, hit: Hit) -> int:
        """Return how many free blocks ``sequence`` needs at once to start from ``hit``, for its known tokens."""
        lacking = -(-len(sequence.tokens) // self._size) - hit.columns
        more = (min(lacking, max(most - len(own), 0)) for most, own in zip(self._most, hit.blocks, strict=True))
        return sum(more) + self.pool.count_cached(hit.all_blocks)

    def give_back(self, settled: np.ndarray, ends: np.ndarray) -> None:
        """Give back the blocks that no later token of the slots ``settled`` reads.

        Their tokens before ``ends`` are processed, and their blocks published. Blocks near the end of a prompt, or of
        a prefix that other requests share, keep their place in the order of eviction; other ones are evicted first.
        """
        slots, size = self.slots, self._size
        for group in self.windowed:
            behind = self.groups[group].behind(ends, size)
            for row in (behind > slots.live_from[settled, group]).nonzero()[0].tolist():
                slot, first, last = int(settled[row]), int(slots.live_from[settled[row], group]), int(behind[row])
                blocks = slots.tables[slot, group, first:last].tolist()
                kept = [self._is_kept(slot, group, column) for column in range(first, last)]
                self.pool.release([block for block, keep in zip(blocks, kept, strict=True) if not keep], first=True)
                self.pool.release([block for block, keep in zip(blocks, kept, strict=True) if keep])
                slots.set_blocks(slot, slice(first, last), 0, group)
                slots.live_from[slot, group] = last

    def _is_kept(self, slot: int, group: int, column: int) -> bool:
        """Return whether a prefix that is likely to come again needs the block of ``column``."""
        ends = int(self.slots.prompt_len[slot]) // self._size, self.sequence(slot).branch
        return any(end - self.groups[group].tail(end, self._size) - 1 <= column < end for end in ends)

    def stop(self, stopped: list[int]) -> None:
        """Free these slots and their blocks."""
        for slot in stopped:
            self.pool.release(self._blocks_of(slot))
            if self.states is not None:
                self.states.end(slot)
            self.slots.give_back(slot)
            if (adapter := self.sequence(slot).adapter) is not None:
                self.adapters.end(adapter)
            del self._slot_of[int(self.ids[slot])]
            self.ids[slot] = FREE
            self.sequences[slot] = None
            self.changes += 1
        self.order = self.order[self.ids[self.order] != FREE]

    def _blocks_of(self, slot: int) -> list[int]:
        """Return the blocks of a sequence by column, the later groups of a column last."""
        blocks = self.slots.tables[slot, :, : self.slots.num_blocks[slot]].T
        return blocks.ravel().tolist() if not self.windowed else blocks[blocks > 0].tolist()

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
        self.slots.move_blocks(self.order, moved)

    def check(self) -> None:
        """Raise RuntimeError unless the pool's references are exactly the blocks of the running sequences."""
        slots = self.slots
        columns = np.arange(slots.max_blocks)
        used = (columns < slots.num_blocks[:, None, None]) & (columns >= slots.live_from[:, :, None])
        counts = np.bincount(slots.tables[used], minlength=self.pool.num_blocks)
        self.pool.check(counts.astype(np.int32))
        if self.states is not None:
            self.states.check(self.order)
        if sorted(self.order.tolist()) != sorted(self._slot_of.values()):
            raise RuntimeError("running order and slots disagree")
        if slots.num_free + len(self) != slots.num_slots:
            raise RuntimeError("a slot was lost")
        running = (self.sequence(slot) for slot in self.order.tolist())
        if self.adapters.held != Counter(each.adapter_digest for each in running if each.adapter is not None):
            raise RuntimeError("an adapter slot is held by a sequence that does not run")
