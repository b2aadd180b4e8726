"""The launches of linear layers on CUDA, by the chosen kernel; see :mod:`preheat.backends.cuda.matmul`.

The contract is the one of :mod:`preheat.backends.cuda.matmul.gemm`. A tile is of the Triton kernel in that module: it
is best where the weights' bytes set the time. Wide is a kernel for many rows on Hopper
(:mod:`preheat.backends.cuda.matmul.hopper.large_m`); it needs no second kernel for the gate. The library is cuBLAS, for
many rows too. As long as it does not cut the inputs into parts it mostly keeps the contract; a proof has to confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from preheat.backends.cuda.matmul.config import KernelConfig, Library
from preheat.backends.cuda.matmul.gemm import multiply
from preheat.backends.cuda.matmul.hopper.large_m import wide
from preheat.backends.cuda.matmul.lora.expand import Expansion
from preheat.backends.cuda.matmul.weights import PlainWeight, Weight
from preheat.backends.cuda.pointwise.activation import silu_and_mul
from preheat.backends.cuda.ranks.collective import add_ranks
from preheat.ops.quantization import QuantizedRows, plain_rows


def apply(
    choice: KernelConfig, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None, gated: bool,
    out: Tensor | None = None, terms: Expansion | None = None,
) -> Tensor:  # fmt: skip
    """Run ``x`` [rows, inputs] through a layer by the kernel ``choice``, into ``out`` if given.

    All tensors are contiguous. Wide kernels of plain weights add ``terms`` of rows that the launch ahead shrinks.
    """
    if choice.kind == "expanded":
        plain = PlainWeight(weight.plain(), weight.splits)
        return apply(choice.choice, plain_rows(x), plain, bias, gated, out)
    if choice.kind == "library":
        return _by_library(choice, plain_rows(x), weight.plain(), weight.splits, bias, gated, out)
    y = weight.room(len(x), len(weight) // 2 if gated else len(weight)) if out is None else out
    more: dict[str, Any] = {} if terms is None else {"adapters": terms}
    launches(weight.form)[choice.kind, choice.bulk](choice, weight.rows(x), weight, bias, gated, y, **more)
    return y


@cache
def launches(form: str) -> Mapping[tuple[str, bool], Callable[..., None]]:
    """Return the function for a choice: by its kind, and whether the copy engine loads its tiles.

    The first call for quantized weights imports their kernels for Hopper: kernels are compiled and proven at boot.
    """
    tiles = dict.fromkeys([("tile", False), ("tile", True)], multiply)
    if form == "plain":
        return {**tiles, ("wide", False): wide}
    from preheat.backends.cuda.matmul.hopper.large_m_fp8 import wide_fp8
    from preheat.backends.cuda.matmul.hopper.small_m import small_m_codes, small_m_float8

    if form == "codes":
        return {**tiles, ("tile", True): small_m_codes}
    return {**tiles, ("tile", True): small_m_float8, ("wide", False): wide_fp8}


def _by_library(
    choice: Library, x: Tensor, weight: Tensor, splits: int, bias: Tensor | None, gated: bool, out: Tensor | None
) -> Tensor:
    """Multiply by cuBLAS.

    The platform has forbidden it to cut the inputs into parts; ``choice`` may allow it.
    """
    if splits > 1 or (out is not None and out.dtype != x.dtype):
        assert out is not None
        return _splits_by_library(x, weight, bias, out, splits)
    matmul, room = torch.backends.cuda.matmul, None if gated else out
    if choice.split:
        matmul.allow_bf16_reduced_precision_reduction = (False, True)
    try:
        y = torch.mm(x, weight.t(), out=room) if bias is None else torch.addmm(bias, x, weight.t(), out=room)
    finally:
        if choice.split:
            matmul.allow_bf16_reduced_precision_reduction = (False, False)
    if not gated:
        return y
    y = silu_and_mul(y)
    return y if out is None else out.copy_(y)


def _splits_by_library(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, splits: int) -> Tensor:
    """Multiply each of 1, 2 or 4 ``splits`` of the inputs by cuBLAS, in fp32; the second of a pair adds to the first.

    Pairs, the bias and the rounding to the dtype of ``out`` are added by the kernel that adds ranks. A sum that needs
    none of them goes to ``out`` at once.
    """
    size, pairs = x.shape[1] // splits, max(splits // 2, 1)
    whole = pairs == 1 and bias is None and out.dtype == torch.float32
    assert whole or pairs == 2, "one rank has four splits, others give fp32"
    sums = out.view(1, *out.shape) if whole else x.new_empty(pairs, *out.shape, dtype=torch.float32)
    for split in range(splits):
        rows, part = (each[:, split * size : (split + 1) * size] for each in (x, weight))
        to = sums[split // 2]
        if split % 2 == 0:
            torch.mm(rows, part.t(), out_dtype=torch.float32, out=to)
        else:
            torch.addmm(to, rows, part.t(), out_dtype=torch.float32, out=to)
    return out if whole else add_ranks(sums, bias, out.dtype, out)
