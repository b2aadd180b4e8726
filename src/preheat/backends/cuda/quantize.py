"""Float8 codes and scales of activations on CUDA, by the contract of :mod:`preheat.ops.quantization`: one launch before
a layer with float8 activations, or part of the norm before it (:mod:`preheat.backends.cuda.norm`) or of the activation.

A maximum has no order, so how a row is laid out changes no bits, nor how many ranks it is spread over: they exchange
the greatest magnitudes of their parts, and each takes the greatest of all. Divisions are IEEE's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.collective import RankSums
from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import COMPILED, begin, options
from preheat.ops.kinds import ActivationScales
from preheat.ops.quantization import E4M3, E4M3_MAX, LEAST_SCALE, PROMOTED, QuantizedRows

MOST: tl.constexpr = tl.constexpr(E4M3_MAX)
LEAST: tl.constexpr = tl.constexpr(LEAST_SCALE)
GROUP: tl.constexpr = tl.constexpr(PROMOTED)


@triton.jit
def store_codes(
    row, static, codes, scales, token, SIZE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, greatest=None
):
    """Codes and scales of a ``row`` [WIDTH] of SIZE numbers, zeros beyond, go to the place of ``token``. ``greatest``:
    its greatest magnitude, where it is a part of the token's row.

    They are stored as a matrix with a row for each group: a store of eight bits as wide as the row would change how the
    row itself is spread over threads, and so the order in which a norm adds it up.
    """
    BLOCK: tl.constexpr = KIND == "block" and WIDTH > GROUP
    GROUPS: tl.constexpr = WIDTH // GROUP if BLOCK else 1
    STORED: tl.constexpr = (SIZE + GROUP - 1) // GROUP if BLOCK else 1
    wide = tl.reshape(row.to(tl.float32), [GROUPS, WIDTH // GROUPS])
    group = tl.arange(0, GROUPS)
    if KIND == "static":
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(static)
    else:
        top = tl.max(tl.abs(wide), 1)
        if greatest is not None:
            top = tl.zeros([GROUPS], tl.float32) + greatest
        scale = tl.maximum(tl.div_rn(top, tl.full([GROUPS], MOST, tl.float32)), LEAST)
    each = tl.zeros([GROUPS, WIDTH // GROUPS], tl.float32) + scale[:, None]
    if COMPILED and KIND != "static":
        quotient = divided(wide, each, tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)[:, None])
    else:
        quotient = tl.div_rn(wide, each)
        quotient = tl.maximum(quotient, -MOST, propagate_nan=tl.PropagateNan.ALL)
        quotient = tl.minimum(quotient, MOST, propagate_nan=tl.PropagateNan.ALL)
    at = group[:, None] * (WIDTH // GROUPS) + tl.arange(0, WIDTH // GROUPS)[None, :]
    tl.store(codes + token * SIZE + at, quotient.to(tl.float8e4nv), mask=at < SIZE)
    tl.store(scales + token * STORED + group, scale, mask=group < STORED)


@triton.jit
def divided(x, y, reciprocal):
    """``x`` / ``y`` rounded to nearest, given the ``reciprocal`` of y so rounded (Markstein, "Computation of elementary
    functions on the IBM RISC System/6000 processor", 1990): three instructions instead of a division. y is neither
    so small nor so large that a step underflows, where it would matter to eight bits.
    """
    near = x * reciprocal
    zeros = tl.zeros_like(x)
    return tl.fma(tl.fma(-near, y + zeros, x), reciprocal + zeros, near)


@triton.jit
def _place(places):
    """The row of a program: its own, or that of its slot."""
    row = tl.program_id(0)
    if places is not None:
        row = tl.load(places + row)
    return row.to(tl.int64)


@triton.jit
def _quantize(
    x, out, static, places, maxima, codes, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    WORLD: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One row a program; of silu of the first half of x times the other, which goes to ``out``, if there is one; of
    WORLD ranks' ``maxima`` [WORLD, programs], where its numbers are spread over them.
    """
    begin(overlap)
    token = _place(places)
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    if out is None:
        row = tl.load(x + token * SIZE + at, mask=inside, other=0.0)
    else:
        gate = tl.load(x + token * 2 * SIZE + at, mask=inside, other=0.0)
        row = silu_mul(gate, tl.load(x + token * 2 * SIZE + SIZE + at, mask=inside, other=0.0))
        tl.store(out + token * SIZE + at, row, mask=inside)
    greatest = None
    if maxima is not None:
        greatest = tl.max(tl.load(maxima + tl.arange(0, WORLD) * tl.num_programs(0) + tl.program_id(0)), 0)
    store_codes(row, static, codes, scales, token, SIZE, WIDTH, KIND, greatest)


@triton.jit
def _greatest(x, places, maxima, SIZE: tl.constexpr, WIDTH: tl.constexpr, overlap: tl.constexpr):
    """The greatest magnitude of one row a program."""
    begin(overlap)
    at = tl.arange(0, WIDTH)
    row = tl.load(x + _place(places) * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(maxima + tl.program_id(0), tl.max(tl.abs(row.to(tl.float32)), 0))


def empty_codes(x: Tensor, kind: ActivationScales) -> tuple[Tensor, Tensor]:
    """Room for codes and scales of rows like ``x`` [rows, inputs]."""
    rows, inputs = x.shape
    groups = triton.cdiv(inputs, PROMOTED) if kind == "block" else 1
    codes = torch.empty((rows, inputs), dtype=E4M3, device=x.device)
    return codes, torch.empty((rows, groups), dtype=torch.float32, device=x.device)


def quantize_rows(x: Tensor, kind: ActivationScales, static: Tensor | None) -> QuantizedRows:
    """``x`` [rows, inputs], contiguous, quantized."""
    return _launch(x, None, empty_codes(x, kind), kind, static)


def silu_and_quantize(gate_up: Tensor, kind: ActivationScales, static: Tensor | None) -> QuantizedRows:
    """silu(gate) * up for ``gate_up`` [rows, 2 * inputs], contiguous, gate first: quantized and plain."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    return _launch(gate_up, out, empty_codes(out, kind), kind, static)


def _launch(
    x: Tensor, out: Tensor | None, room: tuple[Tensor, Tensor], kind: ActivationScales, static: Tensor | None
) -> QuantizedRows:
    codes, scales = room
    _quantize[(len(x),)](x, out, static, None, None, codes, scales, KIND=kind, WORLD=1, **_layout(codes))
    return QuantizedRows(codes, scales, out)


def quantize_parts(x: Tensor, ranks: RankSums, places: Tensor | None = None) -> QuantizedRows:
    """``x`` [rows, inputs of this rank], contiguous, each row quantized with the scale of what all ``ranks`` have of
    it: they send a number for each row. ``places`` int32: these rows alone, in an order that ranks agree on.
    """
    count = len(x) if places is None else len(places)
    mine = torch.empty(count, dtype=torch.float32, device=x.device)
    _greatest[(count,)](x, places, mine, **_layout(x))
    codes, scales = empty_codes(x, "token")
    _quantize[(count,)](
        x, None, None, places, ranks.gather(mine), codes, scales, KIND="token", WORLD=ranks.world, **_layout(x)
    )
    return QuantizedRows(codes, scales, None)


def _layout(x: Tensor) -> dict[str, Any]:
    """Keywords of a launch of one program for each row of ``x``."""
    width = triton.next_power_of_2(x.shape[1])
    return {"SIZE": x.shape[1], "WIDTH": width, **options(num_warps=min(max(width // 512, 1), 8), num_stages=1)}
