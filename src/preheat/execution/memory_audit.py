"""Digests of an engine's memory as it lies there: weights, tables, adapter slots, and published blocks of the cache.

Contract. The digest of a slice is the sum of its 64-bit words, each times an odd key, mod 2**64. A sum of integers has
no order. Keys are odd, so a word that differs always gives another digest. Bytes in front of the first word and behind
the last one count as words of their own. Weights are read in the layout of products: panels, codes, oneDNN's copies.

Digests are taken when an engine is ready, and when a block is published. A turn reads at most ``slice_bytes``, and
allocates nothing: the arrays of a slice are made once.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.errors import MemoryFault
from preheat.execution.kv_cache import BlockCache
from preheat.model.loader import LoadedModel
from preheat.model.update import is_packed, parts, tensors_of
from preheat.ops.digest import keys
from preheat.schedule.blocks import BlockPool
from preheat.utils.text import some

WORDS = 1 << 16
"""Words of a slice: 512 KiB, a fraction of a millisecond."""

_MASK = (1 << 64) - 1

Named = tuple[str, Tensor]


class Slice(NamedTuple):
    """A slice of the tensor ``name``, from byte ``first`` on."""

    name: str
    first: int
    ends: np.ndarray  # uint8, in front of the words and behind them
    words: np.ndarray
    keys: np.ndarray

    def digest(self) -> int:
        """Return the digest of the contents now."""
        found = int(np.dot(self.words, self.keys))
        return (found + int.from_bytes(self.ends.tobytes(), "little")) & _MASK if len(self.ends) else found


def slices_of(name: str, tensor: Tensor) -> Iterator[Slice]:
    """Yield the slices of a tensor's memory, also of a copy that oneDNN has laid out."""
    data = _bytes_of(tensor)
    lead = min(-data.ctypes.data % 8, len(data))
    words = data[lead : lead + (len(data) - lead) // 8 * 8].view(np.uint64)
    rest = len(data) - lead - words.nbytes
    if lead:
        yield Slice(name, 0, data[:lead], words[:0], words[:0])
    for first in range(0, len(words), WORDS):
        part = words[first : first + WORDS]
        yield Slice(name, lead + first * 8, data[:0], part, keys(WORDS)[: len(part)])
    if rest:
        yield Slice(name, len(data) - rest, data[len(data) - rest :], words[:0], words[:0])


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor where they lie, from its first number to its last one."""
    if is_packed(tensor):
        address, size = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        address, size = tensor.data_ptr(), 1 + sum((count - 1) * step for count, step in steps) if tensor.numel() else 0
        size *= tensor.element_size()
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8) if size else np.empty(0, np.uint8)


def weights_of(model: LoadedModel) -> Iterator[Named]:
    """Yield the tensors of a model's layers, each with the names of its tensors in the checkpoint."""
    for part in parts(model.spec, model.weights):
        name = some(sorted(part.tensors(model.formats)))
        yield from ((name, tensor) for tensor in tensors_of(part.loaded))


class _Blocks:
    """Published blocks of ``cache`` and their digests. A turn reads some layers of a block."""

    def __init__(self, cache: BlockCache, pool: BlockPool) -> None:
        self._layers = [blocks.numpy().view(np.uint64) for blocks in cache.blocks]
        words = self._layers[0].shape[1]
        self._keys, self._at_once, self._pool = keys(words), max(WORDS // max(words, 1), 1), pool
        self.turns = -(-len(self._layers) // self._at_once)
        self.digests: dict[bytes, int] = {}
        self.new = pool.published = deque(pool.published_hashes())
        self._taken, self._checked = _Read(), _Read()

    def take(self) -> None:
        """Read a part of the oldest new block."""
        name = self.new[0]
        if self._read(self._taken, name):
            self.new.popleft()
            self.digests.pop(name, None)
            if self._pool.find(name) is not None:
                self.digests[name] = self._taken.total

    def check(self, name: bytes) -> None:
        """Read the next part of a block. Raise MemoryFault, naming the block, if its contents differ."""
        expected = self.digests.get(name)
        if not self._read(self._checked, name) or expected in (None, self._checked.total):
            return
        if (block := self._pool.find(name)) is not None:
            raise MemoryFault.at(f"the cached block {name.hex()} (block {block})")

    def forget_evicted(self) -> None:
        for name in [name for name in self.digests if self._pool.find(name) is None]:
            del self.digests[name]

    def _read(self, state: _Read, name: bytes) -> bool:
        """Add the next layers of a block to ``state``. Return True behind the last one, or if it was evicted."""
        if state.name != name or state.layer >= len(self._layers):
            state.name, state.layer, state.total = name, 0, 0
        block = self._pool.find(name)
        if block is None:
            state.layer = len(self._layers)
            return True
        for layer in self._layers[state.layer : state.layer + self._at_once]:
            state.total = (state.total * 5 + int(np.dot(layer[block], self._keys))) & _MASK
        state.layer += self._at_once
        return state.layer >= len(self._layers)


class _Read:
    """A block that is being read: the next layer, and the digest so far."""

    __slots__ = ("layer", "name", "total")

    def __init__(self) -> None:
        self.name, self.layer, self.total = b"", 0, 0


class AuditedMemory:
    """See :class:`preheat.engine.audit.Memory`.

    ``fixed`` returns the tensors that no step writes, ``adapters`` the adapter slots. ``pool`` names the published
    blocks of ``cache``.
    """

    def __init__(
        self,
        fixed: Callable[[], Iterable[Named]],
        adapters: Callable[[], Iterable[Named]],
        cache: BlockCache,
        pool: BlockPool,
    ) -> None:
        self._fixed, self._adapters, self._cache, self._pool = fixed, adapters, cache, pool
        self.retake()

    def retake(self) -> None:
        """Take all digests again."""
        fixed, slots = [*self._fixed()], [*self._adapters()]
        self._held = [*fixed, *slots]  # oneDNN's copies live as long as their tensors
        self.slices = [*_distinct(fixed)]
        self._own = len(self.slices)
        self.slices += _distinct(slots)
        self.digests = [each.digest() for each in self.slices]
        self._stale = deque[int]()
        self.blocks: _Blocks | None = _Blocks(self._cache, self._pool)
        self._pass: list[bytes] = []

    def suspend(self) -> None:
        """Forget all views of the memory."""
        self._held, self.slices, self.digests, self._pass, self.blocks = [], [], [], [], None
        self._stale.clear()
        self._pool.published = None

    def adapters_changed(self) -> None:
        """Take the digests of adapter slots in the next turns."""
        self._stale = deque(range(self._own, len(self.slices)))

    @property
    def pending(self) -> bool:
        return bool(self._stale or (self.blocks and self.blocks.new))

    def __len__(self) -> int:
        return len(self.slices) + len(self._pass) * (self.blocks.turns if self.blocks else 0)

    def begin(self) -> None:
        """Choose the slices of a pass: all tensors, and the blocks that are published now."""
        assert self.blocks is not None
        self.blocks.forget_evicted()
        self._pass = [*self.blocks.digests]

    def take(self) -> bool:
        """Take the digest of an adapter slot that has changed, or of a new block."""
        if self._stale:
            place = self._stale.popleft()
            self.digests[place] = self.slices[place].digest()
        elif self.blocks and self.blocks.new:
            self.blocks.take()
        else:
            return False
        return True

    def check(self, index: int) -> None:
        """Raise MemoryFault, naming the place, if a slice differs."""
        if index >= len(self.slices):
            assert self.blocks is not None
            self.blocks.check(self._pass[(index - len(self.slices)) // self.blocks.turns])
            return
        each = self.slices[index]
        if each.digest() != self.digests[index]:
            size = len(each.ends) + each.words.nbytes
            raise MemoryFault.at(f"{each.name}, bytes {each.first:,} to {each.first + size:,}")


def _distinct(tensors: Iterable[Named]) -> Iterator[Slice]:
    """Yield the slices of each memory once."""
    seen = set[int]()
    for name, tensor in tensors:
        data = _bytes_of(tensor)
        if len(data) and data.ctypes.data not in seen:
            seen.add(data.ctypes.data)
            yield from slices_of(name, tensor)
