"""The host tier of the prefix cache.

It keeps blocks evicted from the device in the host's memory. A block's bytes are copied as they are, in every layer,
under its block hash, and come back under the same one: equal hashes mean equal contents. Copies are made in the order
of the steps around them. The least recently used block makes room for a new one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

import torch

from preheat.backends.base import Backend
from preheat.core import Transfer
from preheat.errors import EngineDead, SettingsError
from preheat.execution.kv_cache import BlockCache
from preheat.utils.memory import free_memory

logger = logging.getLogger(__name__)


class HostTier:
    """A host tier of ``caches`` in at most ``size`` bytes.

    It keeps as many blocks as fit. See :class:`preheat.schedule.blocks.Tier`. A block has its part in each of the
    ``caches``. Raises SettingsError if the host lacks the memory, or if ``size`` is less than one block.
    """

    def __init__(self, backend: Backend, caches: Sequence[BlockCache], size: int) -> None:
        self._blocks = [cache.data.view(torch.uint8).flatten(2) for cache in caches]  # [layers, blocks, bytes]
        each = sum(len(blocks) * blocks.shape[2] for blocks in self._blocks)
        self.places = size // each
        free = free_memory()
        if not self.places or size > free:
            raise SettingsError(
                f"kv_offloading_size: a block takes {each / 2**30:,.3f} GiB, {free / 2**30:,.1f} GiB are free on the "
                f"host: {'lower' if self.places else 'raise'} it",
                param="kv_offloading_size",
            )
        self._kept = [
            backend.host_copy(blocks.new_empty(1).expand(self.places, len(blocks), blocks.shape[2]))
            for blocks in self._blocks
        ]
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # by block hash, the least recently used first
        self._free = list(range(self.places))
        self._used: set[Transfer] = set()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._place_of

    def __len__(self) -> int:
        return len(self._place_of)

    def store(self, block: int, block_hash: bytes) -> None:
        """Keep the contents of ``block`` under its hash ``block_hash``."""
        if block_hash in self._place_of:
            self._place_of.move_to_end(block_hash)
            return
        place = self._free.pop() if self._free else self._place_of.popitem(last=False)[1]
        try:
            self.copy("store", block, place)
        except EngineDead:
            raise
        except Exception:  # the block is computed again when needed
            logger.exception("Block %d could not be kept on the host", block)
            self._free.append(place)
            return
        self._place_of[block_hash] = place

    def load(self, block: int, block_hash: bytes) -> bool:
        """Copy the contents with this hash into ``block``.

        False if it must be computed instead.
        """
        place = self._place_of.get(block_hash)
        if place is None:
            return False
        try:
            self.copy("load", block, place)
        except EngineDead:
            raise
        except Exception:
            logger.exception("A block could not be brought back from the host: it is computed again")
            self._free.append(self._place_of.pop(block_hash))
            return False
        self._place_of.move_to_end(block_hash)
        return True

    def forget(self) -> None:
        """Drop all kept blocks."""
        self._free += self._place_of.values()
        self._place_of.clear()

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the kinds of copies since the last call."""
        found, self._used = tuple(sorted(self._used)), set()
        return found

    @torch.inference_mode()
    def copy(self, transfer: Transfer, block: int, place: int) -> None:
        """Copy ``block`` to a place of the tier, or back.

        The copy runs after the steps before it and before later ones. Only copies read or write a place, so the host
        never waits for one.
        """
        self._used.add(transfer)
        for blocks, kept in zip(self._blocks, self._kept, strict=True):
            if transfer == "store":
                kept[place].copy_(blocks[:, block], non_blocking=True)
            else:
                blocks[:, block].copy_(kept[place], non_blocking=True)
