"""Routed experts on CUDA, see :mod:`preheat.ops.moe`: route, arrange, two linear layers of all experts, combine.
In steps with adapters these add to what each layer gives, and the activation is a launch of its own between them: every
row goes through the same kernels, whether it has an adapter or not.

Every expert's rows go through the contract of linear layers (:mod:`preheat.backends.cuda.linear`), so that a token has
the same bits alone, where each slot is a block of its own and nothing is arranged, and among thousands. The host never
waits for the choice of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from preheat.backends.cuda.activation import silu_and_mul
from preheat.backends.cuda.linear_hopper import wide
from preheat.backends.cuda.matmul.gemm import experts_product
from preheat.backends.cuda.matmul.weights import DeviceWeight, dequantized_experts, quantized_input, tensors_of
from preheat.backends.cuda.moe_route import Arrangement, arrange, combine, spread
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.quantize import silu_and_quantize
from preheat.backends.cuda.tuning import Expanded, ExpertsConfig, ExpertsShape, KernelConfigs, Tile, Wide
from preheat.ops.quantization import QuantizedRows, plain_rows
from preheat.ops.values import Routing

Weights = Tensor | DeviceWeight
Rows = Tensor | QuantizedRows
Adding = Callable[[Tensor, Tensor, Arrangement, bool], Tensor]
"""What adds to a layer's outputs, in arranged rows, given its plain inputs; whether it is the first, of tokens."""


def experts_forward(
    config: ExpertsConfig, x: Rows, logits: Tensor, gate_up: Weights, down: Weights, routing: Routing, counts: Tensor,
    adding: Adding | None = None,
) -> Tensor:  # fmt: skip
    """``x`` [tokens, hidden] through the experts by the kernels of ``config``; ``counts`` as for :func:`arrange`.
    ``adding``: to what both layers give, before the activation and before rows are weighted.
    """
    arrangement = arrange(logits, routing, config.block, counts)
    if adding is None:
        inner = experts_layer(config.gate_up, x, gate_up, arrangement, gated=True)
        return combine(experts_layer(config.down, inner, down, arrangement, gated=False), arrangement)
    y = experts_layer(config.gate_up, x, gate_up, arrangement, gated=False, gathered=True)
    rows = activated(adding(y, plain_rows(x), arrangement, True), down)
    z = experts_layer(config.down, rows, down, arrangement, gated=False)
    return combine(adding(z, plain_rows(rows), arrangement, False), arrangement)


def activated(gate_up: Tensor, down: Weights) -> Rows:
    """silu(gate) * up of ``gate_up`` [rows, 2 * inner], as the layer ``down`` reads it, and plain."""
    how = quantized_input(down)
    return silu_and_mul(gate_up) if how is None else silu_and_quantize(gate_up, how.kind, how.static)


def experts_layer(
    choice: Tile | Wide | Expanded, x: Rows, weight: Weights, arrangement: Arrangement, *, gated: bool,
    gathered: bool | None = None,
) -> Tensor:  # fmt: skip
    """One of both layers by the kernel ``choice``, see :func:`preheat.backends.cuda.matmul.gemm.experts_product`."""
    gathered = gated if gathered is None else gathered
    if isinstance(choice, Tile):
        return experts_product(choice, x, weight, arrangement, gated=gated, gathered=gathered)
    assert isinstance(x, Tensor)
    if isinstance(choice, Expanded):
        assert isinstance(weight, DeviceWeight)
        plain = dequantized_experts(weight)
        return experts_layer(choice.choice, x, plain, arrangement, gated=gated, gathered=gathered)  # type: ignore[arg-type]
    assert isinstance(weight, Tensor)
    rows = spread(x, arrangement) if gathered else x
    y = x.new_empty(arrangement.rows, weight.shape[1] // 2 if gated else weight.shape[1])
    wide(choice, rows, weight, None, gated, y, arrangement.experts, arrangement.starts)
    return y


class CudaExperts:
    """The experts of ``gate_up`` [experts, 2 * inner, hidden] and ``down`` [experts, hidden, inner], plain or
    quantized, used as they lie in memory. ``configs`` say which kernels serve a number of tokens.
    """

    slots = None

    def __init__(self, gate_up: Weights, down: Weights, routing: Routing, configs: KernelConfigs) -> None:
        self._gate_up, self._down, self._routing, self.configs = gate_up, down, routing, configs
        num_experts, hidden, inner = down.shape
        scheme, codes = (down.scheme, down.codes) if isinstance(down, DeviceWeight) else (None, down)
        self.shape = ExpertsShape(num_experts, hidden, inner, routing.top_k, down.dtype, scheme)
        self._counts = torch.zeros(num_experts, dtype=torch.int32, device=codes.device)

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
        """``x`` [tokens, hidden] and ``logits`` [tokens, experts], contiguous -> a new tensor [tokens, hidden]."""
        return self.by(self.configs.experts(self.shape, len(x)), x, logits)

    def local(self, config: ExpertsConfig, x: Rows, logits: Tensor) -> Tensor:
        """What this rank computes by itself: all of it."""
        return self.by(config, x, logits)

    def by(self, config: ExpertsConfig, x: Rows, logits: Tensor, adding: Adding | None = None) -> Tensor:
        """The same by the kernels of ``config``, and with what is ``adding`` to both layers."""
        weights = self._gate_up, self._down
        try:
            return experts_forward(config, x, logits, *weights, self._routing, self._counts, adding)
        except BaseException:
            self._counts.zero_()  # memory may have run out between its use and its end
            raise
