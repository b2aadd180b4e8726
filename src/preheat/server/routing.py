"""Which replica of the engine a request goes to: the rule, and what it remembers. Nothing here waits or sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

from preheat.core import Delta, Request
from preheat.schedule.prefix import chain_root, chained

AHEAD = 32
"""Requests by which a replica may be ahead of the one with the fewest and still be given more for its cache's sake."""


class Router:
    """Chooses among ``size`` replicas, numbered from 0; see :meth:`route`.

    It counts the requests of each replica from :meth:`route` to :meth:`end` or the :class:`Delta` that ends them, and
    remembers the block hashes of the prompts that each was given, as many as its cache has blocks, the last used ones.
    """

    def __init__(self, size: int) -> None:
        self._owners: dict[int, int] = {}
        self._waiting = [set[int]() for _ in range(size)]
        self._running = [set[int]() for _ in range(size)]
        self._given = [0] * size
        self._seen = [OrderedDict[bytes, None]() for _ in range(size)]
        self._block_size, self._blocks = 0, [0] * size

    def open(self, block_size: int, blocks: Sequence[int]) -> None:
        """Each replica's cache has so many blocks of ``block_size`` tokens; of one that has 0 nothing is remembered."""
        self._block_size, self._blocks = block_size, list(blocks)

    def route(self, request: Request) -> int:
        """The replica that computes ``request``, which is booked there.

        It is the one that the request names. Else the one that was given the longest prefix of its prompt, in blocks;
        among equals the one with the fewest requests, then the one that has been given the fewest so far. Replicas
        with over :data:`AHEAD` requests more than another are passed over.
        """
        hashes = self._hashes(request)
        replica = self._choose(hashes) if request.data_parallel_rank is None else request.data_parallel_rank
        self._remember(replica, hashes)
        self._owners[request.id] = replica
        self._waiting[replica].add(request.id)
        self._given[replica] += 1
        return replica

    def _choose(self, hashes: Sequence[bytes]) -> int:
        loads = [self.load(replica) for replica in range(len(self._given))]
        most = min(loads) + AHEAD
        return min(
            (replica for replica, load in enumerate(loads) if load <= most),
            key=lambda replica: (-self.prefix(replica, hashes), loads[replica], self._given[replica]),
        )

    def prefix(self, replica: int, hashes: Iterable[bytes]) -> int:
        """How many of ``hashes``, from the first on, the replica was given and has likely still cached."""
        return sum(1 for _ in takewhile(self._seen[replica].__contains__, hashes))

    def load(self, replica: int) -> int:
        """The replica's requests that have not ended."""
        return len(self._waiting[replica]) + len(self._running[replica])

    def loads(self) -> list[tuple[int, int]]:
        """Of each replica: the requests that have started, and those that wait for their first step."""
        return [(len(running), len(waiting)) for running, waiting in zip(self._running, self._waiting, strict=True)]

    def requests(self, replica: int) -> set[int]:
        """The ids of the replica's requests that have not ended."""
        return self._running[replica] | self._waiting[replica]

    def handle(self, delta: Delta) -> None:
        """Book which requests a step has started and ended."""
        for id in delta.started:
            if (replica := self._owners.get(id)) is not None:
                self._waiting[replica].discard(id)
                self._running[replica].add(id)
        for id in delta.finished:
            self.end(id)

    def end(self, id: int) -> int | None:
        """The request is over; the replica that had it, or None if it was over before."""
        if (replica := self._owners.pop(id, None)) is not None:
            self._waiting[replica].discard(id)
            self._running[replica].discard(id)
        return replica

    def forget(self) -> None:
        """The replicas' caches are empty."""
        for seen in self._seen:
            seen.clear()

    def _hashes(self, request: Request) -> list[bytes]:
        """Of the prompt's full blocks, as the prefix cache chains them."""
        if len(self._given) == 1 or not any(self._blocks):
            return []
        size, tokens = self._block_size, np.array(request.prompt, np.int32)
        hashes, parent = list[bytes](), chain_root(request) + request.lora_name.encode()
        for first in range(0, len(tokens) - size + 1, size):
            parent = chained(parent, request, tokens, first, size)
            hashes.append(parent)
        return hashes

    def _remember(self, replica: int, hashes: Sequence[bytes]) -> None:
        seen = self._seen[replica]
        for block in reversed(hashes):  # a chain without its beginning is of no use, so that goes last
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._blocks[replica]:
            seen.popitem(last=False)
