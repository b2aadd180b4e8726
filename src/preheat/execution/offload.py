"""The host tier of the prefix cache.

It keeps blocks evicted from the device in the host's memory. A block's bytes are copied as they are, in every layer,
under its block hash, and come back under the same one: equal hashes mean equal contents. Copies are made in the order
of the steps around them. The least recently used block makes room for a new one.

Other processes send and take such blocks (:mod:`preheat.kv_transfer`). A place that is written or read for them is
held: no other block gets it meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from preheat.backends.base.backend import Backend
from preheat.core import Transfer
from preheat.errors import EngineDead, SettingsError
from preheat.execution.inference import in_inference_mode
from preheat.execution.kv_cache import BlockCache
from preheat.utils.memory import free_memory

logger = logging.getLogger(__name__)


class HostBlocks:
    """``places`` for blocks of ``caches`` in the host's memory. A block has its part in each of the caches."""

    def __init__(self, backend: Backend, caches: Sequence[BlockCache], places: int) -> None:
        self._blocks = as_bytes(caches)
        self.kept = [
            backend.host_copy(blocks.new_empty(1).expand(places, len(blocks), blocks.shape[2]))
            for blocks in self._blocks
        ]

    @in_inference_mode
    def copy(self, transfer: Transfer, block: int, place: int) -> None:
        """Copy ``block`` to a place, or back, behind the steps before it and before later ones."""
        for blocks, kept in zip(self._blocks, self.kept, strict=True):
            if transfer == "store":
                kept[place].copy_(blocks[:, block], non_blocking=True)
            else:
                blocks[:, block].copy_(kept[place], non_blocking=True)

    def view(self, place: int) -> np.ndarray:
        """Return the bytes of a place in the only cache, uint8 [layers, bytes]. No copy may be under way."""
        (kept,) = self.kept
        found: np.ndarray = kept[place].numpy()
        return found


def as_bytes(caches: Sequence[BlockCache]) -> list[torch.Tensor]:
    """Return the contents of ``caches`` as bytes, [layers, blocks, bytes] each."""
    return [cache.data.view(torch.uint8).flatten(2) for cache in caches]


class OtherRanks(Protocol):
    """The parts of blocks that other ranks hold, at the same places."""

    @property
    def world(self) -> int:
        """Number of ranks, this one among them."""

    def keep_blocks(self, places: int) -> None:
        """Have each rank make room for its part of ``places`` blocks."""

    def copy_block(self, transfer: Transfer, block: int, place: int) -> None:
        """Have each rank copy its part, as :meth:`HostBlocks.copy`."""

    def read_place(self, place: int) -> list[bytes]:
        """Return each rank's part of a place."""

    def write_place(self, place: int, parts: list[bytes]) -> None:
        """Replace each rank's part of a place."""


class HostTier:
    """A host tier of ``caches`` in at most ``size`` bytes.

    It keeps as many blocks as fit. See :class:`preheat.schedule.blocks.Tier`. ``others`` hold the parts of other ranks.
    Raises SettingsError if the host lacks the memory, or if ``size`` is less than one block.
    """

    def __init__(
        self, backend: Backend, caches: Sequence[BlockCache], size: int, others: OtherRanks | None = None
    ) -> None:
        world = 1 if others is None else others.world
        each = world * sum(len(blocks) * blocks.shape[2] for blocks in as_bytes(caches))
        self.places = size // each
        free = free_memory()
        if not self.places or size > free:
            raise SettingsError(
                f"kv_offloading_size: a block takes {each / 2**30:,.3f} GiB, {free / 2**30:,.1f} GiB are free on the "
                f"host: {'lower' if self.places else 'raise'} it",
                param="kv_offloading_size",
            )
        if others is not None:
            others.keep_blocks(self.places)
        self.blocks, self.others = HostBlocks(backend, caches, self.places), others
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # by block hash, the least recently used first
        self._named: set[int] = set()  # the places of these blocks
        self._free = list(range(self.places))
        self._held: Counter[int] = Counter()  # places that others read, or write before they have a hash
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
        place = self._take_place()
        if place is None:
            return
        try:
            self.copy("store", block, place)
        except EngineDead:
            raise
        except Exception:  # the block is computed again when needed
            logger.exception("Block %d could not be kept on the host", block)
            self._free.append(place)
            return
        self._name(place, block_hash)

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
            self._forget(block_hash)
            return False
        self._place_of.move_to_end(block_hash)
        return True

    def forget(self) -> None:
        """Drop all kept blocks."""
        for block_hash in [*self._place_of]:
            self._forget(block_hash)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the kinds of copies since the last call."""
        found, self._used = tuple(sorted(self._used)), set()
        return found

    def copy(self, transfer: Transfer, block: int, place: int) -> None:
        """Copy ``block`` to a place of the tier, or back.

        The copy runs after the steps before it and before later ones. Only copies read or write a place, so the host
        never waits for one.
        """
        self._used.add(transfer)
        if self.others is not None:
            self.others.copy_block(transfer, block, place)
        self.blocks.copy(transfer, block, place)

    def reserve(self, count: int) -> list[int]:
        """Return up to ``count`` held places for blocks that will arrive; :meth:`keep` or :meth:`release` ends that."""
        found: list[int] = []
        while len(found) < count and (place := self._take_place()) is not None:
            self._held[place] += 1
            found.append(place)
        return found

    def keep(self, place: int, block_hash: bytes) -> None:
        """Keep the contents that arrived in a reserved place under their hash."""
        if block_hash not in self._place_of:
            self._name(place, block_hash)
        self.release(place)

    def hold(self, block_hash: bytes) -> int | None:
        """Return the held place of a kept block, None if it is not kept; :meth:`release` ends that."""
        place = self._place_of.get(block_hash)
        if place is not None:
            self._held[place] += 1
            self._place_of.move_to_end(block_hash)
        return place

    def release(self, place: int) -> None:
        """Let a held place be given to other blocks again."""
        self._held[place] -= 1
        if not self._held[place]:
            del self._held[place]
            if place not in self._named:
                self._free.append(place)

    def _take_place(self) -> int | None:
        """Return a free place, or the place of the least recently used block that is not held; None without one."""
        if not self._free:
            oldest = next((each for each, place in self._place_of.items() if place not in self._held), None)
            if oldest is None:
                return None
            self._forget(oldest)
        return self._free.pop()

    def _name(self, place: int, block_hash: bytes) -> None:
        self._place_of[block_hash] = place
        self._named.add(place)

    def _forget(self, block_hash: bytes) -> None:
        """Drop a kept block. Its place is free, unless it is held."""
        place = self._place_of.pop(block_hash)
        self._named.remove(place)
        if place not in self._held:
            self._free.append(place)
