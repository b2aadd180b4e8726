"""Sleeps and updates of weights on all ranks.

Rank 0 tells the others each change, does it itself, and waits for their answers. Ranks read the files of new weights
themselves, each its shard, and have the tensors of a trainer. Tensors that only rank 0 has travel by the ranks' own
exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from preheat.backends.base.collective import Collective, Link
from preheat.errors import PreheatError
from preheat.execution.contents import Contents, NewWeights
from preheat.parallel.ranks import Ranks

PIECE = 1 << 26
"""Most bytes that travel in one exchange."""

Take = Callable[[Iterable[str]], dict[str, Tensor]]
Announced = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, dtype and shape of each tensor to come."""


class SharedContents:
    """The contents of all ``ranks``; ``mine`` are those of rank 0. ``everyone`` is the group of all ranks."""

    def __init__(self, ranks: Ranks, everyone: Collective, device: torch.device, mine: Contents) -> None:
        self._ranks, self._everyone, self._device, self._mine = ranks, everyone, device, mine
        self._asleep = set[str]()

    @property
    def asleep(self) -> Collection[str]:
        """See :attr:`Contents.asleep`: a tag sleeps until all ranks have its memory again."""
        return self._asleep

    def drop(self, tag: str, keep: bool) -> None:
        self._on_all(lambda: self._mine.drop(tag, keep), "drop", tag, keep)
        if tag in self._mine.asleep:
            self._asleep.add(tag)

    def restore(self, tag: str) -> None:
        self._on_all(lambda: self._mine.restore(tag), "restore", tag)
        self._asleep.discard(tag)

    def reset(self) -> None:
        self._on_all(self._mine.reset, "reset")

    def load(self, new: NewWeights) -> None:
        announced = None if new.tensors is None else announced_of(new.tensors)
        self._on_all(lambda: self._load(new), "load", new._replace(tensors=None), announced)

    def swap(self) -> None:
        self._on_all(self._mine.swap, "swap")

    def release(self) -> None:
        self._on_all(self._mine.release, "release")

    def _load(self, new: NewWeights) -> None:
        for tensor in () if new.held else (new.tensors or {}).values():
            sent = tensor.detach().to(self._device).contiguous()
            for piece in _pieces(sent):
                cast(Link, self._everyone).broadcast(piece, 0)
        self._mine.load(new)

    def _on_all(self, own: Callable[[], None], name: str, *args: Any) -> None:
        """Carry out a change on all ranks, and wait for all. Raises the error of one that has any."""
        self._ranks.tell("change", name, *args)
        failed = None
        try:
            own()
        except PreheatError as error:
            failed = error
        except BaseException as error:
            raise self._ranks.death(error) from error
        self._ranks.answers()
        if failed is not None:
            raise failed


class RankContents:
    """Carries out the changes that rank 0 tells a rank with the contents ``mine``.

    ``take`` returns tensors of a trainer, by their names.
    """

    def __init__(self, everyone: Collective, device: torch.device, mine: Contents, take: Take) -> None:
        self._everyone, self._device, self._mine, self._take = everyone, device, mine, take

    def change(self, name: str, *args: Any) -> None:
        """Carry out a change. Raises PreheatError."""
        if name == "load":
            self._load(*args)
        else:
            getattr(self._mine, name)(*args)

    def _load(self, new: NewWeights, announced: Announced | None) -> None:
        if announced is not None and new.held:
            new = new._replace(tensors=self._take([name for name, *_ in announced]))
        elif announced is not None:
            new = new._replace(tensors={name: self._received(dtype, shape) for name, dtype, shape in announced})
        self._mine.load(new)

    def _received(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of rank 0, on the host."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        for piece in _pieces(tensor):
            cast(Link, self._everyone).broadcast(piece, 0)
        return tensor.cpu()


def announced_of(tensors: Mapping[str, Tensor]) -> Announced:
    """Return what the other ranks must know of ``tensors`` before they travel."""
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of ``tensor``, contiguous, in pieces that are parts of it."""
    given = tensor.view(-1).view(torch.uint8)
    return (given[first : first + PIECE] for first in range(0, len(given), PIECE))
