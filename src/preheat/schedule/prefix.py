"""Automatic prefix caching.

Full blocks of computed tokens are found again by their block hash. A block's hash covers its parent's hash, its own
tokens, and the hash and start of each image in it. The chain starts from everything else that decides a sequence's keys
and values: a salt, the adapter's numbers. Equal hashes therefore mean equal cache contents.

A prefix is found only if every cache group has the blocks that the next token reads: a group with a window needs the
last ones alone. A model with states needs the state at the prefix's end too. No group has a prefix of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from preheat.cache_groups import WHOLE, CacheGroup
from preheat.core import Request, Segment
from preheat.schedule.blocks import HASH_BYTES, BlockPool
from preheat.schedule.kv_events import ExtraKeys
from preheat.schedule.sequence import Sequence


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


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a sequence: its first ``columns`` blocks.

    ``blocks`` are each group's blocks of the last of the columns. ``branch``: the columns that groups without a window
    have, at least ``columns``. ``state`` is the block of the pool of states with the state behind the prefix, 0 without
    states.
    """

    columns: int
    blocks: list[list[int]]
    branch: int = 0
    state: int = 0

    @property
    def all_blocks(self) -> list[int]:
        return self.blocks[0] if len(self.blocks) == 1 else [block for group in self.blocks for block in group]


class PrefixCache:
    """Finds and publishes blocks of ``groups`` in ``pool``, if ``enabled``.

    ``contents`` names the type of the cache and its scales, so that blocks of different engines differ. It is empty for
    the model's own type.
    """

    def __init__(
        self, pool: BlockPool, enabled: bool = True, contents: str = "", groups: tuple[CacheGroup, ...] = WHOLE
    ) -> None:
        self.pool, self.enabled, self._contents, self.groups = pool, enabled, contents.encode(), groups

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

    def lookup(self, sequence: Sequence) -> Hit:
        """Return the longest cached prefix of a waiting sequence.

        The last token is left out: it must be computed to sample the next one.
        """
        if not self.reads_for(sequence):
            return Hit(0, [[] for _ in self.groups])
        most = (len(sequence.tokens) - 1) // self.pool.block_size
        whole, windowed = self._whole(sequence, most)
        columns = branch = len(whole[0]) if whole else most
        columns, state = self._with_state(sequence, columns)
        found = dict[tuple[int, int], int]()  # blocks of groups with windows, by group and column
        while columns and (missing := self._missing(sequence, columns, windowed, found)) is not None:
            columns = missing
        blocks = [each[:columns] for each in whole]
        for group in windowed:
            tail = self.groups[group].tail(columns, self.pool.block_size)
            blocks.append([found[group, column] for column in range(columns - tail, columns)])
        return Hit(columns, blocks, branch if whole else columns, state)

    def _with_state(self, sequence: Sequence, columns: int) -> tuple[int, int]:
        """Return the most of ``columns`` with a state at their end, and the state's block.

        A model without states has all of them, and block 0.
        """
        states = self.pool.states
        if states is None:
            return columns, 0
        keys = ((end, self._block_hash(sequence, sequence.tokens, end - 1)) for end in range(columns, 0, -1))
        return next(((end, state) for end, key in keys if (state := states.find(key)) is not None), (0, 0))

    def _whole(self, sequence: Sequence, most: int) -> tuple[list[list[int]], list[int]]:
        """Return the blocks of the columns that all groups without a window have, and the numbers of other groups.

        There are at most ``most`` columns. Groups with a window come last.
        """
        whole = [number for number, group in enumerate(self.groups) if group.window is None]
        found: list[list[int]] = [[] for _ in whole]
        for column in range(most if whole else 0):
            blocks = [self.pool.find(self._key(sequence, sequence.tokens, column, group)) for group in whole]
            if None in blocks:
                break
            for own, block in zip(found, blocks, strict=True):
                own.append(block)  # type: ignore[arg-type]
        return found, list(range(len(whole), len(self.groups)))

    def _missing(
        self, sequence: Sequence, columns: int, windowed: list[int], found: dict[tuple[int, int], int]
    ) -> int | None:
        """Return the last column that a group lacks for a prefix of ``columns``, None if nothing is missing."""
        missing: int | None = None
        for group in windowed:
            for column in range(columns - 1, columns - 1 - self.groups[group].tail(columns, self.pool.block_size), -1):
                if (group, column) in found:
                    continue
                block = self.pool.find(self._key(sequence, sequence.tokens, column, group))
                if block is None:
                    missing = column if missing is None else min(missing, column)
                    break
                found[group, column] = block
        return missing

    def lacking(self, sequence: Sequence, most: int) -> list[bytes]:
        """Return the hashes of leading full blocks, at most ``most``, that neither the pool nor its tier has."""
        tier, pool = self.pool.tier, self.pool
        if not self.reads_for(sequence):
            return []
        columns = min(most, (len(sequence.tokens) - 1) // pool.block_size)
        hashes = (self._block_hash(sequence, sequence.tokens, index) for index in range(columns))
        return [each for each in hashes if pool.find(each) is None and (tier is None or each not in tier)]

    @property
    def contents(self) -> str:
        """The key of the contents, beyond a request's tokens, salt, images and adapter."""
        return self._contents.decode()

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

    def publish(self, sequence: Sequence, tokens: np.ndarray, tables: np.ndarray, first: int, last: int) -> None:
        """Publish the logical blocks ``first`` to ``last`` - 1 of each group.

        Their keys and values must be in the cache. ``tokens`` and ``tables`` [groups, columns], both int32, are the
        sequence's rows of the slots' arrays. Events tell of the first group.
        """
        if not self.enabled:
            return
        stored: list[int] = []
        for index in range(first, last):
            for group in range(len(self.groups)):
                new = self.pool.publish(int(tables[group, index]), self._key(sequence, tokens, index, group))
                if new and not group:
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

    def _key(self, sequence: Sequence, tokens: np.ndarray, index: int, group: int) -> bytes:
        """Return the key of logical block ``index`` of ``group``: the hash, followed by the number of a later group."""
        found = self._block_hash(sequence, tokens, index)
        return found + bytes((group,)) if group else found

    def key_at(self, sequence: Sequence, tokens: np.ndarray, end: int) -> bytes:
        """Return the key of the state at ``end``, the end of a block: the block's hash."""
        return self._block_hash(sequence, tokens, end // self.pool.block_size - 1)

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
