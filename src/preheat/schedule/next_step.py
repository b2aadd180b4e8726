"""The step being composed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class NextStep:
    """``decode`` slots, ``prefill`` slots with their ``chunks``, and ``drafts`` of some decode slots."""

    decode: np.ndarray
    prefill: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    drafts: dict[int, np.ndarray] = field(default_factory=dict)
    more_tokens: int = 0  # in chunks and drafts, beside one for each decode slot
    longest: int = 1
    started: dict[int, int] = field(default_factory=dict)
    images: frozenset[bytes] = frozenset()  # hashes of the images that prefill rows need
    preempted: bool = False

    def with_row(self, chunk: int) -> tuple[int, int, int]:
        """Return the step's size with one more row of ``chunk`` tokens.

        The size is rows, tokens and longest row.
        """
        decode = len(self.decode)
        return decode + len(self.prefill) + 1, decode + self.more_tokens + chunk, max(self.longest, chunk)

    def with_drafts(self, count: int) -> tuple[int, int, int]:
        """Return the step's size with ``count`` drafts for one slot.

        The size is rows, tokens and longest row.
        """
        decode = len(self.decode)
        return decode + len(self.prefill), decode + self.more_tokens + count, max(self.longest, 1 + count)

    def add_row(self, slot: int, chunk: int) -> None:
        """Append a prefill row."""
        self.prefill.append(slot)
        self.chunks.append(chunk)
        self.more_tokens += chunk
        self.longest = max(self.longest, chunk)

    def add_drafts(self, slot: int, drafts: np.ndarray) -> None:
        """Give a decode slot ``drafts`` int32 [k >= 1]."""
        self.drafts[slot] = drafts
        self.more_tokens += len(drafts)
        self.longest = max(self.longest, 1 + len(drafts))
