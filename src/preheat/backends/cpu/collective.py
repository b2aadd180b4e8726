"""Exchanges between ranks on CPUs: by shared memory or connections.

Ranks on one node use its memory; ranks on several nodes use connections. Only bytes are moved, each rank's to its own
place. So no order of arrival shows in the result.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from preheat.backends.rendezvous import Nodes, OneNode
from preheat.utils.shared_files import mapped

PLACE_BYTES = 1 << 20
"""Bytes of a rank's place; larger data goes through memory in parts."""

_LINE = 64  # bytes of a counter, so that ranks do not write into one cache line
_SPINS = 50  # looks at a counter, giving way to other processes, before it sleeps
_NAP_SECONDS = 2e-5
_LOOKS = 256  # between checks that all ranks live

_CHECK_SECONDS = 0.1  # between checks while waiting for connections
_LAST_WORDS_SECONDS = 3.0  # to find out why a peer has gone


class SharedMemory:
    """Exchange through a file that all ranks of one node map.

    ``check`` raises if a rank has died. Each rank has two places in the file, used in turn, and a counter. To gather, a
    rank copies its tensor into its place and adds one to its counter. It waits until every counter is as far, and reads
    all places. A rank that writes a place again has seen all others pass the gathering in between, so the others have
    read the place.
    """

    def __init__(self, rendezvous: OneNode, check: Callable[[], None]) -> None:
        self.rank, self.world, self._check = rendezvous.rank, rendezvous.world, check
        self._epoch, self._fence, world = 0, threading.Lock(), rendezvous.world
        data = mapped(rendezvous.folder / "gather", world * _LINE + 2 * world * PLACE_BYTES) if world > 1 else None
        if data is None:
            return
        self._counters = data[: world * _LINE].view(np.int64)[:: _LINE // 8]
        self._places = torch.from_numpy(data[world * _LINE :].reshape(2, world, PLACE_BYTES))

    def gather(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x.unsqueeze(0)
        mine = x.contiguous().view(-1).view(torch.uint8)
        found = mine.new_empty(self.world, len(mine))
        for start in range(0, len(mine), PLACE_BYTES):
            self._exchange(mine[start : start + PLACE_BYTES], found[:, start : start + PLACE_BYTES])
        return found.view(x.dtype).view(self.world, *x.shape)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See :class:`preheat.backends.base.collective.Link`."""
        if self.world > 1:
            mine = x.view(-1).view(torch.uint8)
            for start in range(0, len(mine), PLACE_BYTES):
                self._pass(mine[start : start + PLACE_BYTES], source)
        return x

    def abort(self) -> None:
        """Do nothing: ``check`` tells the ranks that wait."""

    def fault(self) -> None:
        """Return None: the host notices a silent rank, by ``check``."""

    def _exchange(self, mine: Tensor, found: Tensor) -> None:
        """Write ``mine``, and read the bytes of all ranks into ``found`` [world, bytes]."""
        places = self._next_places()
        places[self.rank, : len(mine)].copy_(mine)
        self._meet()
        found.copy_(places[:, : len(mine)])

    def _pass(self, data: Tensor, source: int) -> None:
        """Pass the bytes of the rank ``source`` to all others."""
        place = self._next_places()[source, : len(data)]
        if self.rank == source:
            place.copy_(data)
        self._meet()
        if self.rank != source:
            data.copy_(place)

    def _next_places(self) -> Tensor:
        self._epoch += 1
        return self._places[self._epoch % 2]

    def _meet(self) -> None:
        """Wait until all have written."""
        with self._fence:  # others must see the data before the counter
            self._counters[self.rank] = self._epoch
        for rank in range(self.world):
            self._wait(rank)

    def _wait(self, rank: int) -> None:
        looks = 0
        while self._counters[rank] < self._epoch:
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
            if not looks % _LOOKS:
                self._check()


class Sockets:
    """Exchange by a connection to each other rank.

    Nothing else uses the connection meanwhile. ``check`` raises if a rank has died. Two ranks exchange in the same
    order, so the next bytes to arrive are always the next ones to be asked for.
    """

    def __init__(self, rendezvous: Nodes, check: Callable[[], None]) -> None:
        self.rank, self.world, self._check = rendezvous.rank, rendezvous.world, check
        self._peers = {rank: peer for rank, peer in enumerate(rendezvous.peers) if peer is not None}
        for peer in self._peers.values():
            os.set_blocking(peer.fileno(), False)

    def gather(self, x: Tensor) -> Tensor:
        mine = x.contiguous().view(-1).view(torch.uint8)
        found = mine.new_empty(self.world, len(mine))
        found[self.rank] = mine
        self._move(dict.fromkeys(self._peers, mine), {rank: found[rank] for rank in self._peers})
        return found.view(x.dtype).view(self.world, *x.shape)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See :class:`preheat.backends.base.collective.Link`."""
        data = x.view(-1).view(torch.uint8)
        if self.rank == source:
            self._move(dict.fromkeys(self._peers, data), {})
        else:
            self._move({}, {source: data})
        return x

    def abort(self) -> None:
        """Do nothing: ``check`` tells the ranks that wait."""

    def fault(self) -> None:
        """Return None: the host notices a silent rank, by ``check``."""

    def _move(self, out: dict[int, Tensor], into: dict[int, Tensor]) -> None:
        """Send bytes to each rank, and receive bytes from each.

        ``out`` are the bytes to send, ``into`` is filled. Both happen at once, on any connection that is ready: no rank
        waits for another one to read.
        """
        sends, receives = _views(out), _views(into)
        while True:
            for rank in list(sends):
                self._advance(rank, sends, os.write)
            for rank in list(receives):
                self._advance(rank, receives, _read)
            if not sends and not receives:
                return
            self._wait(set(sends), set(receives))

    def _advance(self, rank: int, views: dict[int, memoryview], move: Callable[[int, memoryview], int]) -> None:
        """Move all bytes that can be moved at once."""
        try:
            while rank in views:
                if not (moved := move(self._peers[rank].fileno(), views[rank])):
                    self._lost(rank, "it closed its connection")
                views[rank] = views[rank][moved:]
                if not len(views[rank]):
                    del views[rank]
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(rank, str(error))

    def _wait(self, sends: set[int], receives: set[int]) -> None:
        """Wait until one of these can go on."""
        poll = select.poll()
        for rank in sends | receives:
            poll.register(
                self._peers[rank], (select.POLLOUT if rank in sends else 0) | (select.POLLIN if rank in receives else 0)
            )
        while not poll.poll(_CHECK_SECONDS * 1e3):
            self._check()

    def _lost(self, rank: int, why: str) -> None:
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while time.monotonic() < until:
            self._check()
            time.sleep(_CHECK_SECONDS / 10)
        raise ConnectionError(f"rank {rank} cannot be reached: {why}")


def _read(descriptor: int, data: memoryview) -> int:
    """Read into ``data``, and return the number of bytes."""
    return os.readv(descriptor, [data])


def _views(parts: dict[int, Tensor]) -> dict[int, memoryview]:
    return {rank: part.numpy().data for rank, part in parts.items() if len(part)}
