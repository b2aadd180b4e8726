"""A line-up: everyone who runs, where all decode. Its steps have the same rows until somebody comes or leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from preheat.core import Schedule
from preheat.schedule.running import Running


@dataclass(slots=True)
class PersistentBatch:
    """What its steps have in common. ``changes`` are those of the running sequences that it has seen; ``left`` are the
    steps until one of its rows has its length.
    """

    number: int
    slots: np.ndarray  # int64 [rows], as all of these are
    ids: np.ndarray  # int64
    extend: np.ndarray  # int32, ones
    samples: np.ndarray  # bool, all true
    changes: int
    left: int

    @classmethod
    def of(cls, running: Running, number: int, decode: np.ndarray) -> Self:
        """All that run, in the order of ``decode``."""
        slots, rows = running.slots, len(decode)
        left = int((slots.max_len[decode] - slots.device_len[decode]).min())
        return cls(
            number, decode, running.ids[decode], np.ones(rows, np.int32), np.ones(rows, bool), running.changes, left
        )

    def goes_on(self, running: Running) -> bool:
        """Whether the next step is its own."""
        return self.left > 0 and self.changes == running.changes

    def step(self, running: Running, started: dict[int, int]) -> Schedule:
        """The next of its steps."""
        self.left -= 1
        first, rows = running.slots.cached_len.take(self.slots), len(self.slots)
        return Schedule(self.slots, first, self.extend, self.samples, rows, self.ids, started, self.number)
