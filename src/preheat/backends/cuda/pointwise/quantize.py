"""Float8 codes and scales of activations on CUDA.

The contract is in :mod:`preheat.ops.quantization`. One launch before a layer with float8 activations computes them, or
a part of the norm before the layer (:mod:`preheat.backends.cuda.pointwise.norm`) or of the activation.

A maximum has no order, so the layout of a row changes no bits. Neither does the number of ranks: ranks exchange the
greatest magnitudes of their parts, and each rank takes the greatest of all. Divisions are IEEE's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import COMPILED, begin, options
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2
from preheat.backends.cuda.pointwise.elementwise import silu_mul
from preheat.backends.cuda.ranks.collective import RankSums
from preheat.ops.kinds import ActivationScales
from preheat.ops.quantization import E4M3, E4M3_MAX, LEAST_SCALE, PROMOTED, QuantizedRows

MOST: tl.constexpr = tl.constexpr(E4M3_MAX)
LEAST: tl.constexpr = tl.constexpr(LEAST_SCALE)
GROUP: tl.constexpr = tl.constexpr(PROMOTED)


@triton.jit
def store_codes(
    row, static, codes, scales, token, SIZE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, greatest=None
):
    """Store codes and scales of ``row`` [WIDTH] at the place of ``token``.

    The row has SIZE numbers and zeros beyond. ``greatest`` is the greatest magnitude of the token's whole row, if
    ``row`` is a part of it.

    The codes are stored as a matrix with a row for each group. A store of eight bits as wide as the row would change
    the layout of the row over threads, and so the order of a norm's sum.
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
    """Return ``x`` / ``y`` rounded to nearest, given the ``reciprocal`` of y rounded to nearest.

    Three instructions instead of a division (Markstein, "Computation of elementary functions on the IBM RISC
    System/6000 processor", 1990). y is neither so small nor so large that an underflow of a step would matter to eight
    bits.
    """
    near = x * reciprocal
    zeros = tl.zeros_like(x)
    return tl.fma(tl.fma(-near, y + zeros, x), reciprocal + zeros, near)


@triton.jit
def _place(places):
    """Return the row of a program: its own number, or its entry in ``places``."""
    row = tl.program_id(0)
    if places is not None:
        row = tl.load(places + row)
    return row.to(tl.int64)


@triton.jit
def _quantize(
    x, out, static, places, maxima, codes, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    WORLD: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Quantize one row a program.

    If there is ``out``, the row is silu of the first half of x times the second half, and is also written to ``out``.
    If a row's numbers are spread over WORLD ranks, ``maxima`` [WORLD, programs] holds the ranks' greatest magnitudes.
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
    """Write the greatest magnitude of one row a program."""
    begin(overlap)
    at = tl.arange(0, WIDTH)
    row = tl.load(x + _place(places) * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(maxima + tl.program_id(0), tl.max(tl.abs(row.to(tl.float32)), 0))


def empty_codes(x: Tensor, kind: ActivationScales) -> tuple[Tensor, Tensor]:
    """Return empty codes and scales for rows like ``x`` [rows, inputs]."""
    rows, inputs = x.shape
    groups = cdiv(inputs, PROMOTED) if kind == "block" else 1
    codes = torch.empty((rows, inputs), dtype=E4M3, device=x.device)
    return codes, torch.empty((rows, groups), dtype=torch.float32, device=x.device)


def quantize_rows(x: Tensor, kind: ActivationScales, static: Tensor | None) -> QuantizedRows:
    """Return ``x`` [rows, inputs], contiguous, quantized."""
    return _launch(x, None, empty_codes(x, kind), kind, static)


def silu_and_quantize(gate_up: Tensor, kind: ActivationScales, static: Tensor | None) -> QuantizedRows:
    """Return silu(gate) * up, quantized and plain.

    ``gate_up`` [rows, 2 * inputs] is contiguous, gate first.
    """
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    return _launch(gate_up, out, empty_codes(out, kind), kind, static)


def _launch(
    x: Tensor, out: Tensor | None, room: tuple[Tensor, Tensor], kind: ActivationScales, static: Tensor | None
) -> QuantizedRows:
    codes, scales = room
    _quantize[(len(x),)](x, out, static, None, None, codes, scales, KIND=kind, WORLD=1, **_layout(codes))
    return QuantizedRows(codes, scales, out)


def quantize_parts(x: Tensor, ranks: RankSums, places: Tensor | None = None) -> QuantizedRows:
    """Quantize rows spread over ``ranks``, each with one scale for the whole row.

    ``x`` [rows, inputs of this rank] is contiguous. Ranks send one number for each row. ``places`` int32: only these
    rows, in an order on which all ranks agree.
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
    """Return keywords of a launch of one program for each row of ``x``."""
    width = next_power_of_2(x.shape[1])
    return {"SIZE": x.shape[1], "WIDTH": width, **options(num_warps=min(max(width // 512, 1), 8), num_stages=1)}
