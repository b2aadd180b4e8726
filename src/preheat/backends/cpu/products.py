"""The products of a layer on a CPU: a table of functions."""

from __future__ import annotations

from torch import Tensor

from preheat.backends.base.collective import Collective
from preheat.backends.cpu.linear import Product, packed_product
from preheat.backends.cpu.quantized import ScaledSums, coded_product
from preheat.backends.layer import Splits, Tiles
from preheat.ops.quantization import QuantizedWeight, plain
from preheat.ops.values import Matmul

CpuProducts = Tiles[Product] | Splits[Product] | ScaledSums


def products_of(
    value: Matmul, weight: Tensor | QuantizedWeight, bias: Tensor | None, ranks: Collective | None
) -> CpuProducts:
    """Return the products of one matrix of ``value``.

    The product of a K split has no bias: the bias is added to the sum of all splits.
    """
    if isinstance(weight, QuantizedWeight) and weight.scheme.activations is not None:
        if value.order.is_split:
            return ScaledSums(weight, value.order, ranks)
        return Tiles([coded_product(weight, bias)])  # exact sums need no tiles
    if value.order.is_split:
        return Splits(packed_product, plain(weight), value.order)
    return Tiles.of(packed_product, plain(weight), bias, value.order.tiles)
