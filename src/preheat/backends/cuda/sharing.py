"""Layers that several ranks share on GPUs, one process each; see :mod:`preheat.ops.matmul`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from preheat.backends.base import Collective
from preheat.backends.cuda.collective import Nccl, RankSums
from preheat.backends.cuda.linear import CudaLinear
from preheat.backends.cuda.linear_leaves import CudaLeafLinear, LeafTiles
from preheat.backends.cuda.linear_quantized import DeviceWeight
from preheat.backends.cuda.moe_leaves import CudaLeafExperts, QuantizedLeafExperts
from preheat.backends.meeting import Meeting
from preheat.ops.kinds import Activation
from preheat.ops.quantization import QuantizedWeight
from preheat.ops.values import Routing

if TYPE_CHECKING:
    from preheat.backends.cuda.backend import CudaBackend


class CudaSharing:
    """See :class:`preheat.backends.base.Sharing`; for a rank on the GPU of ``backend``."""

    def __init__(self, backend: CudaBackend, tiles: LeafTiles) -> None:
        self._backend, self._tiles = backend, tiles

    def join(self, meeting: Meeting, check: Callable[[], None]) -> RankSums:
        return RankSums() if meeting.world == 1 else Nccl(self._backend.device, meeting, check)

    def row_linear(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        tiles: Sequence[int],
        *,
        activation: Activation | None = None,
        clip: float | None = None,
    ) -> CudaLinear:
        """An output's bits depend on its own row of ``weight`` alone, so ``tiles`` are not needed."""
        return self._backend.linear(weight, bias, activation=activation, clip=clip)

    def leaf_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, leaves: int, collective: Collective
    ) -> CudaLeafLinear:
        mine = weight if isinstance(weight, Tensor) else DeviceWeight.of(weight, leaves=leaves)
        return CudaLeafLinear(mine, bias, leaves, cast(RankSums, collective), self._tiles)

    def leaf_experts(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        routing: Routing,
        leaves: int,
        collective: Collective,
    ) -> CudaLeafExperts | QuantizedLeafExperts:
        ranks, configs = cast(RankSums, collective), self._backend.experts_configs
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return CudaLeafExperts(gate_up, down, routing, leaves, ranks, configs)
        assert isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight)
        return QuantizedLeafExperts(
            DeviceWeight.of(gate_up), DeviceWeight.of(down, leaves=leaves), routing, ranks, configs
        )
