"""States of test sequences that stay: at the ends of blocks, and behind each draft."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from preheat.core import Schedule, StepStates
from preheat.plan.item import NothingToRun
from preheat.schedule.blocks import BlockPool


class KeptStates:
    """States in blocks of ``pool``, by slot and position; the state slots of ``sequences`` slots lie before them.

    A row reads the state that is kept at its first position, or the state of its slot.
    """

    def __init__(self, pool: BlockPool | None, sequences: int) -> None:
        self._pool, self._base = pool, sequences
        self._ends: dict[int, Sequence[int]] = {}
        self._at: dict[int, dict[int, int]] = defaultdict(dict)

    def begin(self, slot: int, ends: Sequence[int], of: int, cached: int) -> None:
        """Keep the states of ``slot`` at ``ends``. It begins with the state of the slot ``of`` at ``cached``."""
        self._ends[slot] = ends
        if cached and self._pool is not None:
            self._pool.share([self._at[of][cached] - self._base])
            self._at[slot][cached] = self._at[of][cached]

    def end(self, slot: int) -> None:
        """Give the states of ``slot`` back."""
        self._ends.pop(slot, None)
        self.forget(slot, -1)

    def forget(self, slot: int, begin: int) -> None:
        """Give the states of ``slot`` behind the position ``begin`` back."""
        states = self._at[slot]
        gone = [states.pop(at) - self._base for at in list(states) if at > begin]
        if self._pool is not None:
            self._pool.release(gone)

    def states(self, schedule: Schedule) -> StepStates | None:
        """Return the state slots for ``schedule``; None if each row reads and writes its own."""
        parts = list[tuple[int, int, int, int]]()
        for row, (slot, first, end) in enumerate(zip(schedule.slots, schedule.first, schedule.ends, strict=True)):
            inner = range(first + 1, end) if schedule.num_sampled[row] > 1 else self._ends.get(int(slot), ())
            at, read = int(first), self._at[int(slot)].get(int(first), int(slot) + 1)
            for stop in (int(each) for each in inner if first < each <= end):
                write = self._take(int(slot), stop)
                parts.append((row, stop - at, read, write))
                at, read = stop, write
            if at < end:
                parts.append((row, int(end) - at, read, int(slot) + 1))
        states = StepStates(*np.array(parts, np.int64).T.copy())
        own = schedule.slots[states.row] + 1
        return None if (states.read == own).all() and (states.write == own).all() else states

    def _take(self, slot: int, position: int) -> int:
        """Return a state slot for the state of ``slot`` at ``position``."""
        if position not in self._at[slot]:
            if self._pool is None or not self._pool.num_free:
                raise NothingToRun("no state slot is free")
            self._at[slot][position] = self._base + self._pool.allocate(1)[0]
        return self._at[slot][position]
