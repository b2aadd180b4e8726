"""Operations on single elements, shared by kernels so that all give the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import COMPILED


@triton.jit
def rounded(wide, like):
    """Return fp32 ``wide`` in the dtype of ``like``, rounded to nearest.

    Hopper rounds two numbers to bfloat16 in one instruction. Triton may instead round each number alone, for example
    where a result is widened again. That instruction has an eighth of the rate, and waits for the unit also needed by
    exponentials.
    """
    if COMPILED and like.dtype == tl.bfloat16:
        found = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [wide], dtype=like.dtype, is_pure=True, pack=2
        )
    else:
        found = wide.to(like.dtype)
    return found


@triton.jit
def plus(wide, product):
    """Return the sum of two fp32 numbers; ``product`` may come from the matrix unit.

    Triton would fold the sum into the product: the matrix unit would begin with ``wide`` instead of zero, and round in
    another way.
    """
    if COMPILED:
        found = tl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [wide, product], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        found = wide + product
    return found


@triton.jit
def silu_mul(gate, up):
    """Return silu(``gate``) * ``up``: silu in fp32, rounded to the dtype of both; the product rounded again."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def clamped_silu_mul(gate, up):
    """Return quick_gelu(``gate``) * (``up`` + 1), both clamped to 7, in fp32, rounded to the dtype once."""
    wide, more = gate.to(tl.float32), up.to(tl.float32)
    wide = tl.where(wide > 7.0, 7.0, wide)
    more = tl.where(more > 7.0, 7.0, tl.where(more < -7.0, -7.0, more)) + 1.0
    return (wide / (tl.exp(wide * -1.702) + 1.0) * more).to(gate.dtype)


FUSED = ("silu_and_mul", "clamped_silu_and_mul")
"""Activations that :func:`combined` knows. They have no sum with a product, which other kernels would fuse."""


@triton.jit
def combined(gate, up, KIND: tl.constexpr):
    """Return the activation ``KIND``, one of :data:`FUSED` or None for silu(gate) * up."""
    return clamped_silu_mul(gate, up) if KIND == "clamped_silu_and_mul" else silu_mul(gate, up)


@triton.jit
def gelu(x):
    """Return GELU by the error function, in fp32, rounded to the dtype."""
    wide = x.to(tl.float32)
    return ((tl.erf(wide * 0.7071067811865476) + 1.0) * (wide * 0.5)).to(x.dtype)


@triton.jit
def gelu_tanh(x):
    """Return GELU approximated by tanh, in fp32, rounded to the dtype."""
    wide = x.to(tl.float32)
    inner = (wide * wide * wide * 0.044715 + wide) * -1.5957691216057308
    return (wide / (tl.exp(inner) + 1.0)).to(x.dtype)


@triton.jit
def capped(x, limit):
    """Return limit * tanh(x / limit), in fp32, rounded to the dtype."""
    bent = tl.div_rn(x.to(tl.float32), limit)
    small = tl.exp(tl.abs(bent) * -2.0)
    size = tl.div_rn(1.0 - small, 1.0 + small)
    return (tl.where(bent < 0.0, -size, size) * limit).to(x.dtype)


@triton.jit
def relu2(x):
    """Return the square of max(x, 0), in fp32, rounded to the dtype; NaN stays NaN."""
    wide = x.to(tl.float32)
    positive = tl.where(wide < 0.0, 0.0, wide)
    return (positive * positive).to(x.dtype)


@triton.jit
def quick_gelu(x):
    """Return x * sigmoid(1.702 * x), in fp32, rounded to the dtype."""
    wide = x.to(tl.float32)
    return (wide / (tl.exp(wide * -1.702) + 1.0)).to(x.dtype)
