"""Layers that several ranks share on Gaudi, one card and one process each; see :mod:`preheat.ops.matmul`.

Ranks exchange by torch.distributed's process group of HCCL's name, whose gathering is an operation
like any other: in lazy mode it accumulates, and graphs hold it, as ``PT_HPU_ENABLE_LAZY_COLLECTIVES`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from preheat.backends.base import Collective, Linear
from preheat.backends.hpu.bridge import Bridge
from preheat.backends.hpu.linear import HpuLinear, Sizes, ending
from preheat.backends.meeting import Meeting
from preheat.backends.process_group import join_group
from preheat.backends.shards import LeafLinear, Leaves, TiledLinear, all_ranks
from preheat.errors import SettingsError
from preheat.ops.activation import silu_and_mul
from preheat.ops.kinds import Activation
from preheat.ops.matmul import tree_sum
from preheat.ops.moe import combine, route
from preheat.ops.quantization import QuantizedWeight
from preheat.ops.values import Routing


class HpuSharing:
    """See :class:`preheat.backends.base.Sharing`. ``sizes`` are there once the backend is prepared."""

    def __init__(self, sizes: Callable[[], Sizes]) -> None:
        self._sizes = sizes

    def join(self, meeting: Meeting, check: Callable[[], None]) -> Collective:
        return Group(self._sizes().bridge, meeting, check)

    def row_linear(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        tiles: Sequence[int],
        *,
        activation: Activation | None = None,
        clip: float | None = None,
    ) -> Linear:
        assert isinstance(weight, Tensor)
        return FinishedTiles(self._make, weight, bias, tiles).then(ending(activation, clip))

    def leaf_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, leaves: int, collective: Collective
    ) -> LeafLinear:
        assert isinstance(weight, Tensor)
        return LeafLinear(Leaves(self._make, weight, leaves), bias, collective)

    def leaf_experts(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        routing: Routing,
        leaves: int,
        collective: Collective,
    ) -> LeafExperts:
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        tiles = [down.shape[2] // leaves] * (2 * leaves)
        first = [TiledLinear(self._make, weight, None, tiles) for weight in gate_up]
        return LeafExperts(first, [Leaves(self._make, weight, leaves) for weight in down], routing, collective)

    def _make(self, weight: Tensor, bias: Tensor | None) -> HpuLinear:
        return HpuLinear(weight, bias, self._sizes())


class Group:
    """A rank, see :func:`preheat.backends.process_group.join_group`. Raises SettingsError also if
    collectives are kept out of lazy graphs.
    """

    def __init__(self, bridge: Bridge, meeting: Meeting, check: Callable[[], None]) -> None:
        self.rank, self.world = meeting.rank, meeting.world
        if self.world == 1:
            return
        if not bridge.collects:
            raise SettingsError(
                "lazy_collectives (PT_HPU_ENABLE_LAZY_COLLECTIVES) is false, and lazy graphs of several ranks hold "
                "their collectives: leave it out, set it to true, or set PT_HPU_LAZY_MODE=0",
                param="lazy_collectives",
            )
        join_group(bridge.process_group, meeting, check)

    def gather(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x.unsqueeze(0)
        found = x.new_empty(self.world, *x.shape)
        dist.all_gather(list(found.unbind()), x.contiguous())
        return found

    def abort(self) -> None:
        """What waits on a card ends with the process."""


class FinishedTiles(TiledLinear):
    """Tiles, and what follows their products."""

    _end: Callable[[Tensor], Tensor] | None = None

    def then(self, end: Callable[[Tensor], Tensor] | None) -> FinishedTiles:
        self._end = end
        return self

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = super().__call__(x)
        return y if self._end is None else self._end(y)


class LeafExperts:
    """The experts of which each rank has some inner numbers: of each ``gate_up`` [2 * inner, hidden], and the leaves of
    ``down`` [hidden, inner]. Every expert sees every token, as where there is one rank.
    """

    def __init__(
        self, gate_up: list[TiledLinear], down: list[Leaves], routing: Routing, collective: Collective
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._routing, self._collective = routing, collective
        self.parts = [self._gate_up[0].parts[0], self._down[0].parts[0]]  # one of each shape

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], the same on all ranks."""
        chosen, weights = route(logits, self._routing)
        nothing = x.new_zeros(*chosen.shape, x.shape[1], dtype=torch.float32)
        leaves = [nothing] * len(self._down[0].parts)
        for number, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            mine = (chosen == number).unsqueeze(-1)
            parts = down(silu_and_mul(gate_up(x)))
            leaves = [torch.where(mine, part.unsqueeze(1), rows) for part, rows in zip(parts, leaves, strict=True)]
        partial = tree_sum([combine(rows, weights) for rows in leaves])
        return all_ranks(partial, self._collective).to(x.dtype)
