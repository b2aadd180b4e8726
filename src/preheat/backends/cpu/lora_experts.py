"""Routed experts with places for adapters on a CPU, see :mod:`preheat.ops.matmul`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.base import ExpertsSize
from preheat.backends.cpu.lora import CpuAdapterRows, Factors, Group, LinearFactors, Places, add_parts
from preheat.backends.cpu.moe import CpuExperts, padded
from preheat.backends.cpu.quantized import Fp8Experts
from preheat.backends.cpu.sharing import LeafExperts
from preheat.backends.shards import all_ranks_at_once
from preheat.ops.activation import silu_and_mul
from preheat.ops.matmul import NOTHING, add_delta, tree_sum
from preheat.ops.moe import combine, route, routed_leaves, visits


class AdaptedExperts(Places):
    """``inner``, and what adapters add for each expert that a row visits, see :mod:`preheat.ops.matmul`."""

    def __init__(
        self, inner: CpuExperts | Fp8Experts, size: ExpertsSize, rows: CpuAdapterRows, places: int, max_rank: int
    ) -> None:
        shapes = ((size.hidden, size.inner), (size.hidden, size.inner), (size.inner, size.hidden))
        count = range(size.num_experts)
        super().__init__([LinearFactors(*shape, places, max_rank) for _ in count for shape in shapes], rows)
        self.inner, self._count = inner, size.num_experts

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], a new tensor."""
        if not self._rows.groups:
            return self.inner(x, logits)
        chosen, weights = route(logits, self.inner.routing)
        owners = torch.zeros(len(x), 1, dtype=torch.int64)  # 0: no adapter, as rows that fill up have none
        for place, rows in self._rows.groups:
            owners[rows] = place + 1
        given = x.new_empty(chosen.numel(), x.shape[1])
        for number, mine in visits(chosen, self._count):
            tokens = mine // chosen.shape[1]
            parts = zip(padded(x[tokens]), padded(owners[tokens]), strict=True)
            given[mine] = torch.cat([self._block(number, *part) for part in parts])[: len(mine)]
        return combine(given.view(len(x), chosen.shape[1], -1), weights)

    def _block(self, number: int, x: Tensor, owners: Tensor) -> Tensor:
        """Expert ``number`` of rows whose places, and one more, are ``owners`` [rows, 1]; 0 stands for none."""
        groups = [Group(place, torch.nonzero(owners[:, 0] == place + 1)[:, 0]) for place, _ in self._rows.groups]
        groups = [group for group in groups if len(group.rows)]
        gate, up, down = self._parts[3 * number : 3 * number + 3]
        y = self.inner.gate_up(number, x)
        for place, rows in groups:
            add_parts(y, x, (gate, up), place, rows)
        inner_rows = silu_and_mul(y)
        z = self.inner.down(number, inner_rows)
        for place, rows in groups:
            add_parts(z, inner_rows, (down,), place, rows)
        return z


class _Shrunk(NamedTuple):
    """What the rows in some ``slots`` shrink to on this rank, by what the adapter in ``place`` has for an expert's
    down: fp32 [tiles, rows, TILE].
    """

    factors: Factors
    place: int
    slots: Tensor
    sums: Tensor


class AdaptedLeafExperts(Places):
    """``inner``, whose inner numbers ranks share, and what adapters add. What rows shrink to for down travels with the
    experts' own sums.
    """

    def __init__(self, inner: LeafExperts, size: ExpertsSize, rows: CpuAdapterRows, places: int, max_rank: int) -> None:
        tiles = [size.inner // inner.leaves] * inner.leaves
        parts = list[Factors]()
        for _ in range(size.num_experts):
            parts += [LinearFactors(size.hidden, size.inner, places, max_rank, tiles=tiles) for _ in range(2)]
            parts.append(LinearFactors(size.inner, size.hidden, places, max_rank, leaves=inner.leaves))
        super().__init__(parts, rows)
        self.inner, self._count = inner, size.num_experts

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], the same on all ranks."""
        if not self._rows.groups:
            return self.inner(x, logits)
        chosen, weights = route(logits, self.inner.routing)
        shrunk = list[_Shrunk]()

        def expert(number: int, slots: Tensor) -> list[Tensor]:
            return self._expert(number, x[slots // chosen.shape[1]], slots, shrunk)

        partial = tree_sum(routed_leaves(x, chosen, weights, self._count, expert))
        total, *roots = all_ranks_at_once([partial, *(each.sums for each in shrunk)], self.inner.collective)
        more = torch.full((chosen.numel(), x.shape[1]), NOTHING)
        for each, root in zip(shrunk, roots, strict=True):
            more[each.slots] = each.factors.expand(root, each.place, x.dtype)
        return add_delta(total.to(x.dtype), combine(more.view(len(x), chosen.shape[1], -1), weights))

    def _expert(self, number: int, x: Tensor, slots: Tensor, shrunk: list[_Shrunk]) -> list[Tensor]:
        """The leaves of expert ``number``, fp32 [rows, hidden] each, of the rows ``x`` in ``slots``. What these shrink
        to for down is added to ``shrunk``.
        """
        gate, up, down = self._parts[3 * number : 3 * number + 3]
        groups = self._rows.among(slots // self.inner.routing.top_k)
        y = self.inner.gate_up(number, x)
        for place, mine in groups:
            add_parts(y, x, (gate, up), place, mine)
        inner_rows = silu_and_mul(y)
        for place, mine in groups:
            if down.has(place):
                sums = down.shrink(inner_rows.index_select(0, mine).float(), place)
                shrunk.append(_Shrunk(down, place, slots[mine], sums))
        return self.inner.down(number, inner_rows)
