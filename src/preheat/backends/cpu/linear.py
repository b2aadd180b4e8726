"""The product of rows and a plain matrix on a CPU.

It is y = x W^T + b.

Contract. Every output is one dot product over the inputs plus the bias, rounded once to the dtype. The dot product is
accumulated in fp32, in an order fixed by the shape of W and the number of threads. A row's bits do not depend on the
number of rows.

The kernel is oneDNN's, over weights laid out for it once. It cuts the inputs differently for some numbers of rows than
for others (with AMX for many, without for few). One number of rows, with the bits that most others share, is the
reference: its results are the contract. Any other number is computed at a size that was proven, on this machine, to
give the same bits: as it is, with rows added, or in parts of the reference. The proof is made when a size first occurs,
so before ready. A processor without a product of bfloat16 (AVX2) multiplies in float32 with twice the memory, and
rounds the result once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.cpu.facts import FACTS
from preheat.errors import NotInvariant, SettingsError
from preheat.ops.opaque import opaque
from preheat.ops.proof import cancelling_rows, cancelling_weight, rows_compared
from preheat.ops.values import Refused

MIN_ROWS = FACTS.min_tokens

REFERENCES = (64, 32, 16)
PROBES = (2, 4, 8, 16, 32, 64, 128, 256, 512)

_kernel = torch.ops.mkldnn._linear_pointwise.default


class Product:
    """Product by a ``function`` of rows and these ``operands``.

    The first operands are tensors, or lists of tensors.
    """

    def __init__(self, function: Callable[..., Tensor], *operands: Any) -> None:
        self._function, self.operands = function, operands

    def __call__(self, x: Tensor) -> Tensor:
        """Return a new tensor [rows, outputs] of ``x`` [rows, inputs].

        ``x`` has at least one row, and gives the dtype.
        """
        return self._function(x, *self.operands)

    def weights(self) -> Iterator[Tensor]:
        """See :class:`preheat.backends.base.layers.HasWeights`."""
        for each in self.operands:
            yield from each if isinstance(each, list) else (each,) if isinstance(each, Tensor) else ()


def packed_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return the product of ``weight`` [outputs, inputs] and ``bias`` [outputs]; only oneDNN's copy is kept."""
    return Product(packed_linear, pack(weight), bias, len(weight))


@opaque(
    "(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor",
    lambda x, weight, bias, outputs: x.new_empty(len(x), outputs),
)
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Multiply ``x`` by a ``weight`` of :func:`pack`.

    A dtype without a product is multiplied in float32.
    """
    dtype = product_dtype(x.dtype)
    if dtype == x.dtype:
        return _proven_product(x, weight, bias, outputs)
    wide_bias = None if bias is None else bias.to(dtype)
    return _proven_product(x.to(dtype), weight, wide_bias, outputs).to(x.dtype)


def _proven_product(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Multiply at a number of rows with the contract's bits, as proven."""
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
    """Return the least size at which ``rows`` rows have the reference's bits.

    If no size has these bits, return the reference's, to compute in parts of it.
    """
    dtype = product_dtype(dtype)
    reference = _reference(outputs, inputs, dtype, threads)
    candidates = _candidates(rows)
    if rows < reference:
        candidates = [size for size in candidates if size < reference] + [reference]
    return next((size for size in candidates if _agrees(size, reference, outputs, inputs, dtype)), reference)


def _candidates(rows: int) -> list[int]:
    """Return ``rows``, then sizes that it can be padded to cheaply."""
    steps = (1, 2, 4, 8, 16, 32) if rows < max(REFERENCES) else (1, 16, 64)
    return list(dict.fromkeys(max(-(-rows // step) * step, MIN_ROWS) for step in steps))


@functools.cache
def _reference(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> int:
    """Return the one of ``REFERENCES`` that most ``PROBES`` agree with.

    Of equals it is the largest. Raises NotInvariant if a row's place changes its bits in all of them.
    """
    votes = {
        rows: sum(_agrees(probe, rows, outputs, inputs, dtype) for probe in PROBES)
        for rows in REFERENCES
        if _agrees(rows, rows, outputs, inputs, dtype)
    }
    if not votes:
        raise NotInvariant(f"every product of rows with [{outputs}, {inputs}] depends on the position of a row")
    return max(votes, key=lambda rows: votes[rows])


def _agrees(size: int, reference: int, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Return whether products of ``size`` rows have the reference's bits.

    The reference's bits are of parts of ``reference`` rows, in reverse order.
    """
    rows, weight = _cancelling_rows(outputs, inputs, dtype), _cancelling(outputs, inputs, dtype)
    expected = _in_parts(rows.flip(0), weight, None, reference).flip(0)
    count = rows_compared(outputs, size)
    repeats = -(-count // len(rows))
    found = _in_parts(rows.repeat(repeats, 1)[:count], weight, None, size)
    return torch.equal(found, expected.repeat(repeats, 1)[:count])


@functools.lru_cache(maxsize=8)
def _cancelling_rows(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return cancelling_rows(rows_compared(outputs, max(REFERENCES)), inputs).to(dtype)


@functools.lru_cache(maxsize=8)  # a model has about five shapes
def _cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return a weight whose product with :func:`_cancelling_rows` is exactly zero."""
    weight = cancelling_weight(outputs, inputs).to(dtype)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight)
    return packed


def obstacle() -> Refused | None:
    """Return why this torch multiplies no plain matrix; None if it does."""
    if torch._C._has_mkldnn:
        return None
    return Refused("this build of torch has no oneDNN, and preheat needs it on a CPU: install PyTorch's standard wheel")


def pack(weight: Tensor) -> Tensor:
    """Return oneDNN's copy of ``weight`` [outputs, inputs].

    The copy is in float32 if the processor has no product of its dtype. Raises SettingsError if torch has no oneDNN.
    """
    if (found := obstacle()) is not None:
        raise SettingsError(found.reason)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.to(product_dtype(weight.dtype)))
    return packed


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if oneDNN multiplies it here, else float32.

    bfloat16 needs AVX-512.
    """
    supported = dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if supported else torch.float32
