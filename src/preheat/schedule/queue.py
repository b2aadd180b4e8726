"""The waiting queue: first come, first served; adding, cancelling and returning cost the same at any length."""

from __future__ import annotations

from collections import OrderedDict

from preheat.schedule.sequence import Sequence


class WaitingQueue:
    """Sequences by request id, in order of arrival. Any sequence can leave in constant time."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._sequences

    def append(self, sequence: Sequence) -> None:
        """A new arrival, behind all others."""
        self._sequences[sequence.request.id] = sequence

    def return_to_front(self, sequence: Sequence) -> None:
        """A preempted sequence: it arrived before all that still wait."""
        self.append(sequence)
        self._sequences.move_to_end(sequence.request.id, last=False)

    def first(self) -> Sequence:
        """The next to run. Raises StopIteration when none waits."""
        return next(iter(self._sequences.values()))

    def remove(self, request_id: int) -> bool:
        """Remove a sequence from anywhere in the queue; False if it is not in it."""
        return self._sequences.pop(request_id, None) is not None

    def clear(self) -> None:
        """Remove all."""
        self._sequences.clear()
