"""Routed experts that several ranks share on CUDA: each leaf is a set of smaller experts, see
:mod:`preheat.ops.matmul`.

A leaf has a range of every expert's inner numbers: the rows of gate and up that make them, the columns of down that
take them. It gives the weighted sum over a token's experts in slot order, in fp32.

Of quantized experts a rank's gates and ups are one product, as a row's scale is that of all its inner numbers, and each
leaf is a product of the columns of down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from preheat.backends.cuda.collective import RankSums
from preheat.backends.cuda.matmul.gemm import experts_product, experts_splits
from preheat.backends.cuda.matmul.weights import (
    DeviceWeight,
    codes_of,
    dequantized_experts,
    quantized_input,
    tensors_of,
)
from preheat.backends.cuda.moe import Rows, experts_layer
from preheat.backends.cuda.moe_route import Arrangement, arrange, combine
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.quantize import quantize_parts
from preheat.backends.cuda.tuning import Expanded, ExpertsConfig, ExpertsShape, KernelConfigs, Tile, Wide
from preheat.ops.matmul import tree_sum
from preheat.ops.values import Routing

_TILES = ExpertsConfig(64, Tile(128, 64, 64, 4, 4, True), Tile(128, 64, 64, 4, 3, True))
"""In place of the kernel for many rows, which writes no fp32."""


Inner = Callable[[Tile, Arrangement], Iterator[Tensor]]
"""What gives the activations [arranged rows, inner numbers of a leaf] of each leaf, by a kernel's tile."""


class CudaLeafExperts:
    """The experts of which this rank has some inner numbers: ``gate_up`` [experts, 2 * inner, hidden] and ``down``
    [experts, hidden, inner], these in ``leaves``.
    """

    slots = None

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        routing: Routing,
        leaves: int,
        ranks: RankSums,
        configs: KernelConfigs,
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
        partial = self.local(self.configs.experts(self.shape, len(x)), x, logits)
        if self.ranks.world == 1:
            return partial.to(x.dtype)
        return self.ranks.sum(partial, None, x.dtype)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return tensors_of(*self.gate_up, *self._down)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return self._counts, self._spare

    def local(self, config: ExpertsConfig, x: Tensor, logits: Tensor) -> Tensor:
        """What this rank adds, by the kernels of ``config``: fp32 [tokens, hidden]."""

        def inner(tile: Tile, arrangement: Arrangement) -> Iterator[Tensor]:
            return (experts_product(tile, x, gate_up, arrangement, gated=True) for gate_up in self.gate_up)

        return self.by(config, logits, inner)

    def by(self, config: ExpertsConfig, logits: Tensor, inner: Inner) -> Tensor:
        """The same of what ``inner`` gives."""
        tiles = _TILES if isinstance(config.gate_up, Wide) else config
        assert isinstance(tiles.gate_up, Tile) and isinstance(tiles.down, Tile)
        try:
            arrangement, sums = arrange(logits, self.routing, tiles.block, self._counts), list[Tensor]()
            for rows, down in zip(inner(tiles.gate_up, arrangement), self._down, strict=True):
                given = experts_product(tiles.down, rows, down, arrangement, gated=False, dtype=torch.float32)
                last = len(sums) == self.leaves - 1  # whose end makes zeros of the counts, which others need
                sums.append(combine(given, arrangement if last else arrangement._replace(counts=self._spare)))
        except BaseException:
            self._counts.zero_()  # memory may have run out between its use and its end
            raise
        return tree_sum(sums)


class QuantizedLeafExperts:
    """The same of quantized ``gate_up`` and ``down``, these in their leaves."""

    slots = None

    def __init__(
        self, gate_up: DeviceWeight, down: DeviceWeight, routing: Routing, ranks: RankSums, configs: KernelConfigs
    ) -> None:
        self._gate_up, self._down, self._routing, self._ranks, self.configs = gate_up, down, routing, ranks, configs
        experts, hidden, inner = down.shape
        self.shape = ExpertsShape(experts, hidden, inner, routing.top_k, down.dtype, down.scheme)
        self._counts = torch.zeros(experts, dtype=torch.int32, device=down.codes.device)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return tensors_of(self._gate_up, self._down)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return (self._counts,)

    @property
    def fused_input(self) -> QuantizedInput | None:
        """Of experts with float8 activations: their norm may give them."""
        return quantized_input(self._gate_up)

    def __call__(self, x: Rows, logits: Tensor) -> Tensor:
        """``x`` [tokens, hidden], ``logits`` [tokens, experts] -> [tokens, hidden], the same on all ranks."""
        partial = self._partial(self.configs.experts(self.shape, len(x)), x, logits, self._ranks)
        if self._ranks.world == 1:
            return partial.to(self.shape.dtype)
        return self._ranks.sum(partial, None, self.shape.dtype)

    def local(self, config: ExpertsConfig, x: Rows, logits: Tensor) -> Tensor:
        """What this rank would add if no other had numbers of a row: fp32 [tokens, hidden]."""
        return self._partial(config, x, logits, RankSums())

    def _partial(self, config: ExpertsConfig, x: Rows, logits: Tensor, ranks: RankSums) -> Tensor:
        """What this rank adds, by the kernels of ``config``: fp32 [tokens, hidden]."""
        try:
            arrangement = arrange(logits, self._routing, config.block, self._counts)
            inner = experts_layer(config.gate_up, x, self._gate_up, arrangement, gated=True)
            leaves = self._products(config.down, inner, arrangement, ranks)
            return tree_sum([combine(leaf, arrangement) for leaf in leaves.unbind()])
        except BaseException:
            self._counts.zero_()  # memory may have run out between its use and its end
            raise

    def _products(
        self, choice: Tile | Wide | Expanded, inner: Tensor, arrangement: Arrangement, ranks: RankSums
    ) -> Tensor:
        """Each leaf of ``inner``: fp32 [leaves, arranged rows, hidden]."""
        down = self._down
        if isinstance(choice, Expanded):
            assert isinstance(choice.choice, Tile)
            return _plain_products(choice.choice, inner, dequantized_experts(down), down.splits, arrangement)
        assert isinstance(choice, Tile)
        if down.scheme.activations is None:
            return experts_splits(choice, inner, down, arrangement)
        if down.scheme.activations != "token" or ranks.world == 1:
            return experts_splits(choice, codes_of(inner, down), down, arrangement)
        places = None if arrangement.block == 1 else arrangement.places
        return experts_splits(choice, quantize_parts(inner, ranks, places), down, arrangement)


def _plain_products(tile: Tile, inner: Tensor, down: Tensor, leaves: int, arrangement: Arrangement) -> Tensor:
    parts = zip(inner.chunk(leaves, 1), down.chunk(leaves, 2), strict=True)
    return torch.stack([
        experts_product(tile, x.contiguous(), w.contiguous(), arrangement, gated=False, dtype=torch.float32)
        for x, w in parts
    ])  # fmt: skip
