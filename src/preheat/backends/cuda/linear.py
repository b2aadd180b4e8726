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

import torch
from torch import Tensor

from preheat.backends.cuda.activation import silu_and_mul
from preheat.backends.cuda.linear_hopper import wide
from preheat.backends.cuda.linear_hopper_few import few_codes, few_float8
from preheat.backends.cuda.linear_hopper_fp8 import wide_fp8
from preheat.backends.cuda.lora_expand import Expansion
from preheat.backends.cuda.matmul.gemm import multiply
from preheat.backends.cuda.matmul.weights import DeviceWeight, codes_of, dequantized
from preheat.backends.cuda.tuning import Expanded, KernelConfig, Library, Tile, Wide
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
