"""Linear maps on CUDA: y = x W^T + b, and the same with silu(gate) * up behind it.

Contract. Every output is one dot product over the inputs, in order, in one fp32 accumulator; the bias is added in fp32;
one rounding to the dtype. Gated: the first half of W's rows are gates, the second half ups; both are rounded like any
output, then combined as :func:`preheat.backends.cuda.elementwise.silu_mul` says. So a row's bits do not depend on the
number of rows, on tiles or on warps: those only say which program computes an output, never in which order.

Three implementations. Tiles are those of a Triton kernel, best where the weights' bytes set the time: weights are the
first operand of the matrix unit, whose other side may then be as narrow as the few rows are. Wide is a kernel for many
rows on Hopper (:mod:`preheat.backends.cuda.linear_hopper`), which needs no second one for the gate. The library is
cuBLAS, for many rows too; as long as it does not cut the inputs into parts it mostly keeps the contract, as a proof has
to say.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from preheat.backends.cuda.activation import activate, clip, silu_and_mul
from preheat.backends.cuda.linear_hopper import wide
from preheat.backends.cuda.linear_hopper_few import few_codes, few_float8
from preheat.backends.cuda.linear_hopper_fp8 import wide_fp8
from preheat.backends.cuda.lora_expand import Expansion
from preheat.backends.cuda.matmul.gemm import multiply
from preheat.backends.cuda.matmul.weights import DeviceWeight, codes_of, dequantized, quantized_input, tensors_of
from preheat.backends.cuda.norm import QuantizedInput
from preheat.backends.cuda.tuning import Expanded, KernelConfig, KernelConfigs, Library, LinearShape, Tile, Wide
from preheat.ops.kinds import Activation
from preheat.ops.quantization import QuantizedRows


def apply(
    choice: KernelConfig,
    x: Tensor | QuantizedRows,
    weight: Tensor | DeviceWeight,
    bias: Tensor | None,
    gated: bool,
    out: Tensor | None = None,
    adapters: Expansion | None = None,
    splits: int = 1,
) -> Tensor:
    """Run ``x`` [rows, inputs] through a layer by the kernel ``choice``, into ``out`` where it is given.

    All are contiguous. The inputs are cut into ``splits``. Wide kernels of plain weights take ``adapters``, whose rows
    the launch ahead shrinks.
    """
    assert adapters is None or (isinstance(choice, Wide) and isinstance(weight, Tensor))
    if isinstance(weight, DeviceWeight) and isinstance(choice, Tile | Wide):
        return _quantized(choice, x, weight, bias, gated, out)
    if isinstance(x, QuantizedRows):
        assert x.plain is not None
        x = x.plain
    if isinstance(weight, DeviceWeight):
        assert isinstance(choice, Expanded)
        return apply(choice.choice, x, dequantized(weight), bias, gated, out, splits=splits)
    if isinstance(choice, Library):
        y = _by_library(x, weight, bias, choice.split, None if gated else out)
        if not gated:
            return y
        y = silu_and_mul(y)
        return y if out is None else out.copy_(y)
    y = x.new_empty(len(x), len(weight) // 2 if gated else len(weight)) if out is None else out
    if isinstance(choice, Wide):
        wide(choice, x, weight, bias, gated, y, adapters=adapters)
    else:
        assert isinstance(choice, Tile)
        multiply(choice, x, weight, bias, gated, y, splits)
    return y


def _quantized(
    choice: Tile | Wide,
    x: Tensor | QuantizedRows,
    weight: DeviceWeight,
    bias: Tensor | None,
    gated: bool,
    out: Tensor | None,
) -> Tensor:
    """The same of a quantized weight, by a kernel that reads its codes."""
    columns = len(weight) // 2 if gated else len(weight)
    y = torch.empty((len(x), columns), dtype=weight.dtype, device=weight.codes.device) if out is None else out
    if weight.scheme.activations is None:
        plain = x.plain if isinstance(x, QuantizedRows) else x
        assert plain is not None and isinstance(choice, Tile)
        (few_codes if choice.bulk else multiply)(choice, plain, weight, bias, gated, y)
    elif isinstance(choice, Wide):
        wide_fp8(choice, codes_of(x, weight), weight, bias, gated, y)
    else:
        (few_float8 if choice.bulk else multiply)(choice, codes_of(x, weight), weight, bias, gated, y)
    return y


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None, split: bool, out: Tensor | None) -> Tensor:
    """The platform has forbidden torch's cuBLAS to cut the inputs into parts; ``split`` allows it, for this call."""
    matmul = torch.backends.cuda.matmul
    if split:
        matmul.allow_bf16_reduced_precision_reduction = (False, True)
    try:
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)
    finally:
        if split:
            matmul.allow_bf16_reduced_precision_reduction = (False, False)


class CudaLinear:
    """``weight`` [outputs, inputs], plain or quantized, and ``bias`` [outputs], used as they lie in memory. ``gated``:
    see the contract.

    ``configs`` say which implementation serves a number of rows.
    """

    slots = None

    def __init__(
        self, weight: Tensor | DeviceWeight, bias: Tensor | None = None, *, gated: bool = False, configs: KernelConfigs
    ) -> None:
        self._weight, self._bias, self._gated, self.configs = weight, bias, gated, configs
        self.shape = LinearShape(len(weight), weight.shape[1], gated, weight.dtype, bias is not None)
        if isinstance(weight, DeviceWeight):
            self.shape = self.shape._replace(scheme=weight.scheme, dealt=weight.dealt, narrow=weight.narrow)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return tensors_of(self._weight, self._bias)

    def state(self) -> tuple[Tensor, ...]:
        """See :class:`preheat.backends.base.HasWeights`."""
        return ()

    @property
    def fused_input(self) -> QuantizedInput | None:
        """Of a layer with float8 activations: its norm may give them."""
        return quantized_input(self._weight)

    def __call__(self, x: Tensor | QuantizedRows, out: Tensor | None = None) -> Tensor:
        """``x`` [rows, inputs], at least one row -> [rows, outputs], half as many if gated: ``out`` or a new tensor.

        Both are contiguous.
        """
        return self.by(self.configs(self.shape, len(x)), x, out)

    def by(
        self,
        choice: KernelConfig,
        x: Tensor | QuantizedRows,
        out: Tensor | None = None,
        adapters: Expansion | None = None,
    ) -> Tensor:
        """The same by another implementation, with what ``adapters`` add, see :func:`apply`."""
        return apply(choice, x, self._weight, self._bias, self._gated, out, adapters)

    def finished(self, activation: Activation | None, limit: float | None) -> CudaLinear:
        """The layer with the same weights, followed by an ``activation`` or kept within ``limit``."""
        gated = activation == "silu_and_mul"
        if gated or (activation is None and limit is None):
            return CudaLinear(self._weight, self._bias, gated=gated, configs=self.configs)
        return FinishedLinear(self._weight, self._bias, configs=self.configs, activation=activation, limit=limit)


class FinishedLinear(CudaLinear):
    """The same, followed by an ``activation`` that is no part of it, or with its outputs kept within ``limit``."""

    def __init__(
        self,
        weight: Tensor | DeviceWeight,
        bias: Tensor | None = None,
        *,
        configs: KernelConfigs,
        activation: Activation | None,
        limit: float | None,
    ) -> None:
        super().__init__(weight, bias, configs=configs)
        self._activation, self._limit = activation, limit

    def __call__(self, x: Tensor | QuantizedRows, out: Tensor | None = None) -> Tensor:
        """A new tensor."""
        y = super().__call__(x)
        if self._activation is not None:
            y = activate(y, self._activation)
        return y if self._limit is None else clip(y, self._limit)
