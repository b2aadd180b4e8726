"""What happens to the blocks of the prefix cache, for routers that send requests to where their prefix is.

Names, fields and encoding are those of vLLM's ``KVCacheEvent``: a batch is an array, an event a map with its ``type``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

MEDIUM = "GPU"
"""What vLLM calls the cache on the device, whatever that is."""


ExtraKeys = tuple[str | tuple[str, int], ...]
"""What makes a block another one than its tokens and the blocks before it say: the adapter's name; the hash of each
image, or piece of embeddings, and where it begins, counted from the block; of a prompt's first block the salt.
"""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other can be found from now on. ``token_ids`` are those of all of them, 0 where there are
    embeddings; ``parent_block_hash`` is that of the block before them; ``extra_keys`` are each block's.
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
    """Blocks cannot be found any more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """No block can be found."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What happened since the last batch; ``ts`` is Unix time."""

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
        """Blocks that follow each other were published."""
        size = len(tokens) // len(hashes)
        self._events.append(
            BlockStored(list(hashes), parent, tokens, size, None, MEDIUM, lora_name or None, extra_keys)
        )

    def removed(self, block_hash: bytes) -> None:
        """A block was evicted."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], MEDIUM))

    def cleared(self) -> None:
        """All blocks were forgotten."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish what was collected, if anything was."""
        if self._events:
            self._publish(KvEventBatch(time.time(), self._events))
            self._events = []
