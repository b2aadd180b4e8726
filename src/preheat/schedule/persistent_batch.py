"""The persistent batch of decoding sequences.

While all running sequences decode, steps keep their rows until a sequence comes or goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from preheat.core import Plain, Schedule
from preheat.schedule.running import RunningSequences


@dataclass(slots=True)
class PersistentBatch:
    """The rows that consecutive steps have in common.

    ``changes`` is the running sequences' counter at the start. ``left`` is the number of steps until a row reaches its
    maximum length. ``room`` is the number of steps with blocks for all rows. ``filling`` is the number of steps until a
    row fills a block. ``plain`` are the facts of steps in which none of this happens.
    """

    number: int
    slots: np.ndarray  # int64 [rows]
    ids: np.ndarray  # int64 [rows]
    ones: np.ndarray  # int32 [rows]: every row computes and samples one token
    changes: int
    left: int
    room: int
    filling: int
    plain: Plain | None

    @classmethod
    def of(cls, running: RunningSequences, number: int, decode: np.ndarray) -> Self:
        """Return the batch of all running sequences, in the order of the slots ``decode``."""
        slots = running.slots
        left = int((slots.max_len[decode] - slots.device_len[decode]).min())
        ids, ones, room = running.ids[decode], np.ones(len(decode), np.int32), room_of(running, decode)
        filling, plain = _filling(slots.cached_len[decode], slots.block_size), _plain(running, decode)
        return cls(number, decode, ids, ones, running.changes, left, room, filling, plain)

    def goes_on(self, running: RunningSequences) -> bool:
        """Return whether the next step has the same rows."""
        return self.left > 0 and self.changes == running.changes

    def step(self, running: RunningSequences, started: dict[int, int]) -> Schedule:
        """Return the schedule of the batch's next step."""
        self.left -= 1
        self.room -= 1
        self.filling -= 1
        first = running.slots.cached_len.take(self.slots)
        schedule = Schedule(self.slots, first, self.ones, self.ones, len(self.slots), self.ids, started, self.number)
        if not self.filling:
            self.filling = _filling(schedule.ends, running.slots.block_size)
        elif self.left:
            schedule.plain = self.plain
        return schedule


def room_of(running: RunningSequences, decode: np.ndarray) -> int:
    """Return for how many tokens of each row of ``decode`` there is room in its blocks."""
    slots = running.slots
    return int((slots.num_blocks[decode] * slots.block_size - slots.cached_len[decode]).min())


def _filling(lengths: np.ndarray, block_size: int) -> int:
    """Return after how many more tokens of each row one of the rows of ``lengths`` fills a block."""
    return block_size - int((lengths % block_size).max())


def _plain(running: RunningSequences, decode: np.ndarray) -> Plain | None:
    """Return the facts of plain steps of the rows ``decode``.

    There are none where every token advances a grammar, gives a block back, or moves a state.
    """
    slots = running.slots
    if running.windowed or running.states is not None or slots.has_grammar[decode].any():
        return None
    stop_ids = set(slots.stop_ids[:, decode].ravel().tolist())
    if slots.many_stop_ids:
        stop_ids.update(*(slots.many_stop_ids.get(slot, ()) for slot in decode.tolist()))
    return Plain(running.changes, frozenset(stop_ids))
