"""The pool of cache blocks: who owns which physical id, and which content can be found again.

A block is in one of three states: *used* (referenced by at least one sequence), *cached* (free, but its content is
known by a digest and may be shared again) or *blank* (free, nothing worth keeping). A used block may be known by a
digest as well. Allocation takes the lowest blank id, then evicts the cached block that was left alone for longest.

The pool alone maps digests to ids, so whoever moves a block rewrites it here and in the slots' block tables, nowhere
else: :meth:`preheat.schedule.running.Running.swap` does both. Block 0 is the pad block: never allocated, published or
moved.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence as Ids

import numpy as np

PAD_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks (block 0, the pad block, among them) of ``block_size`` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool needs 2 blocks of 1 token at least, got {num_blocks} blocks of {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.refs = np.zeros(num_blocks, np.int32)
        self._blank = list(range(1, num_blocks))  # a heap
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # digests of free blocks, least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`allocate` can hand out; those holding cached content count."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def usage(self) -> float:
        """The share of usable blocks that some sequence references, 0 to 1."""
        return self.num_used / self.num_usable

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each. Raises RuntimeError, taking none, if fewer are free."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free: the scheduler must check first")
        blank = min(count, len(self._blank))
        blocks = [heapq.heappop(self._blank) for _ in range(blank)]
        blocks += [self._evict() for _ in range(count - blank)]
        self.refs[blocks] = 1
        return blocks

    def share(self, blocks: Ids[int]) -> None:
        """Add a reference to each of ``blocks``, all found by :meth:`find`."""
        for block in blocks:
            digest = self._hash_of[block]
            if not self.refs[block] and digest is not None:
                del self._cached[digest]
            self.refs[block] += 1

    def release(self, blocks: Ids[int]) -> None:
        """Drop one reference to each of one sequence's ``blocks``, in the sequence's order.

        The last ones become the first to be evicted: a prefix is worth more than what follows it.
        """
        for block in reversed(blocks):
            if self.refs[block] < 1:
                raise RuntimeError(f"block {block} released more often than referenced")
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            digest = self._hash_of[block]
            if digest is None:
                heapq.heappush(self._blank, block)
            else:
                self._cached[digest] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let the content of used ``block`` be found by ``digest``; the first block published for a digest stays it."""
        if digest not in self._block_of and self._hash_of[block] is None:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def find(self, digest: bytes) -> int | None:
        """The block whose content has ``digest``, used or cached."""
        return self._block_of.get(digest)

    def count_cached(self, blocks: Ids[int]) -> int:
        """How many of ``blocks`` nobody references: sharing those takes them out of the free ones."""
        return int(np.count_nonzero(self.refs[blocks] == 0)) if blocks else 0

    def swap(self, pairs: np.ndarray, moved: np.ndarray) -> None:
        """The contents of each of the ``pairs`` [n, 2], no id twice, change places, and all that is known of them.

        ``moved`` [num_blocks] gives each content its new id. The order of eviction, kept by digest, stays as it is.
        """
        self.refs[pairs] = self.refs[pairs[:, ::-1]]
        self._blank = np.sort(moved[np.fromiter(self._blank, np.int32, len(self._blank))]).tolist()  # sorted is a heap
        digests = self._hash_of
        for one, other in pairs.tolist():
            digests[one], digests[other] = digests[other], digests[one]
            for block in (one, other):
                digest = digests[block]
                if digest is not None:
                    self._block_of[digest] = block

    def forget_contents(self) -> None:
        """Nothing in the cache can be relied on: no block, used or free, is found any more."""
        self._blank += [self._block_of[digest] for digest in self._cached]
        heapq.heapify(self._blank)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

    def check(self, references: np.ndarray | None = None) -> None:
        """Prove that the books agree; with ``references`` [num_blocks], that they are exactly the counts held.

        All zeros proves that nothing leaks. Raises RuntimeError naming the first disagreement.
        """
        blank, cached = set(self._blank), {self._block_of.get(digest, PAD_BLOCK) for digest in self._cached}
        free = set(np.flatnonzero(self.refs == 0).tolist()) - {PAD_BLOCK}
        known = {block for block, digest in enumerate(self._hash_of) if digest is not None}
        for broken, message in (
            (self.refs[PAD_BLOCK] != 0 or PAD_BLOCK in blank | cached | known, "the pad block was handed out"),
            ((self.refs < 0).any(), "a reference count is negative"),
            (len(blank) != len(self._blank) or blank & cached, "a block is free twice"),
            (blank | cached != free, f"lost or wrongly free: {sorted((blank | cached) ^ free)[:8]}"),
            (bool(cached - known) or bool(blank & known), "a free block is filed under the wrong state"),
            (
                len(known) != len(self._block_of)
                or any(self._hash_of[block] != digest for digest, block in self._block_of.items()),
                "digests and blocks disagree",
            ),
            (
                references is not None and not np.array_equal(self.refs, references),
                "references held by sequences and counted here differ",
            ),
        ):
            if broken:
                raise RuntimeError(f"block pool: {message}")

    def _evict(self) -> int:
        digest, _ = self._cached.popitem(last=False)
        block = self._block_of.pop(digest)
        self._hash_of[block] = None
        return block
