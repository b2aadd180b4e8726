"""The sequences that wait to run: by priority, then in order of arrival."""

from __future__ import annotations

import heapq

from preheat.schedule.sequence import Sequence


class WaitingQueue(dict[int, Sequence]):
    """Waiting sequences by request id. One that waits again after a preemption keeps its place."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[tuple[int, int], int]] = []  # rank and id; entries of those that left are dropped late
        self._arrivals = 0

    def arrive(self, sequence: Sequence) -> None:
        """Queue a new sequence behind those of its priority."""
        self._arrivals += 1
        sequence.rank = sequence.request.priority, self._arrivals
        self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence at its rank."""
        if not self:
            self._heap.clear()
        self[sequence.request.id] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence.request.id))

    def first(self) -> Sequence:
        """The sequence whose turn is next; there must be one."""
        while True:
            rank, id = self._heap[0]
            sequence = self.get(id)
            if sequence is not None and sequence.rank == rank:
                return sequence
            heapq.heappop(self._heap)

    def clear(self) -> None:
        super().clear()
        self._heap.clear()
