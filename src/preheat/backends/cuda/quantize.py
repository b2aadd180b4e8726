"""Float8 codes and scales of activations on CUDA, by the contract of :mod:`preheat.ops.quantization`: one launch before
a layer with float8 activations, or part of the norm before it (:mod:`preheat.backends.cuda.norm`) or of the activation.

A maximum has no order, so how a row is laid out changes no bits. Divisions are IEEE's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.elementwise import silu_mul
from preheat.backends.cuda.launch import COMPILED, begin, options
from preheat.ops.kinds import ActivationScales
from preheat.ops.quantization import E4M3, E4M3_MAX, LEAST_SCALE, PROMOTED, QuantizedRows

MOST: tl.constexpr = tl.constexpr(E4M3_MAX)
LEAST: tl.constexpr = tl.constexpr(LEAST_SCALE)
GROUP: tl.constexpr = tl.constexpr(PROMOTED)


@triton.jit
def store_codes(row, static, codes, scales, token, SIZE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Codes and scales of a ``row`` [WIDTH] of SIZE numbers, zeros beyond, go to the place of ``token``.

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
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), 1), tl.full([GROUPS], MOST, tl.float32)), LEAST)
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
def _quantize(
    x, out, static, codes, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, overlap: tl.constexpr
):
    """One row a program; of silu of the first half of x times the other, which goes to ``out``, if there is one."""
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    if out is None:
        row = tl.load(x + token * SIZE + at, mask=inside, other=0.0)
    else:
        gate = tl.load(x + token * 2 * SIZE + at, mask=inside, other=0.0)
        row = silu_mul(gate, tl.load(x + token * 2 * SIZE + SIZE + at, mask=inside, other=0.0))
        tl.store(out + token * SIZE + at, row, mask=inside)
    store_codes(row, static, codes, scales, token, SIZE, WIDTH, KIND)


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
    size = codes.shape[1]
    width = triton.next_power_of_2(size)
    _quantize[(len(x),)](
        x, out, static, codes, scales, SIZE=size, WIDTH=width, KIND=kind,
        **options(num_warps=min(max(width // 512, 1), 8), num_stages=1),
    )  # fmt: skip
    return QuantizedRows(codes, scales, out)
