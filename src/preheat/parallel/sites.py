"""Sites of an engine's ranks: one node's memory, or a network.

The leader makes the site and sends it to every rank. Only the site decides how the leader's messages travel and how
ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from preheat.backends.rendezvous import Nodes, OneNode, Rendezvous
from preheat.parallel.channel import LineReceiver, LineSender, Receiver, RingReceiver, RingSender, Sender
from preheat.parallel.wire import Address, Door, call
from preheat.utils.shared_files import remove_folder, shared_folder


class Site(Protocol):
    """A site of ``world`` ranks.

    ``door`` is the rank's own, where it has one; ``check`` raises if the engine is over.
    """

    @property
    def world(self) -> int: ...

    def sender(self, lines: Sequence[Connection], check: Callable[[], None]) -> Sender:
        """Return the leader's sender; ``lines`` are its connections to the other ranks."""

    def receiver(self, rank: int, line: Connection) -> Receiver:
        """Return the receiver of ``rank``; ``line`` is its connection to the leader."""

    def rendezvous(self, rank: int, door: Door | None, check: Callable[[], None]) -> Rendezvous:
        """Return the rendezvous of all ranks, seen from ``rank``.

        Every rank calls this once.
        """

    def close(self) -> None:
        """Remove all remains after the engine has ended."""


@dataclass(frozen=True)
class Memory:
    """Ranks on one node; they share the files of ``folder``."""

    folder: Path
    world: int

    @classmethod
    def open(cls, world: int) -> Memory:
        return cls(shared_folder(), world)

    def sender(self, lines: Sequence[Connection], check: Callable[[], None]) -> Sender:
        return RingSender(self.folder, self.world, check)

    def receiver(self, rank: int, line: Connection) -> Receiver:
        return RingReceiver(self.folder, self.world, rank)

    def rendezvous(self, rank: int, door: Door | None, check: Callable[[], None]) -> OneNode:
        return OneNode(self.folder, rank, self.world)

    def close(self) -> None:
        remove_folder(self.folder)


@dataclass(frozen=True)
class Network:
    """Ranks on several nodes; ``doors`` are the addresses of their doors."""

    doors: tuple[Address, ...]

    @property
    def world(self) -> int:
        return len(self.doors)

    def sender(self, lines: Sequence[Connection], check: Callable[[], None]) -> Sender:
        return LineSender(lines)

    def receiver(self, rank: int, line: Connection) -> Receiver:
        return LineReceiver(line)

    def rendezvous(self, rank: int, door: Door | None, check: Callable[[], None]) -> Nodes:
        """Connect with each other rank; the higher rank calls.

        Raises OSError where that fails.
        """
        assert door is not None
        peers: list[Connection | None] = [None] * self.world
        for lower in range(rank):
            peers[lower] = call(self.doors[lower], door.key, lambda own: b"%d" % rank)
        for _ in range(rank + 1, self.world):
            peer, number = door.accept(check)
            peers[int(number)] = peer
        return Nodes(tuple(peers), rank, tuple(host for host, _ in self.doors))

    def close(self) -> None:
        """Do nothing: connections end with their processes."""
