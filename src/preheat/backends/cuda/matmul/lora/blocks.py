"""The adapters of a step's rows, as the kernels of adapters on CUDA read them.

The rows of each adapter are cut into blocks, filled up with none. Launches of few rows have blocks of ``BLOCK`` rows,
launches of many rows longer ones. A step's rows are described in both ways, since the program of the step, not its
rows, decides between them. A layer's kernel for many rows has tiles of rows in the step's order; it finds a list of the
adapters of such rows.
"""

from __future__ import annotations

import numpy as np
import torch

from preheat.backends.base.adapters import AdapterStep
from preheat.backends.base.device import HOST_COPIES

BLOCK = 16
"""Rows of a block, all of one adapter: as many as the matrix unit multiplies at once."""

LONG_BLOCK, MANY_ROWS = 32, 512
"""Rows of a long block, and the least rows of a launch with long blocks: a program then reads an adapter for more rows.
Changes no bits: each number is a sum of its own, independent of the other rows of the product."""

STRETCH = 128
"""Rows with one list of their adapters: as many as a tile of a layer's kernel may have."""

MOST_PARTS = 3
"""Most parts of a layer: queries, keys and values."""

TABLE_PARTS = 4
"""Parts that a row of a layer's table has room for: each begins at a multiple of 16 bytes."""

TABLE_ROWS = 3
"""Rows of a table for each adapter slot: the tiles in use, the scales, and the tiles on this rank."""


def most_blocks(rows: int, adapter_slots: int, size: int) -> int:
    """Return the most blocks of ``size`` for ``rows`` rows.

    All blocks of an adapter but one are full.
    """
    return min(rows, rows // size + adapter_slots)


class Blocks:
    """The blocks of a step's rows on the device, for at most ``tokens`` rows and ``adapter_slots`` adapters.

    A block has ``size`` rows. ``adapter_slots`` int32 [blocks] has the adapter slot of each block, ``members`` int32
    [blocks * size] its rows, ``slots`` int32 [tokens] the index of each row in ``members``; -1 stands for none. A
    launch with fewer rows has the first blocks.

    With long blocks there are lists by rows, too: ``whose`` int32 [tokens] has the adapter slot of each row, or -1. The
    adapter slots of each stretch of ``STRETCH`` rows are listed in ``present``, from ``starts[stretch]`` to
    ``starts[stretch + 1]``.
    """

    def __init__(self, tokens: int, adapter_slots: int, device: torch.device, size: int) -> None:
        self.size, self._most = size, adapter_slots
        self._count = self.count(tokens)
        stretches, ends = -(-tokens // STRETCH), [self._count, self._count * size, tokens]
        ends += [tokens, stretches + 1, stretches * min(STRETCH, adapter_slots)] if size > BLOCK else [0, 0, 0]
        self._device = torch.full((sum(ends),), -1, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._host = [torch.full_like(self._device, -1, device="cpu", pin_memory=cuda) for _ in range(HOST_COPIES)]
        self._copied = [torch.cuda.Event() for _ in range(HOST_COPIES)] if cuda else []
        self._there = np.empty(0, np.int32)
        self.adapter_slots, self.members, self.slots, self.whose, self.starts, self.present = self._device.split(ends)
        self._by_rows = sum(ends[:3])
        self.starts.zero_()  # a graph may run before anything is described
        self.arrived = torch.zeros(self._count * MOST_PARTS, dtype=torch.int32, device=device)

    def count(self, rows: int) -> int:
        """Return the number of blocks of a launch with ``rows`` rows."""
        return most_blocks(rows, self._most, self.size)

    def send(self, turn: int, adapter_slots: np.ndarray) -> None:
        """Send the blocks of rows with these ``adapter_slots`` to the device, unless it has them.

        ``turn`` is the host copy to use.
        """
        if np.array_equal(adapter_slots, self._there):
            return
        if self._copied:
            self._copied[turn].synchronize()  # long since done, unless one step describes rows twice
        words = self._host[turn].numpy()
        write_blocks(words[: self._by_rows], self._count, adapter_slots, self.size)
        if len(self.whose):
            write_stretches(words[self._by_rows :], len(self.whose), adapter_slots, self._most)
        self._device.copy_(self._host[turn], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
        self._there = adapter_slots.copy()


def write_blocks(words: np.ndarray, count: int, adapter_slots: np.ndarray, size: int) -> None:
    """Write ``words`` int32 [count * (1 + size) + rows], -1 for none.

    First comes the adapter slot of each block, in order. The rows of each block follow, then the index of each row in
    the rows of blocks.
    """
    words.fill(-1)
    rows = np.flatnonzero(adapter_slots >= 0)
    rows = rows[np.argsort(adapter_slots[rows], kind="stable")]
    sizes = np.bincount(adapter_slots[rows])
    blocks = -(-sizes // size)
    words[: blocks.sum()] = np.arange(len(sizes)).repeat(blocks)
    skipped = (blocks.cumsum() - blocks) * size - (sizes.cumsum() - sizes)
    slots = np.arange(len(rows)) + skipped.repeat(sizes)
    words[count + slots] = rows
    words[count * (1 + size) + rows] = slots


def write_stretches(words: np.ndarray, tokens: int, adapter_slots: np.ndarray, most: int) -> None:
    """Write ``words`` int32: adapter slots by rows, then the list of each stretch.

    First comes the adapter slot of each of ``tokens`` rows, -1 for none; then the start of each stretch's list, and the
    end of the last; then the lists. There are ``most`` adapter slots.
    """
    stretches = -(-tokens // STRETCH)
    whose, starts, present = np.split(words, (tokens, tokens + stretches + 1))
    whose[: len(adapter_slots)] = adapter_slots
    whose[len(adapter_slots) :] = -1
    rows = np.flatnonzero(adapter_slots >= 0)
    there = np.zeros((stretches, most), bool)
    there[rows // STRETCH, adapter_slots[rows]] = True
    found = there.nonzero()[1]
    starts[0] = 0
    there.sum(1).cumsum(out=starts[1:])
    present[: len(found)] = found


class CudaAdapterRows:
    """The adapter of each row of a step, see :class:`preheat.backends.base.adapters.AdapterRows`."""

    def __init__(self, tokens: int, adapter_slots: int, device: torch.device) -> None:
        sizes = (BLOCK, LONG_BLOCK) if tokens >= MANY_ROWS else (BLOCK,)
        self._kinds: dict[AdapterStep, list[Blocks]] = {
            kind: [Blocks(tokens, adapter_slots, device, size) for size in sizes] for kind in ("tokens", "sampled")
        }
        self._used: list[Blocks] | None = None

    def describe(self, turn: int, step: AdapterStep, slots: np.ndarray) -> None:
        for blocks in self._kinds[step]:
            blocks.send(turn, slots)

    def use(self, step: AdapterStep | None) -> None:
        self._used = self._kinds[step] if step else None

    @property
    def blocks(self) -> Blocks | None:
        """Blocks of ``BLOCK`` rows; None where no row has an adapter."""
        return None if self._used is None else self._used[0]

    def blocks_for(self, rows: int) -> Blocks | None:
        """Return the blocks that a launch with ``rows`` rows reads; None where no row has an adapter."""
        return None if self._used is None else self._used[-1 if rows >= MANY_ROWS else 0]
