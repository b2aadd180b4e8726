"""The static buffers of a device that replays programs: every step's integers lie where the programs look for them.

A step is written into pinned host memory and copied in one piece. There are two host copies: while the device may
still read one step's, the next is written into the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from preheat.execution.block_table import DeviceTable
from preheat.limits import Limits
from preheat.plan.buckets import Bucket

HOST_COPIES = 2
ROUND = 1024
"""A copy to the device ends at a multiple of so many words: there are few of them, whose tensors are kept."""
MAX_LISTS = 4
"""Lists of work: one of tiles, one of splits for each sliding window that the model has (none is one, too)."""


@dataclass(frozen=True)
class Layout:
    """Where a program of ``tokens`` tokens and ``tiles`` tiles at most finds its input, in words of 32 bits.

    First the length of each list and the ``sampled`` tokens, at one place for all programs; then what each token is,
    the tiles, and the splits of every window one after the other. Splits come last, so that a step only copies those
    that it has.
    """

    sampled: int  # the most
    tokens: int
    tiles: int
    splits: tuple[int, ...]  # the most of each window

    @property
    def tokens_at(self) -> int:
        """Where ids, slots and positions begin."""
        return MAX_LISTS + self.sampled

    @cached_property
    def tiles_at(self) -> int:
        return self.tokens_at + 3 * self.tokens

    @cached_property
    def splits_at(self) -> tuple[int, ...]:
        """Where each window's splits begin, and where the last ones end."""
        at = self.tiles_at + 2 * self.tiles
        return tuple(at + 2 * sum(self.splits[:index]) for index in range(len(self.splits) + 1))

    @property
    def words(self) -> int:
        return self.splits_at[-1]


@dataclass(frozen=True)
class Inputs:
    """One program's input on the device, all int32.

    ``tokens`` [T] are ids, or -1 for the token that the device drew last for the slot. ``slots`` [T] name each token's
    sequence, ``positions`` [T] its place in it; padding has the slot beyond all others. ``tiles`` [n, 2] cut rows of
    several tokens into (first token, tokens); ``splits`` [n, 2], for each window, are (token, split of its context) of
    rows with one token. ``counts`` say how many of the tiles, then of each window's splits, there are. ``rows`` are the
    most that the program has.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    tiles: Tensor
    splits: tuple[Tensor, ...]
    counts: Tensor
    rows: int

    @property
    def num_tiles(self) -> Tensor:
        return self.counts[0:1]

    def num_splits(self, index: int) -> Tensor:
        return self.counts[index + 1 : index + 2]


class StepBuffers:
    """The buffers for steps within ``limits``, whose work is cut into tiles of ``tile`` tokens and splits of ``split``
    keys, for each of the ``windows``.
    """

    def __init__(
        self, limits: Limits, *, tile: int, split: int, windows: Sequence[int | None], device: torch.device
    ) -> None:
        if len(windows) >= MAX_LISTS:
            raise ValueError(f"at most {MAX_LISTS - 1} sliding windows in one model, got {list(windows)}")
        self.limits, self.tile, self.split, self.windows = limits, tile, split, tuple(windows)
        self.max_splits = -(-limits.max_model_len // split)
        self.layout = cache(self._layout)
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        words = self.layout(Bucket.mixed(tokens, min(limits.max_num_seqs, tokens))).words
        pin = device.type == "cuda"
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=pin) for _ in range(HOST_COPIES)]
        self._arrays = [host.numpy() for host in self._host]
        self.table = DeviceTable(limits.max_num_seqs, limits.max_blocks_per_seq, HOST_COPIES, device)
        self._views = cache(self._view)
        self._turn = 0

    @property
    def sampled(self) -> Tensor:
        """int32 [sequences]: the tokens whose logits are wanted, at the start."""
        return self._device[MAX_LISTS : MAX_LISTS + self.limits.max_num_seqs]

    @property
    def pad_slot(self) -> int:
        """Whose row of the table is all pad block."""
        return self.limits.max_num_seqs

    def _layout(self, shape: Bucket) -> Layout:
        """Where programs of ``shape`` look. A decoding step has no tiles."""
        rows = min(shape.rows, self.limits.max_num_seqs)
        tiles = 0 if shape.phase == "decode" else shape.tokens // self.tile + rows
        return Layout(self.limits.max_num_seqs, shape.tokens, tiles, (rows * self.max_splits,) * len(self.windows))

    def inputs(self, shape: Bucket) -> Inputs:
        """A program's input, as it lies on the device."""
        layout, words = self.layout(shape), self._device
        tokens, slots, positions = words[layout.tokens_at : layout.tiles_at].view(3, shape.tokens)
        at = layout.splits_at
        return Inputs(
            tokens,
            slots,
            positions,
            words[layout.tiles_at : at[0]].view(-1, 2),
            tuple(words[begin:end].view(-1, 2) for begin, end in pairwise(at)),
            words[:MAX_LISTS],
            min(shape.rows, self.limits.max_num_seqs),
        )

    def clear(self) -> None:
        """What the device sees now is a step of padding alone, whatever the program."""
        self._device.zero_()
        self.table.clear()

    def turn(self) -> tuple[int, np.ndarray]:
        """The next host copy: its number and its words, int32."""
        self._turn = (self._turn + 1) % HOST_COPIES
        return self._turn, self._arrays[self._turn]

    def send(self, turn: int, pieces: Sequence[slice]) -> None:
        """Copy ``pieces`` of a host copy's words, and its table, to the device; returns before they are there."""
        for piece in pieces:
            device, host = self._views(turn, piece.start, -(-piece.stop // ROUND) * ROUND)
            device.copy_(host, non_blocking=True)
        self.table.send(turn)

    def _view(self, turn: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Words of the device's copy and of a host's."""
        return self._device[start:stop], self._host[turn][start:stop]
