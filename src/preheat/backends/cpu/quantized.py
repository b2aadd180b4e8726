"""Quantized layers on a CPU, see :mod:`preheat.ops.quantization`.

Weights whose activations are not quantized are dequantized when they are loaded, and then are plain ones. With float8
activations a layer is computed to the letter of the contract, in float64, where sums of 128 products are exact. So a
row's bits cannot depend on the rows beside it, whatever the library does. The codes are kept in float64, eight bytes
each. This suits small models, and shows a GPU's results without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from preheat.backends.base.collective import Collective
from preheat.backends.cpu.linear import Product
from preheat.ops.kinds import ActivationScales
from preheat.ops.opaque import opaque
from preheat.ops.quantization import (
    PROMOTED,
    QuantizedWeight,
    activation_scales,
    quantize,
    quantize_rows,
    scaled_product,
    token_scales,
)
from preheat.ops.values import SumOrder


def coded_product(weight: QuantizedWeight, bias: Tensor | None = None) -> Product:
    """Return the product of ``weight`` [outputs, inputs], W8A8, and ``bias`` [outputs]."""
    kind = weight.scheme.activations
    assert kind is not None
    return Product(fp8_linear, parts_of(weight.codes), weight.scales, bias, weight.static, kind)


class ScaledSums:
    """The products of ``weight`` in the K splits of its inputs.

    ``weight`` is [outputs, inputs of this rank], W8A8. Each product is fp32. A row's scale covers all its inputs: ranks
    exchange their greatest magnitudes.
    """

    parts: Sequence[Product] = ()

    def __init__(self, weight: QuantizedWeight, order: SumOrder, ranks: Collective | None) -> None:
        assert weight.scheme.activations is not None
        self._kind, self._static, self._ranks = weight.scheme.activations, weight.static, ranks
        own, outputs = order.own_k_splits, weight.shape[0]
        self._size = weight.shape[-1] // own
        cuts = [weight.cut(((0, outputs),), (at * self._size, (at + 1) * self._size)) for at in range(own)]
        self._splits = [(parts_of(cut.codes), cut.scales) for cut in cuts]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return, for each K split, fp32 [rows, outputs] of ``x`` [rows, inputs of this rank]."""
        scales = self._scales(x)
        codes, count = quantize(x, scales), len(self._splits)
        of_splits = scales.chunk(count, 1) if scales.shape[1] > 1 else [scales] * count
        split = zip(torch.split(codes, self._size, 1), of_splits, self._splits, strict=True)
        return [scaled_product(mine, own, *weight, None, torch.float32) for mine, own, weight in split]

    def _scales(self, x: Tensor) -> Tensor:
        if self._kind == "token" and self._ranks is not None:
            mine = x.float().abs().amax(1, keepdim=True)
            return token_scales(self._ranks.gather(mine).amax(0))
        return activation_scales(x, self._kind, self._static)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        for parts, scales in self._splits:
            yield from (*parts, scales)
        yield from () if self._static is None else (self._static,)


def parts_of(codes: Tensor) -> list[Tensor]:
    """Return ``codes`` [outputs, inputs] in float64, in parts of 128 inputs: [inputs, outputs] each."""
    return [part.double().t() for part in torch.split(codes.float(), PROMOTED, 1)]


@opaque(
    "(Tensor x, Tensor[] parts, Tensor scales, Tensor? bias, Tensor? static, str kind) -> Tensor",
    lambda x, parts, scales, *_: x.new_empty(len(x), len(scales)),
)
def fp8_linear(  # noqa: PLR0917 - arguments of torch's operations are told by their place
    x: Tensor, parts: list[Tensor], scales: Tensor, bias: Tensor | None, static: Tensor | None, kind: ActivationScales
) -> Tensor:
    """Return ``x`` [rows, inputs] times ``parts`` of :func:`parts_of`: [rows, outputs], a new tensor of its dtype."""
    codes, x_scales = quantize_rows(x, kind, static)
    return scaled_product(codes, x_scales, parts, scales, bias, x.dtype)
