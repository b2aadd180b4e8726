"""The last steps of a block on CUDA, in one launch: sums of experts, norms, the residual addition and the next norms.

Contract. The bits equal the bits of :mod:`preheat.backends.cuda.matmul.moe.route` (the sum over experts), of
:mod:`preheat.backends.cuda.pointwise.norm` and of additions one after the other, each rounded to the dtype. A sum over
a row has the norms' order: one program a row, with the block and the warps of a norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.base.layers import Closing
from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.device.sizes import next_power_of_2
from preheat.backends.cuda.pointwise.norm import CudaNorm, layout, rms_row

if TYPE_CHECKING:
    from preheat.backends.cuda.matmul.moe.route import Arrangement

KINDS = ("rms", "rms_once", "rms_plus_one", "identity")
"""Kinds of norms that a program may take several of."""


class Unsummed(NamedTuple):
    """Outputs [arranged rows, size] of experts, and their places and weights."""

    rows: Tensor
    arrangement: Arrangement


class _Rows(NamedTuple):
    """The rows of a block.

    They are tokens, or experts with the arguments of :func:`preheat.backends.cuda.matmul.moe.route.combine`.
    """

    rows: Any
    places: Any = None
    weights: Any = None
    counts: Any = None


class _Norms(NamedTuple):
    """One thing of each norm: of the block's row, of the row beside it, of their sum, and of the residual stream."""

    first: Any
    beside: Any
    last: Any
    one: Any
    two: Any
    three: Any


@triton.jit
def _weight(weight, at, SIZE: tl.constexpr):
    scales = at
    if weight is not None:
        scales = tl.load(weight + at, mask=at < SIZE, other=0.0)
    return scales


@triton.jit
def _plus(one, other):
    """Return the sum, rounded to the dtype."""
    return (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)


@triton.jit
def _summed(given, token, at, K: tl.constexpr, arranged: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Return the weighted sum of a token's experts, in slot order."""
    total = tl.zeros([at.shape[0]], tl.float32)
    for slot in tl.static_range(K):
        place = token * K + slot
        weight = tl.load(given.weights + place)
        if arranged:
            place = tl.load(given.places + place).to(tl.int64)
        product = tl.load(given.rows + place * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32) * weight
        total = product if slot == 0 else total + product
    return total.to(dtype)


@triton.jit
def _close(
    given, beside, scalar, residual, weights, outs, share, eps, K: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_WIDTH: tl.constexpr, KINDS: tl.constexpr, arranged: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Take the steps of one row a program; with ``K`` experts of a token, add them up first."""
    FIRST_KIND: tl.constexpr = KINDS.first
    BESIDE_KIND: tl.constexpr = KINDS.beside
    LAST_KIND: tl.constexpr = KINDS.last
    ONE_KIND: tl.constexpr = KINDS.one
    TWO_KIND: tl.constexpr = KINDS.two
    THREE_KIND: tl.constexpr = KINDS.three
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    first, other, last = (
        _weight(weights.first, at, SIZE),
        _weight(weights.beside, at, SIZE),
        _weight(weights.last, at, SIZE),
    )
    one, two, three = _weight(weights.one, at, SIZE), _weight(weights.two, at, SIZE), _weight(weights.three, at, SIZE)
    begin(overlap)  # no kernel writes weights
    token = tl.program_id(0).to(tl.int64)
    here = token * SIZE + at
    before = tl.load(residual + here, mask=inside, other=0.0)
    if K > 0:
        row = _summed(given, token, at, K, arranged, SIZE, before.dtype)
    else:
        row = tl.load(given.rows + here, mask=inside, other=0.0)
    if weights.first is not None:
        row = rms_row(row, first, share, eps.first, FIRST_KIND)
    if beside is not None:
        more = tl.load(beside + here, mask=inside, other=0.0)
        if weights.beside is not None:
            more = rms_row(more, other, share, eps.beside, BESIDE_KIND)
        row = _plus(row, more)
    if weights.last is not None:
        row = rms_row(row, last, share, eps.last, LAST_KIND)
    row = _plus(before, row)
    if scalar is not None:
        row = (row.to(tl.float32) * tl.load(scalar).to(tl.float32)).to(row.dtype)
    tl.store(residual + here, row, mask=inside)
    tl.store(outs.one + here, rms_row(row, one, share, eps.one, ONE_KIND), mask=inside)
    if outs.two is not None:
        tl.store(outs.two + here, rms_row(row, two, share, eps.two, TWO_KIND), mask=inside)
    if outs.three is not None:
        tl.store(outs.three + here, rms_row(row, three, share, eps.three, THREE_KIND), mask=inside)
    if arranged:  # noqa: SIM102 - one is known to the compiler
        if tl.program_id(0) == 0:
            experts = tl.arange(0, EXPERTS_WIDTH)
            tl.store(given.counts + experts, tl.zeros([EXPERTS_WIDTH], tl.int32), mask=experts < EXPERTS)


class BlockNorm(CudaNorm):
    """A norm that may also take the last steps of a block, see :data:`preheat.backends.base.layers.Close`."""

    def close(self, rows: Tensor | Unsummed, residual: Tensor, steps: Closing) -> tuple[Tensor, ...]:
        """Add the ``rows`` of a block to ``residual`` in place, after ``steps``; return the norms of the sum."""
        if not isinstance(rows, Unsummed):
            return _launch(_Rows(rows), residual, steps)
        found = rows.arrangement
        try:
            return _launch(_Rows(rows.rows, found.places, found.weights, found.counts), residual, steps, found)
        except BaseException:
            found.counts.zero_()  # memory may have run out between their use and its end
            raise


def _launch(
    given: _Rows, residual: Tensor, steps: Closing, arrangement: Arrangement | None = None
) -> tuple[Tensor, ...]:
    """Take ``steps`` of ``given`` rows; ``arrangement`` has the places of experts."""
    norms = steps.first, steps.beside_norm, steps.last, *steps.norms, *[None] * (3 - len(steps.norms))
    found = [cast("CudaNorm | None", norm) for norm in norms]
    assert all(norm is None or (norm.kind in KINDS and norm.bias is None) for norm in found)
    size, outs = residual.shape[1], tuple(torch.empty_like(residual) for _ in steps.norms)
    experts = 1 if arrangement is None else len(arrangement.counts)
    _close[(len(residual),)](
        given, steps.beside, steps.scalar, residual, _Norms(*(None if norm is None else norm.weight for norm in found)),
        _Norms(None, None, None, *outs, *[None] * (3 - len(outs))), 1.0 / size,
        _Norms(*(0.0 if norm is None else norm.eps for norm in found)),
        K=0 if arrangement is None else arrangement.top_k,
        EXPERTS=experts, EXPERTS_WIDTH=next_power_of_2(experts),
        KINDS=_Norms(*(None if norm is None else norm.kind for norm in found)),
        arranged=arrangement is not None and arrangement.block > 1, SIZE=size, **layout(size),
    )  # fmt: skip
    return outs
