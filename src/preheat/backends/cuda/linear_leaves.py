"""Linear layers whose inputs ranks share, on CUDA: see :mod:`preheat.ops.matmul`.

A rank adds the splits that it has. Where it has all of them, the sum is the layer's output, else ranks add theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from preheat.backends.cuda.collective import RankSums
from preheat.backends.cuda.linear import apply
from preheat.backends.cuda.matmul.weights import DeviceWeight, tensors_of
from preheat.backends.cuda.quantize import quantize_parts
from preheat.backends.cuda.tuning import KernelConfigs, LinearShape
from preheat.ops.quantization import QuantizedRows


class CudaLeafLinear:
    """``weight`` [outputs, inputs of this rank], plain or quantized, in ``leaves``, and ``bias`` [outputs]; ``ranks``
    add what each has.
    """

    slots = None

    def __init__(
        self, weight: Tensor | DeviceWeight, bias: Tensor | None, leaves: int, ranks: RankSums, configs: KernelConfigs
    ) -> None:
        self.weight, self.bias, self.ranks, self.configs = weight, bias, ranks, configs
        scheme = weight.scheme if isinstance(weight, DeviceWeight) else None
        self.shape = LinearShape(len(weight), weight.shape[1], dtype=weight.dtype, scheme=scheme, splits=leaves)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs of this rank] -> [rows, outputs], a new tensor of its dtype, the same on all ranks."""
        size = len(x), self.shape.outputs
        if self.ranks.world == 1:
            return self._sum(x, self.bias, x.new_empty(size))
        return self.ranks.sum(self.partial(x, x.new_empty(size, dtype=torch.float32)), self.bias, x.dtype)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return tensors_of(self.weight, self.bias)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return ()

    def partial(self, x: Tensor, y: Tensor) -> Tensor:
        """``y`` fp32 [rows, outputs], this rank's sum, without the bias."""
        return self._sum(x, None, y)

    def _sum(self, x: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        rows: Tensor | QuantizedRows = x
        if self.shape.scheme is not None and self.shape.scheme.activations == "token" and self.ranks.world > 1:
            rows = quantize_parts(x, self.ranks)
        choice = self.configs(self.shape, len(x))
        return apply(choice, rows, self.weight, bias, False, y, splits=self.shape.splits)
