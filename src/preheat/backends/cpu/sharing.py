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
from preheat.backends.shards import LeafLinear, Leaves, TiledLinear, all_ranks
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
        return finished(TiledLinear(OneDnnLinear, weight, bias, tiles), activation, clip)

    def leaf_linear(self, weight: Tensor, bias: Tensor | None, leaves: int, collective: Collective) -> LeafLinear:
        return LeafLinear(OneDnnLinear, weight, bias, leaves, collective)

    def leaf_experts(
        self, gate_up: Tensor, down: Tensor, routing: Routing, leaves: int, collective: Collective
    ) -> LeafExperts:
        return LeafExperts(gate_up, down, routing, leaves, collective)


class LeafExperts:
    """The experts of which each rank has some inner numbers: ``gate_up`` [experts, 2 * inner, hidden] and ``down``
    [experts, hidden, inner], these in ``leaves``.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, routing: Routing, leaves: int, collective: Collective) -> None:
        self._routing, self._collective = routing, collective
        tile = down.shape[2] // leaves
        tiles = [tile] * (2 * leaves)
        self._gate_up = [TiledLinear(OneDnnLinear, weight, None, tiles) for weight in gate_up]
        self._down = [Leaves(OneDnnLinear, weight, leaves) for weight in down]
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
