"""Ranks that are slices of one layer. They run in turns: each one runs until an exchange, and then the next one.

On a GPU all ranks launch on the stream of the thread that asks for them: a new thread has the default stream, which
does not wait for tensors that are written on another one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Condition

import torch
from torch import Tensor

from preheat.backends.cuda.ranks.collective import RankSums


class Turns:
    """The tensors that ranks have said in their exchanges, and the rank whose turn it is."""

    def __init__(self, world: int) -> None:
        self.said = [list[Tensor]() for _ in range(world)]
        self.errors: list[BaseException] = []
        self._running, self._turn, self._passed = list(range(world)), 0, Condition()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def run(self, rank: int, layer: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``layer`` on ``rank``."""
        try:
            self._wait(rank)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                return layer()
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self._running.remove(rank)
            self._pass(rank)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in the next exchange of ``rank``, after the turns of the others."""
        number = len(self.said[rank])
        self.said[rank].append(x.clone())
        self._pass(rank)
        self._wait(rank)
        assert all(len(each) > number for each in self.said), "a rank has ended before an exchange"
        return [each[number] for each in self.said]

    def _wait(self, rank: int) -> None:
        with self._passed:
            self._passed.wait_for(lambda: self._turn == rank)

    def _pass(self, rank: int) -> None:
        with self._passed:
            later = [each for each in self._running if each > rank]
            self._turn = (later or self._running or [0])[0]
            self._passed.notify_all()


class Heard(RankSums):
    """A rank that hears the tensors of all ranks."""

    def __init__(self, rank: int, world: int, turns: Turns) -> None:
        self.rank, self.world, self._turns = rank, world, turns

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._turns.exchange(self.rank, x))


def on_ranks(
    world: int, layer: Callable[[RankSums], Tensor], exchanges: int = 1, kind: type[Heard] = Heard
) -> list[Tensor]:
    """Return the result of ``layer`` on each rank; it has at most ``exchanges`` exchanges."""
    if world == 1:
        return [layer(RankSums())]
    turns = Turns(world)
    with ThreadPoolExecutor(world) as pool:
        ran = [pool.submit(turns.run, rank, lambda rank=rank: layer(kind(rank, world, turns))) for rank in range(world)]
    if turns.errors:
        raise turns.errors[0]
    assert len(turns.said[0]) <= exchanges, "more exchanges than a layer has"
    return [each.result() for each in ran]
