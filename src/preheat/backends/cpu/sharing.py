"""Layers that several ranks share on a CPU, one process each; see :mod:`preheat.ops.matmul`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from preheat.backends.base import Collective, Linear
from preheat.backends.cpu.collective import SharedMemory, Sockets
from preheat.backends.cpu.linear import OneDnnLinear, finished, proven_size
from preheat.backends.cpu.moe import SIZES, padded
from preheat.backends.cpu.quantized import Fp8Leaves, Fp8Linear
from preheat.backends.meeting import Meeting, OneNode
from preheat.backends.shards import LeafLinear, Leaves, Products, TiledLinear, all_ranks
from preheat.ops.activation import silu_and_mul
from preheat.ops.kinds import Activation
from preheat.ops.matmul import tree_sum
from preheat.ops.moe import route, routed_leaves
from preheat.ops.quantization import QuantizedWeight, plain
from preheat.ops.values import Routing


class CpuSharing:
    """See :class:`preheat.backends.base.Sharing`."""

    def join(self, meeting: Meeting, check: Callable[[], None]) -> Collective:
        return SharedMemory(meeting, check) if isinstance(meeting, OneNode) else Sockets(meeting, check)

    def row_linear(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        tiles: Sequence[int],
        *,
        activation: Activation | None = None,
        clip: float | None = None,
    ) -> Linear:
        return finished(_rows(weight, bias, tiles), activation, clip)

    def leaf_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, leaves: int, collective: Collective
    ) -> LeafLinear:
        return LeafLinear(_leaves(weight, leaves, collective), bias, collective)

    def leaf_experts(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        routing: Routing,
        leaves: int,
        collective: Collective,
    ) -> LeafExperts:
        return LeafExperts(gate_up, down, routing, leaves, collective)


def _rows(weight: Tensor | QuantizedWeight, bias: Tensor | None, tiles: Sequence[int]) -> Linear:
    """The layer of some rows. Exact sums need no tiles."""
    if isinstance(weight, QuantizedWeight) and weight.scheme.activations is not None:
        return Fp8Linear(weight, bias)
    return TiledLinear(OneDnnLinear, plain(weight), bias, tiles)


def _leaves(weight: Tensor | QuantizedWeight, leaves: int, collective: Collective) -> Products:
    if isinstance(weight, QuantizedWeight) and weight.scheme.activations is not None:
        return Fp8Leaves(weight, leaves, collective)
    return Leaves(OneDnnLinear, plain(weight), leaves)


class LeafExperts:
    """The experts of which each rank has some inner numbers: ``gate_up`` [experts, 2 * inner, hidden] and ``down``
    [experts, hidden, inner], these in ``leaves``.
    """

    def __init__(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        routing: Routing,
        leaves: int,
        collective: Collective,
    ) -> None:
        self.routing, self.leaves, self.collective = routing, leaves, collective
        tile = down.shape[2] // leaves
        tiles = [tile] * (2 * leaves)
        self._gate_up = [_rows(weight, None, tiles) for weight in _each(gate_up)]
        self._down = [_leaves(weight, leaves, collective) for weight in _each(down)]
        outputs, inputs = down.shape[1], gate_up.shape[2]
        for size in SIZES:
            proven_size(size, tile, inputs, gate_up.dtype, torch.get_num_threads())
            proven_size(size, outputs, tile, torch.float32, torch.get_num_threads())

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], the same on all ranks."""
        chosen, weights = route(logits, self.routing)

        def expert(number: int, slots: Tensor) -> list[Tensor]:
            return self.down(number, silu_and_mul(self.gate_up(number, x[slots // chosen.shape[1]])))

        partial = tree_sum(routed_leaves(x, chosen, weights, len(self._down), expert))
        return all_ranks(partial, self.collective).to(x.dtype)

    def gate_up(self, number: int, rows: Tensor) -> Tensor:
        """What expert ``number`` gives for ``rows`` [rows, hidden] before its activation."""
        return torch.cat([self._gate_up[number](part) for part in padded(rows)])[: len(rows)]

    def down(self, number: int, rows: Tensor) -> list[Tensor]:
        """The leaves of its last product, fp32 [rows, hidden] each, for ``rows`` [rows, inner numbers]."""
        parts = zip(*map(self._down[number], padded(rows)), strict=True)
        return [torch.cat(leaf)[: len(rows)] for leaf in parts]


def _each(weight: Tensor | QuantizedWeight) -> Iterator[Tensor | QuantizedWeight]:
    """The matrix of each expert."""
    return (weight[at] if isinstance(weight, Tensor) else weight.part(at) for at in range(weight.shape[0]))
