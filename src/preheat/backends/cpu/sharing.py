"""Layers that several ranks share on a CPU, one process each; see :mod:`preheat.ops.leaves`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from preheat.backends.base import Collective, Linear
from preheat.backends.cpu.collective import SharedMemory
from preheat.backends.cpu.linear import OneDnnLinear, finished, proven_size
from preheat.backends.cpu.moe import SIZES, padded
from preheat.ops.activation import silu_and_mul
from preheat.ops.kinds import Activation
from preheat.ops.leaves import tree_sum
from preheat.ops.moe import Routing, route, routed_leaves


class CpuSharing:
    """See :class:`preheat.backends.base.Sharing`."""

    def join(self, folder: Path, rank: int, world: int, check: Callable[[], None]) -> Collective:
        return SharedMemory(folder, rank, world, check)

    def row_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        tiles: Sequence[int],
        *,
        activation: Activation | None = None,
        clip: float | None = None,
    ) -> Linear:
        return finished(TiledLinear(weight, bias, tiles), activation, clip)

    def leaf_linear(self, weight: Tensor, bias: Tensor | None, leaves: int, collective: Collective) -> LeafLinear:
        return LeafLinear(weight, bias, leaves, collective)

    def leaf_experts(
        self, gate_up: Tensor, down: Tensor, routing: Routing, leaves: int, collective: Collective
    ) -> LeafExperts:
        return LeafExperts(gate_up, down, routing, leaves, collective)


class TiledLinear:
    """``weight`` and ``bias`` in ``tiles``, so many rows each, whose products are computed one after the other: oneDNN
    may add in another order where there are more outputs, and ranks have different numbers of tiles.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: Sequence[int]) -> None:
        biases = [None] * len(tiles) if bias is None else torch.split(bias, list(tiles))
        parts = torch.split(weight, list(tiles))
        self._tiles = [OneDnnLinear(part.contiguous(), own) for part, own in zip(parts, biases, strict=True)]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs] -> [rows, outputs], a new tensor of its dtype."""
        return torch.cat([tile(x) for tile in self._tiles], dim=-1)


class LeafLinear:
    """``weight`` [outputs, inputs of this rank] in ``leaves``, see :mod:`preheat.ops.leaves`. oneDNN rounds what it
    returns to the dtype of its inputs, so products are made in fp32, which holds every product of the dtype's numbers.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, leaves: int, collective: Collective) -> None:
        self._leaves = Leaves(weight, leaves)
        self._bias, self._collective = None if bias is None else bias.float(), collective

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank] -> [rows, outputs], a new tensor of its dtype, the same on all ranks."""
        total = all_ranks(tree_sum(self._leaves(x)), self._collective)
        return (total if self._bias is None else total + self._bias).to(x.dtype)


class Leaves:
    """The products of a matrix [outputs, inputs] that is cut into ``leaves`` of its inputs, each fp32."""

    def __init__(self, weight: Tensor, leaves: int) -> None:
        self._size, self._outputs = weight.shape[1] // leaves, len(weight)
        self._parts = [OneDnnLinear(part.float().contiguous()) for part in torch.split(weight, self._size, 1)]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Of ``x`` [rows, inputs]: fp32 [rows, outputs] for each leaf."""
        inputs = torch.split(x.float(), self._size, 1)
        return [part(mine.contiguous()) for part, mine in zip(self._parts, inputs, strict=True)]


def all_ranks(partial: Tensor, collective: Collective) -> Tensor:
    """The sum of all ranks' fp32 ``partial``, in the tree's order."""
    return tree_sum(collective.gather(partial).unbind())


class LeafExperts:
    """The experts of which each rank has some inner numbers: ``gate_up`` [experts, 2 * inner, hidden] and ``down``
    [experts, hidden, inner], these in ``leaves``.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, routing: Routing, leaves: int, collective: Collective) -> None:
        self._routing, self._collective = routing, collective
        tile = down.shape[2] // leaves
        tiles = [tile] * (2 * leaves)
        self._gate_up = [TiledLinear(weight, None, tiles) for weight in gate_up]
        self._down = [Leaves(weight, leaves) for weight in down]
        outputs, inputs = down.shape[1], gate_up.shape[2]
        for size in SIZES:
            proven_size(size, tile, inputs, gate_up.dtype, torch.get_num_threads())
            proven_size(size, outputs, tile, torch.float32, torch.get_num_threads())

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], the same on all ranks."""
        chosen, weights = route(logits, self._routing)
        partial = tree_sum(routed_leaves(x, chosen, weights, len(self._down), self._expert))
        return all_ranks(partial, self._collective).to(x.dtype)

    def _expert(self, number: int, rows: Tensor) -> list[Tensor]:
        """Its leaves, fp32 [rows, hidden] each."""

        def block(rows: Tensor) -> list[Tensor]:
            return self._down[number](silu_and_mul(self._gate_up[number](rows)))

        return [torch.cat(parts)[: len(rows)] for parts in zip(*map(block, padded(rows)), strict=True)]
