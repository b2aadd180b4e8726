"""Events of the prefix cache's blocks, for routers.

A router sends requests to the server with their prefix. Names, fields and encoding are vLLM's ``KVCacheEvent``: a batch
is an array, an event a map with its ``type``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

MEDIUM = "GPU"
"""vLLM's name for the cache on the device, whatever the device is."""


ExtraKeys = tuple[str | tuple[str, int], ...]
"""Everything besides tokens and the parent block that identifies a block.

It is the adapter's name, and the hash of each image or piece of embeddings with its start, counted from the block. The
first block of a prompt adds the salt.
"""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks that can be found from now on.

    ``token_ids`` are the tokens of all blocks, 0 where there are embeddings. ``parent_block_hash`` is the hash of the
    block before them. ``extra_keys`` has an entry for each block.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None]


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that cannot be found any more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """The prefix cache is empty: no block can be found."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events since the last batch; ``ts`` is Unix time."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class KvEvents:
    """Collects events, in order, until :meth:`flush` hands them to ``publish``."""

    def __init__(self, publish: Callable[[KvEventBatch], None]) -> None:
        self._publish, self._events = publish, list[KvEvent]()

    def stored(
        self,
        hashes: Sequence[bytes],
        parent: bytes | None,
        tokens: list[int],
        lora_name: str,
        extra_keys: list[ExtraKeys | None],
    ) -> None:
        """Note that consecutive blocks were published."""
        size = len(tokens) // len(hashes)
        self._events.append(
            BlockStored(list(hashes), parent, tokens, size, None, MEDIUM, lora_name or None, extra_keys)
        )

    def removed(self, block_hash: bytes) -> None:
        """Note that a block was evicted."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], MEDIUM))

    def cleared(self) -> None:
        """Note that all blocks were forgotten."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish the collected events, if there are any."""
        if self._events:
            self._publish(KvEventBatch(time.time(), self._events))
            self._events = []
