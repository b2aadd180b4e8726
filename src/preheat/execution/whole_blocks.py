"""Blocks of the host tier as other engines see them: with the heads of all ranks.

Each rank's host has its own heads of a block. Rank 0 joins them to send a block, and divides a block that arrived.
"""

from __future__ import annotations

import numpy as np

from preheat.backends.base.backend import Backend
from preheat.execution.kv_cache import KVCache
from preheat.execution.offload import HostTier
from preheat.kv_transfer.client import Target
from preheat.kv_transfer.messages import Layout
from preheat.kv_transfer.sends import Staged
from preheat.schedule.blocks import BlockPool


class WholeBlocks:
    """The blocks of ``cache`` in ``tier``, which have ``heads`` heads on all ranks together.

    Ranks that are more than the heads hold copies of a head.
    """

    def __init__(self, backend: Backend, cache: KVCache, tier: HostTier, pool: BlockPool, heads: int) -> None:
        self._backend, self._tier, self._pool = backend, tier, pool
        layers, _, sides, own, slots, dim = cache.data.shape
        row = slots * dim * cache.data.itemsize
        self.layout = Layout(layers, sides, heads, row, str(cache.data.dtype).removeprefix("torch."), slots)
        self._own = own
        self._shape = (layers, sides, heads, row)

    def stage(self, block_hash: bytes) -> Staged | None:
        """See :class:`preheat.kv_transfer.sends.Departures`."""
        tier = self._tier
        if block_hash not in tier and (block := self._pool.find(block_hash)) is not None:
            tier.store(block, block_hash)
        place = tier.hold(block_hash)
        if place is None:
            return None
        event = self._backend.event()
        event.record()
        if tier.others is None:
            return Staged(block_hash, place, self._view(place), event.wait)
        event.wait()
        return Staged(block_hash, place, self._joined(place), event.wait)

    def release(self, place: int) -> None:
        self._tier.release(place)

    def targets(self, hashes: list[bytes]) -> list[Target]:
        """See :class:`preheat.kv_transfer.pulls.Arrivals`."""
        places = self._tier.reserve(len(hashes))
        event = self._backend.event()
        event.record()
        return [
            Target(each, place, self._memory(place), event.wait) for each, place in zip(hashes, places, strict=False)
        ]

    def keep(self, target: Target) -> None:
        """Name a block that arrived by its hash; divide it among the ranks."""
        if self._tier.others is not None:
            self._divide(target)
        self._tier.keep(target.place, target.hash)

    def _view(self, place: int) -> memoryview:
        return self._tier.blocks.view(place).reshape(-1).data

    def _memory(self, place: int) -> memoryview:
        """Return the memory in which a block arrives: the place itself, if this rank is the only one."""
        if self._tier.others is None:
            return self._view(place)
        return memoryview(bytearray(self.layout.block_bytes))

    def _part(self, rank: int, world: int) -> slice:
        first = rank * self.layout.heads // world
        return slice(first, first + self._own)

    def _joined(self, place: int) -> memoryview:
        others = self._tier.others
        assert others is not None, "a block of one rank is whole"
        whole = np.empty(self._shape, np.uint8)
        parts = [self._tier.blocks.view(place).tobytes(), *others.read_place(place)]
        for rank, part in enumerate(parts):
            heads = whole[:, :, self._part(rank, len(parts))]
            heads[:] = np.frombuffer(part, np.uint8).reshape(heads.shape)
        return whole.reshape(-1).data

    def _divide(self, target: Target) -> None:
        others = self._tier.others
        assert others is not None, "a block of one rank is whole"
        whole = np.frombuffer(target.view, np.uint8).reshape(self._shape)
        parts = [whole[:, :, self._part(rank, others.world)].tobytes() for rank in range(others.world)]
        own = self._tier.blocks.view(target.place)
        own[:] = np.frombuffer(parts[0], np.uint8).reshape(own.shape)
        others.write_place(target.place, parts[1:])
