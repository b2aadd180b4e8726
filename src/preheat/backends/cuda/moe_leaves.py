"""Routed experts that several ranks share on CUDA: each leaf is a set of smaller experts, see
:mod:`preheat.ops.leaves`.

A leaf has a range of every expert's inner numbers: the rows of gate and up that make them, the columns of down that
take them. It gives the weighted sum over a token's experts in slot order, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from preheat.backends.cuda.collective import RankSums
from preheat.backends.cuda.moe import ExpertsConfig, ExpertsConfigs, ExpertsShape
from preheat.backends.cuda.moe_linear import experts_linear
from preheat.backends.cuda.moe_route import Arrangement, arrange, combine
from preheat.backends.cuda.tuning import Tile, Wide
from preheat.ops.leaves import tree_sum
from preheat.ops.moe import Routing

_TILES = ExpertsConfig(64, Tile(128, 64, 64, 4, 4, True), Tile(128, 64, 64, 4, 3, True))
"""In place of the kernel for many rows, which writes no fp32."""


Inner = Callable[[Tile, Arrangement], Iterator[Tensor]]
"""What gives the activations [arranged rows, inner numbers of a leaf] of each leaf, by a kernel's tile."""


class CudaLeafExperts:
    """The experts of which this rank has some inner numbers: ``gate_up`` [experts, 2 * inner, hidden] and ``down``
    [experts, hidden, inner], these in ``leaves``.
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        routing: Routing,
        leaves: int,
        ranks: RankSums,
        configs: ExpertsConfigs,
    ) -> None:
        self.routing, self.ranks, self.configs, self.leaves = routing, ranks, configs, leaves
        experts, hidden, inner = down.shape
        halves = gate_up.view(experts, 2, inner, hidden).chunk(leaves, 2)
        self.gate_up = [half.reshape(experts, 2 * inner // leaves, hidden).contiguous() for half in halves]
        self._down = [part.contiguous() for part in down.chunk(leaves, 2)]
        self.shape = ExpertsShape(experts, hidden, inner // leaves, routing.top_k, down.dtype)
        self._counts = torch.zeros(experts, dtype=torch.int32, device=down.device)
        self._spare = torch.empty_like(self._counts)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], the same on all ranks."""
        partial = self.local(self.configs(self.shape, len(x)), x, logits)
        if self.ranks.world == 1:
            return partial.to(x.dtype)
        return self.ranks.sum(partial, None, x.dtype)

    def local(self, config: ExpertsConfig, x: Tensor, logits: Tensor) -> Tensor:
        """What this rank adds, by the kernels of ``config``: fp32 [tokens, hidden]."""

        def inner(tile: Tile, arrangement: Arrangement) -> Iterator[Tensor]:
            return (experts_linear(tile, x, gate_up, arrangement, gated=True) for gate_up in self.gate_up)

        return self.by(config, logits, inner)

    def by(self, config: ExpertsConfig, logits: Tensor, inner: Inner) -> Tensor:
        """The same of what ``inner`` gives."""
        tiles = _TILES if isinstance(config.gate_up, Wide) else config
        assert isinstance(tiles.gate_up, Tile) and isinstance(tiles.down, Tile)
        try:
            arrangement, sums = arrange(logits, self.routing, tiles.block, self._counts), list[Tensor]()
            for rows, down in zip(inner(tiles.gate_up, arrangement), self._down, strict=True):
                given = experts_linear(tiles.down, rows, down, arrangement, gated=False, dtype=torch.float32)
                last = len(sums) == self.leaves - 1  # whose end makes zeros of the counts, which others need
                sums.append(combine(given, arrangement if last else arrangement._replace(counts=self._spare)))
        except BaseException:
            self._counts.zero_()  # memory may have run out between its use and its end
            raise
        return tree_sum(sums)
