"""Ranks that are slices of one layer, called one after the other, again after each exchange with its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from preheat.backends.cuda.collective import RankSums


class Heard(RankSums):
    """A rank that hears the tensors of all ranks in the first exchanges, and itself in the next one.

    ``theirs`` are the tensors of the first exchanges.
    """

    def __init__(self, rank: int, world: int, theirs: Sequence[list[Tensor]]) -> None:
        self.rank, self.world, self.said, self._theirs = rank, world, list[Tensor](), theirs

    def gather(self, x: Tensor) -> Tensor:
        known = self._theirs[len(self.said) :]
        self.said.append(x.clone())
        return torch.stack(known[0] if known else [x] * self.world)


def on_ranks(
    world: int, layer: Callable[[RankSums], Tensor], exchanges: int = 1, kind: type[Heard] = Heard
) -> list[Tensor]:
    """Return the result of ``layer`` on each rank; it has at most ``exchanges`` exchanges."""
    if world == 1:
        return [layer(RankSums())]
    theirs = list[list[Tensor]]()
    while True:
        ranks = [kind(rank, world, theirs) for rank in range(world)]
        found = [layer(rank) for rank in ranks]
        if len(ranks[0].said) == len(theirs):
            return found
        assert len(ranks[0].said) <= exchanges, "more exchanges than a layer has"
        theirs.append([rank.said[len(theirs)] for rank in ranks])
