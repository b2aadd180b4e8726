"""State slots: where the states of sequences lie, and the states that are kept.

Each slot of a sequence has a state slot of its own. More state slots hold the states behind drafts and at the ends of
blocks. A row reads the slot with its state, and writes another one where the state must stay: so nothing is copied. A
kept state is filed under its block's hash, like the block, and is evicted when a newer state needs the slot. Keeping a
state neither preempts a sequence nor changes a step's rows.

State slot 0 is for padding. The slots of sequences follow, then the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from preheat.core import Schedule, StepStates
from preheat.schedule.blocks import BlockPool
from preheat.schedule.sequence import Sequence
from preheat.settings import Settings

if TYPE_CHECKING:
    from preheat.schedule.prefix import Hit, PrefixCache
    from preheat.schedule.slots import Slots


class Running(Protocol):
    """The running sequences, by slot."""

    @property
    def slots(self) -> Slots: ...

    def sequence(self, slot: int) -> Sequence: ...


class Ends(NamedTuple):
    """The ends of blocks with kept states: multiples of ``every`` tokens; 0 keeps none.

    With ``each`` all of them are kept. Otherwise the last end of a prompt, the end of a prefix that other prompts share
    with it, and the ends of its answer; an answer's earlier end then makes way for a later one.
    """

    every: int = 0
    each: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Ends:
        """Return the ends that ``settings`` ask for."""
        keeps = settings.enable_prefix_caching and settings.mamba_cache_mode != "none"
        size = settings.mamba_block_size or settings.block_size or 0
        return cls(size if keeps else 0, settings.mamba_cache_mode == "all")


NO_ENDS = Ends()


class StateSlots:
    """The state slots of ``sequences`` slots, and ``more`` beside them.

    ``at`` int64 [slots] is the state slot with the state of each sequence. Other states than a sequence's own lie in
    ``pool``, one a block: block i is state slot ``sequences`` + i. A sequence has a reference to the block with its
    state, and a step in flight to each block that it writes.
    """

    def __init__(self, sequences: int, more: int, ends: Ends) -> None:
        self.pool, self._base, self.ends = BlockPool(more + 1, 1), sequences, ends
        self.at = np.arange(1, sequences + 1)
        self._written = np.zeros(more + 1, np.int32)  # references of steps in flight
        self._last = np.zeros(sequences, np.int64)  # the last end of the prompt
        self._branch = np.zeros(sequences, np.int64)
        self._answered: dict[int, bytes] = {}  # by slot, the hash of the last kept end of the answer

    @property
    def num_free(self) -> int:
        """State slots that a step can still write, beside the rows' own."""
        return self.pool.num_free

    def begin(self, slot: int, sequence: Sequence, hit: Hit, block_size: int) -> None:
        """Let the sequence in ``slot`` begin with the state of ``hit``, if the hit has one."""
        every = self.ends.every or 1
        self._last[slot] = (len(sequence.tokens) - 1) // every * every
        self._branch[slot] = hit.branch * block_size // every * every
        self._answered.pop(slot, None)
        if hit.state:
            self._move(slot, self._base + hit.state)

    def end(self, slot: int) -> None:
        """Drop the reference of the sequence in ``slot``."""
        self._move(slot, slot + 1)

    def _move(self, slot: int, to: int) -> None:
        """Let the state of ``slot`` lie in the state slot ``to``."""
        before, self.at[slot] = int(self.at[slot]), to
        if to > self._base:
            self.pool.share([to - self._base])
        if before > self._base:
            self.pool.release([before - self._base])

    def book(self, schedule: Schedule, running: Running) -> StepStates | None:
        """Return the state slots that ``schedule`` uses, and move the states there.

        Returns None if each row reads and writes its own. A slot that the step reads is free only afterwards. The state
        of a row with drafts moves when its results are processed.
        """
        rows, cuts = schedule.slots, dict[int, dict[int, int]]()
        for row in (schedule.num_sampled > 1).nonzero()[0].tolist():
            cuts[row] = {after: self._take() for after in range(1, int(schedule.extend[row]))}
        for row, after in self._kept_ends(schedule, running):
            own, before = cuts.setdefault(row, {}), self._answered.get(int(rows[row]))
            if before is not None and not self.ends.each:
                self.pool.evict_first(before)
            if after not in own and self.pool.num_free:
                own[after] = self._take()
        if not cuts and (self.at[rows] <= self._base).all():
            return None
        states = self._parts(schedule, cuts)
        for row, (slot, end, drafted) in enumerate(zip(rows, schedule.extend, schedule.num_sampled > 1, strict=True)):
            own_slot = int(slot) + 1
            self._move(int(slot), own_slot if drafted else cuts.get(row, {}).get(int(end), own_slot))
        return states

    def _take(self) -> int:
        """Return a state slot for the step, with a reference."""
        (block,) = self.pool.allocate(1)
        self._written[block] += 1
        return self._base + block

    def _kept_ends(self, schedule: Schedule, running: Running) -> Iterator[tuple[int, int]]:
        """Yield rows, each with the number of its tokens up to an end to keep; the last ends of a row come first.

        Ends with a filed state are left out, where their hash is known.
        """
        every = self.ends.every
        if not every:
            return
        first, ends = schedule.first, schedule.ends
        for row in (ends // every > first // every).nonzero()[0].tolist():
            slot = int(schedule.slots[row])
            hashes = running.sequence(slot).block_hashes
            for end in range(int(ends[row]) // every * every, int(first[row]), -every):
                column = end // running.slots.block_size - 1
                filed = column < len(hashes) and self.pool.find(hashes[column]) is not None
                if self._is_kept(slot, end) and not filed:
                    yield row, end - int(first[row])

    def _is_kept(self, slot: int, end: int) -> bool:
        every, each = self.ends
        return every > 0 and end % every == 0 and (each or end >= self._last[slot] or end == self._branch[slot])

    def _parts(self, schedule: Schedule, cuts: dict[int, dict[int, int]]) -> StepStates:
        parts, at = list[tuple[int, int, int, int]](), self.at[schedule.slots].tolist()
        for row, (slot, count) in enumerate(zip(schedule.slots, schedule.extend, strict=True)):
            done, read = 0, at[row]
            for after, write in sorted(({int(count): int(slot) + 1} | cuts.get(row, {})).items()):
                parts.append((row, after - done, read, write))
                done, read = after, write
        return StepStates(*np.array(parts, np.int64).T.copy())

    def settle(
        self, schedule: Schedule, running: Running, prefix: PrefixCache, live: np.ndarray, ends: np.ndarray
    ) -> None:
        """File the states that the step kept, and choose the states behind accepted drafts.

        The tokens of the rows that are ``live`` are processed up to ``ends``. Other states are dropped.
        """
        for row, end, block in self._writes(schedule):
            slot = int(schedule.slots[row])
            if not live[row] or end > ends[row]:
                continue
            if self._is_kept(slot, end):
                self._file(slot, end, block, running, prefix)
            if end == ends[row] and schedule.num_sampled[row] > 1:
                self._move(slot, self._base + block)
        self.drop(schedule)

    def _file(self, slot: int, end: int, block: int, running: Running, prefix: PrefixCache) -> None:
        """File the state in ``block`` under the hash of the block that ends at ``end``."""
        key = prefix.key_at(running.sequence(slot), running.slots.tokens[slot], end)
        self.pool.publish(block, key)
        if end > self._last[slot]:
            self._answered[slot] = key

    def drop(self, schedule: Schedule) -> None:
        """Drop the references of a step."""
        written = [block for _, _, block in self._writes(schedule)]
        self._written[written] -= 1
        self.pool.release(written)

    def _writes(self, schedule: Schedule) -> list[tuple[int, int, int]]:
        """Return the row, the end and the block of each state that the step writes into the pool."""
        states = schedule.states
        if states is None:
            return []
        more = states.write > self._base
        starts = (schedule.extend.cumsum() - schedule.extend)[states.row]
        ends = states.extend.cumsum() - starts + schedule.first[states.row]
        found = np.stack((states.row, ends, states.write - self._base), 1)[more]
        return [tuple(each) for each in found.tolist()]

    def check(self, order: np.ndarray) -> None:
        """Raise RuntimeError unless the references are of the running slots ``order`` and of steps in flight."""
        held = self.at[order] - self._base
        counts = np.bincount(held[held > 0], minlength=self.pool.num_blocks)
        self.pool.check((counts + self._written).astype(np.int32))
