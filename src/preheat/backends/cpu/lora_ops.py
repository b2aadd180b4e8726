"""The operations of adapters on a CPU, see :mod:`preheat.backends.cpu.lora`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from preheat.backends.base import Collective, Experts, ExpertsSize, Linear
from preheat.backends.cpu.lora import (
    ALL_TILES,
    AdaptedEmbedding,
    AdaptedLeafLinear,
    AdaptedLinear,
    CpuAdapterRows,
    LinearFactors,
    Share,
    tiles_of,
)
from preheat.backends.cpu.lora_experts import AdaptedExperts, AdaptedLeafExperts
from preheat.backends.cpu.moe import CpuExperts
from preheat.backends.cpu.quantized import Fp8Experts
from preheat.backends.cpu.sharing import LeafExperts
from preheat.backends.shards import LeafLinear
from preheat.ops.kinds import Activation


class CpuAdapters:
    """See :class:`preheat.backends.base.AdapterOps`."""

    def rows(self, tokens: int, places: int) -> CpuAdapterRows:
        return CpuAdapterRows()

    def linear(
        self,
        linear: Linear,
        inputs: int,
        outputs: Sequence[int],
        rows: CpuAdapterRows,
        *,
        places: int,
        max_rank: int,
        dtype: torch.dtype,
        activation: Activation | None,
        clip: float | None,
        tiles: Sequence[int] = (),
        among: Collective | None = None,
    ) -> AdaptedLinear | AdaptedLeafLinear:
        if isinstance(linear, LeafLinear):
            (size,) = outputs
            return AdaptedLeafLinear(linear, LinearFactors(inputs, size, places, max_rank, leaves=linear.leaves), rows)
        cuts = tiles_of(outputs, tiles)
        share = Share(among.rank, among.world) if among else ALL_TILES
        parts = [
            LinearFactors(inputs, size, places, max_rank, tiles=cut, share=share)
            for size, cut in zip(outputs, cuts, strict=True)
        ]
        return AdaptedLinear(linear, parts, rows, activation, clip, among=among)

    def embedding(
        self, table: Tensor, rows: CpuAdapterRows, *, places: int, max_rank: int, dtype: torch.dtype
    ) -> AdaptedEmbedding:
        return AdaptedEmbedding(table, rows, places, max_rank)

    def experts(
        self, experts: Experts, size: ExpertsSize, rows: CpuAdapterRows, *, places: int, max_rank: int,
        dtype: torch.dtype,
    ) -> AdaptedExperts | AdaptedLeafExperts | None:  # fmt: skip
        if isinstance(experts, LeafExperts):
            return AdaptedLeafExperts(experts, size, rows, places, max_rank)
        if not isinstance(experts, CpuExperts | Fp8Experts):
            return None
        return AdaptedExperts(experts, size, rows, places, max_rank)
