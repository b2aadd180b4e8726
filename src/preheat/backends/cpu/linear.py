"""The product of rows and a plain matrix on a CPU: y = x W^T + b.

Contract. Every output is one dot product over the inputs, accumulated in fp32 in an order fixed by the shape of W and
the number of threads, plus the bias, rounded once to the dtype. A row's bits do not depend on the number of rows.

On CPU the kernel is oneDNN's, over weights laid out for it once. It cuts the inputs differently for some numbers of
rows than for others (with AMX for many, without for few). One number of rows, whose bits most others share, is the
reference, and what it gives is the contract; any other number is computed at a size that was proven, on this machine,
to give the same bits: as it is, with rows added, or in parts of the reference. The proof is made when a size first
occurs, that is, before ready. A processor without a product of bfloat16 (AVX2) multiplies in float32, which takes
twice the memory, and rounds the result once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.cpu.facts import FACTS
from preheat.errors import SettingsError
from preheat.ops.opaque import opaque
from preheat.ops.proof import noise, signed_pairs
from preheat.ops.values import Refused

MIN_ROWS = FACTS.min_tokens

REFERENCES = (64, 32, 16)
PROBES = (2, 4, 8, 16, 32, 64, 128, 256, 512)

_kernel = torch.ops.mkldnn._linear_pointwise.default


class Product:
    """``function`` of rows and these ``operands``, whose first ones are tensors, or lists of them."""

    def __init__(self, function: Callable[..., Tensor], *operands: Any) -> None:
        self._function, self.operands = function, operands

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [rows, inputs], at least one row -> [rows, outputs], a new tensor of its dtype."""
        return self._function(x, *self.operands)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.HasWeights`."""
        for each in self.operands:
            yield from each if isinstance(each, list) else (each,) if isinstance(each, Tensor) else ()


def packed_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The product of ``weight`` [outputs, inputs], of which oneDNN's copy alone is kept, and ``bias`` [outputs]."""
    return Product(packed_linear, pack(weight), bias, len(weight))


@opaque(
    "(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor",
    lambda x, weight, bias, outputs: x.new_empty(len(x), outputs),
)
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``weight`` is what :func:`pack` returns. Numbers without a product of their own are multiplied in float32."""
    dtype = product_dtype(x.dtype)
    if dtype == x.dtype:
        return _proven_product(x, weight, bias, outputs)
    wide_bias = None if bias is None else bias.to(dtype)
    return _proven_product(x.to(dtype), weight, wide_bias, outputs).to(x.dtype)


def _proven_product(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Multiply at a number of rows that is proven to give the contract's bits."""
    rows, inputs = x.shape
    size = proven_size(rows, outputs, inputs, x.dtype, torch.get_num_threads())
    if size == rows:
        y: Tensor = _kernel(x, weight, bias, "none", [], "")
        return y
    if size > rows:
        return _product(F.pad(x, (0, 0, 0, size - rows)), weight, bias)[:rows].clone()
    return _in_parts(x, weight, bias, size)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = _kernel(x, weight, bias, "none", [], "")
    return y


def _in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    padded = F.pad(x, (0, 0, 0, -len(x) % rows))
    return torch.cat([_product(part, weight, bias) for part in torch.split(padded, rows)])[: len(x)]


@functools.cache
def proven_size(rows: int, outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> int:
    """The least size at which ``rows`` rows have the reference's bits; the reference's, for parts, if none has."""
    dtype = product_dtype(dtype)
    reference = _reference(outputs, inputs, dtype, threads)
    candidates = _candidates(rows)
    if rows < reference:
        candidates = [size for size in candidates if size < reference] + [reference]
    return next((size for size in candidates if _agrees(size, reference, outputs, inputs, dtype)), reference)


def _candidates(rows: int) -> list[int]:
    """``rows`` itself, then what it can be padded to without growing much."""
    steps = (1, 2, 4, 8, 16, 32) if rows < max(REFERENCES) else (1, 16, 64)
    return list(dict.fromkeys(max(-(-rows // step) * step, MIN_ROWS) for step in steps))


@functools.cache
def _reference(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> int:
    """The one of ``REFERENCES`` that most of the ``PROBES`` agree with; of equals the largest."""
    votes = {
        rows: sum(_agrees(probe, rows, outputs, inputs, dtype) for probe in PROBES)
        for rows in REFERENCES
        if _agrees(rows, rows, outputs, inputs, dtype)
    }
    return max(votes, key=lambda rows: votes[rows])


def _agrees(size: int, reference: int, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether ``size`` rows at once have the bits that they have in parts of ``reference`` rows, in another order."""
    rows = _cancelling_rows(inputs, dtype)
    weight = _cancelling(outputs, inputs, dtype)
    repeats = -(-size // len(rows))
    expected = _in_parts(rows.flip(0), weight, None, reference).flip(0)
    return torch.equal(_product(rows.repeat(repeats, 1)[:size], weight), expected.repeat(repeats, 1)[:size])


@functools.lru_cache(maxsize=8)
def _cancelling_rows(inputs: int, dtype: torch.dtype) -> Tensor:
    return signed_pairs(noise(max(REFERENCES), inputs, seed=1), -1.0).to(dtype)


@functools.lru_cache(maxsize=8)  # a model has about five shapes
def _cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """A weight whose product with those rows is exactly zero."""
    weight = signed_pairs(noise(outputs, inputs), 1.0).to(dtype)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight)
    return packed


def obstacle() -> Refused | None:
    """Why this torch multiplies no plain matrix; None if it does."""
    if torch._C._has_mkldnn:
        return None
    return Refused("this build of torch has no oneDNN, and preheat needs it on a CPU: install PyTorch's standard wheel")


def pack(weight: Tensor) -> Tensor:
    """Return oneDNN's copy of ``weight`` [outputs, inputs], in float32 where the processor has no product of its dtype.

    Raises SettingsError where torch has no oneDNN.
    """
    if (found := obstacle()) is not None:
        raise SettingsError(found.reason)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.to(product_dtype(weight.dtype)))
    return packed


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` where oneDNN multiplies it on this processor, else float32: bfloat16 needs AVX-512."""
    supported = dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if supported else torch.float32
