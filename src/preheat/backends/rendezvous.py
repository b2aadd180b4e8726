"""Rendezvous of a group's ranks: in a folder of their node, or by their existing connections.

The kind of rendezvous alone decides whether a platform's collective uses shared memory or the network.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class OneNode:
    """Rank ``rank`` of ``world``, all on one node: they share the files of ``folder``."""

    folder: Path
    rank: int
    world: int

    def part(self, name: str, members: Sequence[int]) -> OneNode:
        """Return the rendezvous of some ``members``, this rank among them, in their order; ``name`` is unique."""
        (self.folder / name).mkdir(exist_ok=True)
        return OneNode(self.folder / name, members.index(self.rank), len(members))

    def store(self) -> Store:
        """Return the store for the start of a process group of torch.distributed."""
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        store: Store = FileStore(str(self.folder / "group"), self.world)
        return store


@dataclass(frozen=True)
class Nodes:
    """Rank ``rank`` of several, on any nodes.

    ``peers`` are its connections to the other ranks, None to itself; ``hosts`` are the addresses of the ranks' nodes.
    """

    peers: tuple[Connection | None, ...]
    rank: int
    hosts: tuple[str, ...]

    @property
    def world(self) -> int:
        return len(self.peers)

    def part(self, name: str, members: Sequence[int]) -> Nodes:
        """See :meth:`OneNode.part`; ``name`` is unused, because messages of two ranks have one order."""
        peers, hosts = tuple(self.peers[each] for each in members), tuple(self.hosts[each] for each in members)
        return Nodes(peers, members.index(self.rank), hosts)

    def store(self) -> Store:
        """See :meth:`OneNode.store`; rank 0 serves it at its address, on a port told to the others."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, first = self.hosts[0], self.peers[0]
        if first is not None:
            return TCPStore(host, int(first.recv_bytes()), is_master=False, wait_for_workers=False)
        door = socket.create_server((host, 0))
        port = door.getsockname()[1]
        for peer in self.peers[1:]:
            assert peer is not None
            peer.send_bytes(b"%d" % port)
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())


Rendezvous = OneNode | Nodes
