"""The sequences that wait to run: by priority, resumed ones first, then in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from preheat.schedule.sequence import Sequence

RESUMED = -(2**62)
"""The rank of sequences that resume, before others of their priority: their clients have had tokens already."""

_Entry = tuple[tuple[int, int], int]
"""A rank and a request id."""


class WaitingQueue(dict[int, Sequence]):
    """Waiting sequences by request id.

    A sequence that waits again after a preemption keeps its rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heaps: dict[str, list[_Entry]] = {}  # by adapter; entries of sequences that left are dropped late
        self._arrivals = 0

    def arrive(self, sequence: Sequence) -> None:
        """Queue a new sequence behind the others of its priority, or behind the resumed ones if it resumes."""
        self._arrivals += 1
        place = self._arrivals + (RESUMED if sequence.request.delivered else 0)
        sequence.rank = sequence.request.priority, place
        self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence at its rank."""
        if not self:
            self._heaps.clear()
        self[sequence.request.id] = sequence
        heapq.heappush(self._heaps.setdefault(sequence.adapter_digest, []), (sequence.rank, sequence.request.id))

    def first(self, passed_over: Collection[str] = ()) -> Sequence | None:
        """Return the next sequence in rank without an adapter of ``passed_over``.

        Returns None if there is none.
        """
        found = (self._head(adapter) for adapter in [*self._heaps] if adapter not in passed_over)
        return min((each for each in found if each is not None), key=lambda each: each.rank, default=None)

    def _head(self, adapter: str) -> Sequence | None:
        heap = self._heaps[adapter]
        while heap:
            rank, id = heap[0]
            sequence = self.get(id)
            if sequence is not None and sequence.rank == rank:
                return sequence
            heapq.heappop(heap)
        del self._heaps[adapter]
        return None

    @property
    def resumes(self) -> bool:
        """Whether the next sequence in rank resumes, so that its client has waited longest."""
        first = self.first() if self else None
        return first is not None and first.rank[1] < 0

    def clear(self) -> None:
        super().clear()
        self._heaps.clear()
