"""The static buffers of a step.

Its integers lie where programs look for them. A step is written into pinned host memory and copied in one piece. There
are two host copies: while the device may still read one step's, the next is written into the other.
:meth:`StepBuffers.turn` hands out a copy only once the device has finished all work launched for the step that used the
copy last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from preheat.backends.base.attention import Attention, StepInputs
from preheat.backends.base.backend import Backend
from preheat.backends.base.device import HOST_COPIES
from preheat.limits import Limits
from preheat.plan.buckets import Bucket

ROUND = 1024
"""Unit in words of the sizes of copies to the device.

So few sizes occur, and their views are kept.
"""
MAX_LISTS = 4
"""Lists of attention's work, at most."""


@dataclass(frozen=True)
class Layout:
    """Layout of the input of a program, in words of 32 bits.

    The program has ``tokens`` tokens. First come the length of each list and the ``sampled`` tokens, at one place for
    all programs. The id, slot and position of each token follow, and its places where tokens have some. Then come the
    lists of attention's work, of at most ``lists`` entries. Lists come last, so that a step copies only the entries
    that it has.
    """

    sampled: int  # at most
    tokens: int
    lists: tuple[int, ...]
    places: int = 0

    @property
    def tokens_at(self) -> int:
        """First word of ids, slots and positions."""
        return MAX_LISTS + self.sampled

    @cached_property
    def lists_at(self) -> tuple[int, ...]:
        """First word of each list, and the end of the last one."""
        at = self.tokens_at + (3 + self.places) * self.tokens
        return tuple(at + 2 * sum(self.lists[:index]) for index in range(len(self.lists) + 1))

    @property
    def words(self) -> int:
        return self.lists_at[-1]

    def pieces(self, used: Sequence[int]) -> list[slice]:
        """Return the parts that hold a step.

        It has ``used`` entries in its lists. The first part holds everything up to the end of the first list.
        """
        first = self.lists_at[0] + 2 * used[0] if used else self.words
        found = [slice(0, first)]
        for at, count in zip(self.lists_at[1:], used[1:], strict=False):
            if at - found[-1].stop < ROUND:  # one copy costs more than the gap
                found[-1] = slice(found[-1].start, at + 2 * count)
            elif count:
                found.append(slice(at, at + 2 * count))
        return found


class StepBuffers:
    """The buffers for steps within ``limits``; ``attention`` cuts their work. A token has ``places``, or none."""

    def __init__(self, limits: Limits, attention: Attention, backend: Backend, places: int = 0) -> None:
        self.limits, self.attention, self.places = limits, attention, places
        self._min_tokens = backend.facts.min_tokens
        self.layout = cache(self._layout)
        self.inputs = cache(self._inputs)
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        words = max(self.layout(bucket).words for bucket in _largest(limits, tokens))
        self._device = torch.zeros(words, dtype=torch.int32, device=backend.device)
        self._host = [backend.host_copy(self._device) for _ in range(HOST_COPIES)]
        self._arrays = [host.numpy() for host in self._host]
        self._words = self._device.numpy() if backend.facts.on_host else None  # a tensor's copy takes longer
        self._views = cache(self._view)
        self.first_sampled = cache(lambda size: self.sampled[:size])
        self._turn = 0
        self._launched = [backend.event() for _ in range(HOST_COPIES)]

    @property
    def sampled(self) -> Tensor:
        """int32 [sampled]: the tokens with wanted logits, at the start."""
        return self._device[MAX_LISTS : MAX_LISTS + self.limits.max_sampled]

    @property
    def pad_slot(self) -> int:
        """The slot with only the pad block in its block table."""
        return self.limits.max_num_seqs

    def _rows(self, bucket: Bucket) -> int:
        return min(bucket.rows, self.limits.max_num_seqs)

    def _layout(self, bucket: Bucket) -> Layout:
        tokens = max(bucket.tokens, self._min_tokens)
        lists = self.attention.list_sizes(tokens, self._rows(bucket), width=bucket.width)
        if len(lists) > MAX_LISTS:
            raise ValueError(f"at most {MAX_LISTS - 1} sliding windows in one model, {len(lists) - 1} were given")
        return Layout(self.limits.max_sampled, tokens, lists, self.places)

    def _inputs(self, bucket: Bucket) -> StepInputs:
        """Return the input of the programs of ``bucket``, on the device."""
        layout, words = self.layout(bucket), self._device
        own = words[layout.tokens_at : layout.lists_at[0]].view(-1, layout.tokens)
        return StepInputs(
            tokens=own[0],
            slots=own[1],
            positions=own[2],
            lists=tuple(words[begin:end].view(-1, 2) for begin, end in pairwise(layout.lists_at)),
            counts=words[:MAX_LISTS],
            rows=self._rows(bucket),
            width=bucket.width,
            longest=bucket.longest,
            blocks=bucket.blocks,
            places=own[3:] if self.places else None,
        )

    def clear(self) -> None:
        """Make the device's input a step of padding alone, for every program."""
        self._device.zero_()
        self.attention.clear()

    def turn(self) -> tuple[int, np.ndarray]:
        """Return number and words (int32) of the next host copy for writing."""
        turn = (self._turn + 1) % HOST_COPIES
        return turn, self.take(turn)

    def take(self, turn: int) -> np.ndarray:
        """Return the words of host copy ``turn``, int32, for writing.

        Wait for the device first: the step that used the copy last has been read by then. This wait guards all data
        that the host keeps in copies by turn (sampling settings, masks, block tables, images). A step's work is
        launched between one call and the next.
        """
        self._launched[self._turn].record()
        self._launched[turn].wait()
        self._turn = turn
        return self._arrays[turn]

    def words(self, turn: int) -> np.ndarray:
        """Return the words of host copy ``turn``, int32, to be read."""
        return self._arrays[turn]

    def send(self, turn: int, pieces: Sequence[slice]) -> None:
        """Copy ``pieces`` of the latest host copy to the device.

        Return before the copies are done. The host copy must be the one taken last.
        """
        assert turn == self._turn, "a step was packed before the one ahead of it was launched: its copy is not guarded"
        for piece in pieces:
            if self._words is not None:
                self._words[piece] = self._arrays[turn][piece]
                continue
            device, host = self._views(turn, piece.start, -(-piece.stop // ROUND) * ROUND)
            device.copy_(host, non_blocking=True)

    def _view(self, turn: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return views of the words on device and host copy."""
        return self._device[start:stop], self._host[turn][start:stop]


def _largest(limits: Limits, tokens: int) -> Iterator[Bucket]:
    """Yield buckets of up to ``tokens`` tokens.

    One of them has the most words.
    """
    yield Bucket.mixed(tokens, min(limits.max_num_seqs, tokens))
    for width in range(2, 2 + limits.num_speculative_tokens):
        yield Bucket.verify(min(limits.max_num_seqs, tokens // width), width)
