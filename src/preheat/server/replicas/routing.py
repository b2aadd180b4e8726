"""The choice of a replica for each request: the rule, and its memory. Nothing here waits or sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

import numpy as np

from preheat.core import Delta, Request
from preheat.schedule.prefix import chain_root, chained

AHEAD = 32
"""Lead in requests up to which a replica is chosen for its cache.

The lead is counted from the replica with the fewest requests.
"""


class Router:
    """The choice among ``size`` replicas, numbered from 0; see :meth:`route`.

    It counts the requests of each replica from :meth:`route` to :meth:`end`, or to the :class:`Delta` that ends them.
    For each replica it remembers the block hashes of routed prompts: the last used ones, as many as the cache has
    blocks.
    """

    def __init__(self, size: int) -> None:
        self._owners: dict[int, int] = {}
        self._waiting = [set[int]() for _ in range(size)]
        self._running = [set[int]() for _ in range(size)]
        self._given = [0] * size
        self._seen = [OrderedDict[bytes, None]() for _ in range(size)]
        self._block_size, self._blocks = 0, [0] * size

    def open(self, block_size: int, blocks: Sequence[int]) -> None:
        """Set the number of cache ``blocks`` of each replica.

        They have ``block_size`` tokens. A replica with 0 blocks has no memory here.
        """
        self._block_size, self._blocks = block_size, list(blocks)

    def route(self, request: Request, among: Collection[int] | None = None) -> int:
        """Choose the replica for ``request``, and count the request there.

        Only the replicas ``among`` may be chosen, by default all. A replica named by the request is chosen. Otherwise
        it is the replica with the longest remembered prefix of the prompt, in blocks. Ties go to the replica with the
        fewest requests, then to the one with the fewest requests ever. A replica with over :data:`AHEAD` requests more
        than another is passed over.
        """
        hashes, allowed = self._hashes(request), range(len(self._given)) if among is None else among
        named = request.data_parallel_rank
        replica = named if named is not None and named in allowed else self._choose(hashes, allowed)
        self._remember(replica, hashes)
        self._owners[request.id] = replica
        self._waiting[replica].add(request.id)
        self._given[replica] += 1
        return replica

    def _choose(self, hashes: Sequence[bytes], allowed: Collection[int]) -> int:
        loads = {replica: self.load(replica) for replica in allowed}
        most = min(loads.values()) + AHEAD
        return min(
            (replica for replica, load in loads.items() if load <= most),
            key=lambda replica: (-self.prefix(replica, hashes), loads[replica], self._given[replica]),
        )

    def prefix(self, replica: int, hashes: Iterable[bytes]) -> int:
        """Return how many leading ``hashes`` the replica likely has in its cache."""
        return sum(1 for _ in takewhile(self._seen[replica].__contains__, hashes))

    def load(self, replica: int) -> int:
        """Return the number of the replica's unfinished requests."""
        return len(self._waiting[replica]) + len(self._running[replica])

    def loads(self) -> list[tuple[int, int]]:
        """Return the numbers of started and of waiting requests, for each replica.

        A request waits until its first step.
        """
        return [(len(running), len(waiting)) for running, waiting in zip(self._running, self._waiting, strict=True)]

    def requests(self, replica: int) -> set[int]:
        """Return the ids of the replica's unfinished requests."""
        return self._running[replica] | self._waiting[replica]

    def handle(self, delta: Delta) -> None:
        """Count the requests that a step has started and ended."""
        for id in delta.started:
            if (replica := self._owners.get(id)) is not None:
                self._waiting[replica].discard(id)
                self._running[replica].add(id)
        for id in delta.finished:
            self.end(id)

    def end(self, id: int) -> int | None:
        """End a request. Return its replica, or None if it had ended before."""
        if (replica := self._owners.pop(id, None)) is not None:
            self._waiting[replica].discard(id)
            self._running[replica].discard(id)
        return replica

    def forget(self) -> None:
        """Forget all hashes, as the replicas' caches are empty."""
        for seen in self._seen:
            seen.clear()

    def clear(self, replica: int) -> None:
        """Forget the requests and the hashes of ``replica``, as its process ends."""
        for id in self.requests(replica):
            self.end(id)
        self._seen[replica].clear()

    def _hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the prompt's full blocks, chained as in the prefix cache."""
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
        for block in reversed(hashes):  # a chain is useless without its beginning, so drop that last
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._blocks[replica]:
            seen.popitem(last=False)
