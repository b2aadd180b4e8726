"""Linear maps: y = x W^T + b.

Contract. Every output is one dot product over the inputs, accumulated in fp32 in an order fixed by the shape of W and
the number of threads, plus the bias, rounded once to the dtype. A row's bits do not depend on the number of rows.

On CPU the kernel is oneDNN's, over weights laid out for it once. It cuts the inputs differently for some numbers of
rows than for others (with AMX for many, without for few), so what it gives for ``REFERENCE_ROWS`` rows is the contract,
and any other number of rows is computed at a size that was proven, on this machine, to give the same bits: as it is,
with rows added, or in parts of ``REFERENCE_ROWS``. The proof is made when a size first occurs, that is, before ready.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.errors import SettingsError
from preheat.ops.opaque import opaque
from preheat.ops.proof import noise, signed_pairs

MIN_ROWS = 2
"""A caller that never passes fewer rows than this saves the padding: one row never has the bits of many."""

REFERENCE_ROWS = 64

_kernel = torch.ops.mkldnn._linear_pointwise.default
_sizes: dict[tuple[object, ...], int] = {}


class Linear:
    """``weight`` [outputs, inputs], of which nothing is kept but oneDNN's copy, and ``bias`` [outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_kernel(weight.dtype)
        self._outputs, self._bias = len(weight), bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight.default(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, inputs], at least one row -> [rows, outputs], a new tensor of its dtype."""
        return _linear(x, self._weight, self._bias, self._outputs)


@opaque(
    "(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor",
    lambda x, weight, bias, outputs: x.new_empty(len(x), outputs),
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``weight`` is oneDNN's."""
    rows, inputs = x.shape
    key = (rows, outputs, inputs, x.dtype, torch.get_num_threads())
    size = _sizes.get(key) or _sizes.setdefault(key, _proven_size(rows, outputs, inputs, x.dtype))
    if size == rows:
        return _product(x, weight, bias)
    if size > rows:
        return _product(F.pad(x, (0, 0, 0, size - rows)), weight, bias)[:rows].clone()
    return _in_parts(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = _kernel(x, weight, bias, "none", [], "")
    return y


def _in_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    padded = F.pad(x, (0, 0, 0, -len(x) % REFERENCE_ROWS))
    return torch.cat([_product(part, weight, bias) for part in torch.split(padded, REFERENCE_ROWS)])[: len(x)]


def _proven_size(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """The least size at which ``rows`` rows have the reference's bits; ``REFERENCE_ROWS``, in parts, if none has."""
    weight = _cancelling(outputs, inputs, dtype)
    for size in _candidates(rows):
        x = signed_pairs(noise(size, inputs, seed=size), -1.0).to(dtype)
        if torch.equal(_product(x, weight), _in_parts(x, weight)):
            return size
    return REFERENCE_ROWS


def _candidates(rows: int) -> Iterable[int]:
    """``rows`` itself, then what it can be padded to without growing much."""
    steps = (1, 2, 4, 8, 16, 32) if rows < REFERENCE_ROWS else (1, 16, 64)
    return dict.fromkeys(max(-(-rows // step) * step, MIN_ROWS) for step in steps)


@functools.lru_cache(maxsize=8)  # a model has about five shapes
def _cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """A weight whose product with rows of signed pairs is exactly zero."""
    weight: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(
        signed_pairs(noise(outputs, inputs), 1.0).to(dtype)
    )
    return weight


def check_kernel(dtype: torch.dtype) -> None:
    """Raise SettingsError where this torch, on this processor, has no kernel for ``dtype``."""
    if not torch._C._has_mkldnn:
        raise SettingsError("this build of torch has no oneDNN, which preheat needs on CPU: install the standard wheel")
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise SettingsError("this processor has no kernel for bfloat16: use --dtype float32", param="dtype")
