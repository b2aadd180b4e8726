"""Automatic prefix caching.

Full blocks of computed tokens are found again by their block hash. A block's hash covers its parent's hash, its own
tokens, and the hash and start of each image in it. The chain starts from everything else that decides a sequence's keys
and values: a salt, the adapter's numbers. Equal hashes therefore mean equal cache contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from preheat.core import Request, Segment
from preheat.schedule.blocks import BlockPool
from preheat.schedule.kv_events import ExtraKeys
from preheat.schedule.sequence import Sequence

HASH_BYTES = 16


def chain_root(request: Request) -> bytes:
    """Return the start of the request's chain of hashes.

    It covers the salt, which keeps equal tokens apart.
    """
    return hashlib.blake2b(request.cache_salt.encode(), digest_size=HASH_BYTES, person=b"salt").digest()


def chained(parent: bytes, request: Request, tokens: np.ndarray, first: int, size: int) -> bytes:
    """Return the hash of a block of ``size`` tokens.

    The block begins at ``first``, behind the block with the hash ``parent``.
    """
    content = parent + tokens[first : first + size].tobytes()
    if request.segments:
        content += _images(request, first, size)
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


class PrefixCache:
    """Finds and publishes blocks in ``pool``, if ``enabled``.

    ``contents`` names the type of the cache and its scales, so that blocks of different engines differ. It is empty for
    the model's own type.
    """

    def __init__(self, pool: BlockPool, enabled: bool = True, contents: str = "") -> None:
        self.pool, self.enabled, self._contents = pool, enabled, contents.encode()

    def rekey(self, contents: str) -> None:
        """Set new ``contents``: none of the blocks published before is found any more."""
        self._contents = contents.encode()
        self.pool.forget_contents()

    def reads_for(self, sequence: Sequence) -> bool:
        """Return whether cached blocks may be used.

        Prompt logprobs need every position to be computed, and a request may refuse cached blocks.
        """
        skips = sequence.request.params.skip_reading_prefix_cache
        return self.enabled and not sequence.owes_prompt_logprobs and not skips

    def lookup(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix of a waiting sequence.

        The last token is left out: it must be computed to sample the next one.
        """
        if not self.reads_for(sequence):
            return []
        blocks: list[int] = []
        for index in range((len(sequence.tokens) - 1) // self.pool.block_size):
            block = self.pool.find(self._block_hash(sequence, sequence.tokens, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def restore(self, sequence: Sequence) -> None:
        """Load blocks of a waiting sequence from the pool's tier.

        They go into free blocks, for :meth:`lookup` to find.
        """
        tier, pool = self.pool.tier, self.pool
        if tier is None or not self.reads_for(sequence):
            return
        held: list[int] = []  # references, so that none of the blocks makes room for another
        for index in range((len(sequence.tokens) - 1) // pool.block_size):
            block_hash = self._block_hash(sequence, sequence.tokens, index)
            block = pool.find(block_hash)
            if block is not None:
                pool.share([block])
                held.append(block)
                continue
            if block_hash not in tier or not pool.num_free:
                break
            held += pool.allocate(1)
            if not tier.load(held[-1], block_hash):
                break
            if pool.publish(held[-1], block_hash):
                self._tell(sequence, sequence.tokens, [index])
        pool.release(held)

    def publish(self, sequence: Sequence, tokens: np.ndarray, table: np.ndarray, first: int, last: int) -> None:
        """Publish the logical blocks ``first`` to ``last`` - 1.

        Their keys and values must be in the cache. ``tokens`` and ``table``, both int32, are the sequence's rows of the
        slots' arrays.
        """
        if not self.enabled:
            return
        stored: list[int] = []
        for index in range(first, last):
            if self.pool.publish(int(table[index]), self._block_hash(sequence, tokens, index)):
                stored.append(index)
        if stored:
            self._tell(sequence, tokens, stored)

    def _tell(self, sequence: Sequence, tokens: np.ndarray, stored: list[int]) -> None:
        """Report the logical blocks ``stored``, consecutive blocks as one event."""
        if self.pool.events is None:
            return
        hashes, size = sequence.block_hashes, self.pool.block_size
        edges = [at for at in range(1, len(stored)) if stored[at] != stored[at - 1] + 1]
        for begin, end in pairwise([0, *edges, len(stored)]):
            first, last = stored[begin], stored[end - 1] + 1
            parent = hashes[first - 1] if first else None
            self.pool.events.stored(
                hashes[first:last], parent, tokens[first * size : last * size].tolist(), sequence.request.lora_name,
                [_extra_keys(sequence.request, at * size, size) for at in range(first, last)],
            )  # fmt: skip

    def _root(self, sequence: Sequence) -> bytes:
        return chain_root(sequence.request) + self._contents + sequence.adapter_digest.encode()

    def _block_hash(self, sequence: Sequence, tokens: np.ndarray, index: int) -> bytes:
        """Return the hash of logical block ``index``.

        Hashes are kept in the sequence.
        """
        hashes, size = sequence.block_hashes, self.pool.block_size
        while len(hashes) <= index:
            done = len(hashes)
            parent = hashes[-1] if hashes else self._root(sequence)
            hashes.append(chained(parent, sequence.request, tokens, done * size, size))
        return hashes[index]


def _images(request: Request, first: int, size: int) -> bytes:
    """Return the hash and start of each image in a block.

    The block has ``size`` tokens from ``first`` on; starts are counted from ``first``.
    """
    return b"".join(
        segment.image.hash + (segment.start - first).to_bytes(4, "little", signed=True)
        for segment in _segments(request, first, size)
    )


def _segments(request: Request, first: int, size: int) -> Iterator[Segment]:
    """Return the segments in the ``size`` tokens from ``first`` on."""
    return (each for each in request.segments if each.start < first + size and each.end > first)


def _extra_keys(request: Request, first: int, size: int) -> ExtraKeys | None:
    """Return the extra keys of a block, for routers, or None.

    The block has ``size`` tokens from ``first`` on.
    """
    images = ((each.image.hash.hex(), each.start - first) for each in _segments(request, first, size))
    salt = request.cache_salt if first == 0 else ""
    return (*filter(None, [request.lora_name]), *images, *filter(None, [salt])) or None
