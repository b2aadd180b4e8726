"""The launches of linear layers on CUDA, by the chosen kernel; see :mod:`preheat.backends.cuda.matmul`.

The contract is the one of :mod:`preheat.backends.cuda.matmul.gemm`. A tile is of the Triton kernel in that module: it
is best where the weights' bytes set the time. Wide is a kernel for many rows on Hopper
(:mod:`preheat.backends.cuda.linear_hopper`); it needs no second kernel for the gate. The library is cuBLAS, for many
rows too. As long as it does not cut the inputs into parts it mostly keeps the contract; a proof has to confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from preheat.backends.cuda.activation import silu_and_mul
from preheat.backends.cuda.linear_hopper import wide
from preheat.backends.cuda.linear_hopper_fp8 import wide_fp8
from preheat.backends.cuda.linear_hopper_small_m import small_m_codes, small_m_float8
from preheat.backends.cuda.lora_expand import Expansion
from preheat.backends.cuda.matmul.config import Expanded, KernelConfig, Library, Tile, Wide
from preheat.backends.cuda.matmul.gemm import multiply
from preheat.backends.cuda.matmul.weights import DeviceWeight, codes_of, dequantized
from preheat.ops.quantization import QuantizedRows, plain_rows

LAUNCHES: Mapping[tuple[type[KernelConfig], bool, str], Callable[..., None]] = {
    **dict.fromkeys(product([Tile], [False, True], ["plain", "codes", "float8"]), multiply),
    (Tile, True, "codes"): small_m_codes,
    (Tile, True, "float8"): small_m_float8,
    (Wide, False, "plain"): wide,
    (Wide, False, "float8"): wide_fp8,
}
"""The function for a choice: by its class, whether the copy engine loads its tiles, and the form of the weights."""


def apply(
    choice: KernelConfig, x: Tensor | QuantizedRows, weight: Tensor | DeviceWeight, bias: Tensor | None, gated: bool,
    out: Tensor | None = None, terms: Expansion | None = None, splits: int = 1,
) -> Tensor:  # fmt: skip
    """Run ``x`` [rows, inputs] through a layer by the kernel ``choice``, into ``out`` if given.

    All tensors are contiguous. The inputs are cut into ``splits``. Wide kernels of plain weights add ``terms`` of rows
    that the launch ahead shrinks.
    """
    if isinstance(choice, Expanded):
        assert isinstance(weight, DeviceWeight)
        return apply(choice.choice, plain_rows(x), dequantized(weight), bias, gated, out, splits=splits)
    columns = len(weight) // 2 if gated else len(weight)
    if isinstance(weight, DeviceWeight):
        form: str = weight.form
        size = len(x), columns
        y = torch.empty(size, dtype=weight.dtype, device=weight.codes.device) if out is None else out
        rows = codes_of(x, weight) if form == "float8" else plain_rows(x)
    else:
        form, rows = "plain", plain_rows(x)
        if isinstance(choice, Library):
            return _by_library(choice, rows, weight, bias, gated, out)
        y = rows.new_empty(len(rows), columns) if out is None else out
    more: dict[str, Any] = {"splits": splits} if splits > 1 else {}
    if terms is not None:
        more["adapters"] = terms
    LAUNCHES[type(choice), getattr(choice, "bulk", False), form](choice, rows, weight, bias, gated, y, **more)
    return y


def _by_library(
    choice: Library, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, out: Tensor | None
) -> Tensor:
    """Multiply by cuBLAS.

    The platform has forbidden it to cut the inputs into parts; ``choice`` may allow it.
    """
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
