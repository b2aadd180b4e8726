"""The sending of blocks as the engine's loop sees it: a few blocks between two steps.

The loop copies a block to a held place of the host tier, and a thread sends it from there. A thread that is slow holds
:data:`AHEAD` places, and no step waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from preheat.core import KvTransferStats
from preheat.kv_transfer.messages import Hello

AHEAD = 2
"""Most blocks of one peer that wait for its thread."""

PER_TURN = 4
"""Most blocks that are copied between two steps."""


class Staged(NamedTuple):
    """A block on the host: its place and bytes. ``wait`` returns once the copy has ended."""

    hash: bytes
    place: int
    view: memoryview
    wait: Callable[[], None]


class Departures(Protocol):
    """Blocks that can be sent."""

    def stage(self, block_hash: bytes) -> Staged | None:
        """Copy a block to a held place on the host; None if no such block is there."""

    def release(self, place: int) -> None:
        """Give a held place back."""


@dataclass(eq=False)
class Answer:
    """The answer to one Want: blocks in ``ready``, then a text, the reason of its end (empty: all were sent)."""

    hashes: list[bytes]
    ready: SimpleQueue[Staged | str] = field(default_factory=SimpleQueue)
    at: int = 0
    ahead: int = 0
    left: bool = False
    """The thread takes nothing more."""


class Sends:
    """Blocks of ``departures`` for peers. ``wake`` ends the loop's wait for messages; any thread may call it."""

    def __init__(self, departures: Departures, hello: Callable[[], Hello], wake: Callable[[], None]) -> None:
        self.departures, self.hello, self._wake = departures, hello, wake
        self.stats = KvTransferStats()
        self._asked: deque[Answer] = deque()  # appended to by threads
        self._sent: deque[tuple[Answer, Staged]] = deque()
        self._open: list[Answer] = []

    @property
    def pending(self) -> bool:
        """Whether :meth:`turn` has something to do."""
        return bool(self._asked or self._sent) or any(each.left or each.ahead < AHEAD for each in self._open)

    @property
    def busy(self) -> bool:
        """Whether an answer is not complete."""
        return bool(self._open)

    def ask(self, hashes: list[bytes]) -> Answer:
        """Return the answer for these blocks, which the loop fills. A thread calls it."""
        answer = Answer(hashes)
        self._asked.append(answer)
        self._wake()
        return answer

    def sent(self, answer: Answer, staged: Staged) -> None:
        """Give the place of a block back, sent or not. A thread calls it."""
        self._sent.append((answer, staged))
        self._wake()

    def leave(self, answer: Answer) -> None:
        """Say that the thread takes nothing more. A thread calls it."""
        answer.left = True
        while (staged := _next(answer)) is not None:
            if isinstance(staged, Staged):
                self._sent.append((answer, staged))
        self._wake()

    def turn(self, *, available: bool) -> None:
        """Copy some blocks to the host for threads. Without ``available`` the device has no blocks now."""
        while self._asked:
            self._open.append(self._asked.popleft())
        while self._sent:
            answer, staged = self._sent.popleft()
            answer.ahead -= 1
            self.departures.release(staged.place)
        room = PER_TURN
        for answer in [*self._open]:
            if answer.left:
                self._open.remove(answer)
                self._drop(answer)
            elif room and answer.ahead < AHEAD:
                room -= 1
                self._fill(answer, available)

    def _fill(self, answer: Answer, available: bool) -> None:
        """Copy the next block of ``answer``, or end it."""
        if answer.at == len(answer.hashes):
            self._end(answer, "")
        elif not available:
            self._end(answer, "the engine is paused or asleep")
        elif (staged := self.departures.stage(answer.hashes[answer.at])) is None:
            self._end(answer, "the next block is not in the cache")
        else:
            answer.at, answer.ahead = answer.at + 1, answer.ahead + 1
            self.stats.sent_blocks += 1
            self.stats.sent_bytes += len(staged.view)
            answer.ready.put(staged)

    def _end(self, answer: Answer, why: str) -> None:
        answer.ready.put(why)
        self._open.remove(answer)

    def _drop(self, answer: Answer) -> None:
        """Give the places back that no thread takes."""
        while (staged := _next(answer)) is not None:
            if isinstance(staged, Staged):
                self.departures.release(staged.place)


def _next(answer: Answer) -> Staged | str | None:
    try:
        return answer.ready.get_nowait()
    except Empty:
        return None
