"""The pool of KV cache blocks.

It has reference counts, and the blocks that can be found by their block hash. A *used* block is referenced by at least
one sequence. A *cached* block is free, but its content has a known block hash and may be shared again. A *blank* block
is free, without such content. A used block may have a known hash as well.

Allocation takes the lowest blank id, then evicts the least recently used cached block. Block 0 is the pad block: never
allocated, published or moved.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence as Ids
from typing import Protocol

import numpy as np

from preheat.core import Transfer
from preheat.schedule.kv_events import KvEvents

PAD_BLOCK = 0

HASH_BYTES = 16


class Tier(Protocol):
    """A store for the contents of evicted blocks, by block hash."""

    def __contains__(self, block_hash: bytes) -> bool: ...

    def store(self, block: int, block_hash: bytes) -> None:
        """Keep the contents of ``block``, which is about to be overwritten."""

    def load(self, block: int, block_hash: bytes) -> bool:
        """Load the contents with this hash into ``block``.

        Returns False if that fails.
        """

    def forget(self) -> None:
        """Drop all contents."""

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the copies made since the last call."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens each, the pad block included.

    A block serves the layers of any cache group, one group at a time; the key under which it is published names the
    group. So memory moves between groups, and the oldest block of all groups is evicted first.

    ``tier`` keeps the contents of evicted blocks. ``events`` report the blocks that can be found.
    """

    tier: Tier | None = None
    published: deque[bytes] | None = None
    """Hashes that were published, for an audit that takes them."""
    events: KvEvents | None = None
    states: BlockPool | None = None
    """States at the ends of blocks, under the hash of the block before. They are forgotten with the blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool needs 2 blocks of 1 token at least, got {num_blocks} blocks of {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.refs = np.zeros(num_blocks, np.int32)
        self.changes = 0  # of references
        self._blank = list(range(1, num_blocks))  # a heap
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # hashes of free blocks, least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that :meth:`allocate` can return, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._blank) - len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks with one reference each.

        Raises RuntimeError, taking none, if fewer are free.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free: the scheduler must check first")
        blank = min(count, len(self._blank))
        blocks = [heapq.heappop(self._blank) for _ in range(blank)]
        blocks += [self._evict() for _ in range(count - blank)]
        self.refs[blocks] = 1
        self.changes += 1
        return blocks

    def share(self, blocks: Ids[int]) -> None:
        """Add a reference to each of ``blocks``, all found by :meth:`find`."""
        for block in blocks:
            block_hash = self._hash_of[block]
            if not self.refs[block] and block_hash is not None:
                del self._cached[block_hash]
            self.refs[block] += 1
        self.changes += 1

    def release(self, blocks: Ids[int], *, first: bool = False) -> None:
        """Drop one reference to each of a sequence's ``blocks``, in the sequence's order.

        The last ones are evicted first: a prefix is worth more than its continuation. With ``first`` they are evicted
        before all other cached blocks.
        """
        self.changes += 1
        for block in reversed(blocks):
            if self.refs[block] < 1:
                raise RuntimeError(f"block {block} released more often than referenced")
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            block_hash = self._hash_of[block]
            if block_hash is None:
                heapq.heappush(self._blank, block)
            else:
                self._cached[block_hash] = None
                if first:
                    self._cached.move_to_end(block_hash, last=False)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Let :meth:`find` return the used ``block`` for ``block_hash``.

        Returns False if the hash or the block is published already; the first block of a hash stays.
        """
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        if self.published is not None:
            self.published.append(block_hash)
        return True

    def evict_first(self, block_hash: bytes) -> None:
        """Let the block with the hash ``block_hash`` be evicted before other cached ones, if it is cached."""
        if block_hash in self._cached:
            self._cached.move_to_end(block_hash, last=False)

    def find(self, block_hash: bytes) -> int | None:
        """Return the used or cached block with the hash ``block_hash``, or None."""
        return self._block_of.get(block_hash)

    def published_hashes(self) -> list[bytes]:
        """Return the hashes that :meth:`find` finds."""
        return [*self._block_of]

    def count_cached(self, blocks: Ids[int]) -> int:
        """Return how many of ``blocks`` are free: sharing them lowers :attr:`num_free`."""
        return int(np.count_nonzero(self.refs[blocks] == 0)) if blocks else 0

    def swap(self, pairs: np.ndarray, moved: np.ndarray) -> None:
        """Swap the records of each of the ``pairs`` of blocks.

        ``pairs`` is [n, 2], no id twice. ``moved`` [num_blocks] maps old ids to new. The order of eviction, kept by
        hash, does not change.
        """
        self.changes += 1
        self.refs[pairs] = self.refs[pairs[:, ::-1]]
        self._blank = np.sort(moved[np.fromiter(self._blank, np.int32, len(self._blank))]).tolist()  # sorted is a heap
        hashes = self._hash_of
        for one, other in pairs.tolist():
            hashes[one], hashes[other] = hashes[other], hashes[one]
            for block in (one, other):
                block_hash = hashes[block]
                if block_hash is not None:
                    self._block_of[block_hash] = block

    def forget_contents(self) -> None:
        """Empty the prefix cache: no block, used or free, is found any more."""
        self._blank += [self._block_of[block_hash] for block_hash in self._cached]
        heapq.heapify(self._blank)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks
        if self.tier is not None:
            self.tier.forget()
        if self.states is not None:
            self.states.forget_contents()
        if self.events is not None:
            self.events.cleared()

    def check(self, references: np.ndarray | None = None) -> None:
        """Raise RuntimeError, naming the first fault, unless all records agree.

        ``references`` [num_blocks], if given, must equal the reference counts (all zero when idle: nothing leaks).
        """
        blank, cached = set(self._blank), {self._block_of.get(block_hash, PAD_BLOCK) for block_hash in self._cached}
        free = set(np.flatnonzero(self.refs == 0).tolist()) - {PAD_BLOCK}
        known = {block for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        for broken, message in (
            (self.refs[PAD_BLOCK] != 0 or PAD_BLOCK in blank | cached | known, "the pad block was handed out"),
            ((self.refs < 0).any(), "a reference count is negative"),
            (len(blank) != len(self._blank) or blank & cached, "a block is free twice"),
            (blank | cached != free, f"lost or wrongly free: {sorted((blank | cached) ^ free)[:8]}"),
            (bool(cached - known) or bool(blank & known), "a free block is filed under the wrong state"),
            (
                len(known) != len(self._block_of)
                or any(self._hash_of[block] != block_hash for block_hash, block in self._block_of.items()),
                "block hashes and blocks disagree",
            ),
            (
                references is not None and not np.array_equal(self.refs, references),
                "references of sequences and their count here differ",
            ),
        ):
            if broken:
                raise RuntimeError(f"block pool: {message}")

    def _evict(self) -> int:
        block_hash, _ = self._cached.popitem(last=False)
        block = self._block_of.pop(block_hash)
        self._hash_of[block] = None
        if self.tier is not None:
            self.tier.store(block, block_hash)
        if self.events is not None and len(block_hash) <= HASH_BYTES:  # of the first group
            self.events.removed(block_hash)
        return block
