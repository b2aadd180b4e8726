"""What more than one kernel computes of single elements: one text, so that all give the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.launch import COMPILED


@triton.jit
def rounded(wide, like):
    """fp32 ``wide`` in the dtype of ``like``, to nearest.

    Hopper rounds two numbers to bfloat16 in one instruction. Triton may round each alone instead, as where a result is
    widened again: by one that has an eighth of the rate, and waits for the unit that exponentials need, too.
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
    """The sum of two fp32 numbers, of which ``product`` may be one of the matrix unit that began with zero: Triton
    would have that begin with ``wide`` instead, which is rounded in another way.
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
    """silu(``gate``) * ``up``: silu in fp32, rounded to the dtype of both; the product rounded again."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gelu(x):
    """GELU by the error function, in fp32, rounded to the dtype."""
    wide = x.to(tl.float32)
    return ((tl.erf(wide * 0.7071067811865476) + 1.0) * (wide * 0.5)).to(x.dtype)


@triton.jit
def gelu_tanh(x):
    """GELU approximated by tanh, in fp32, rounded to the dtype."""
    wide = x.to(tl.float32)
    inner = (wide * wide * wide * 0.044715 + wide) * -1.5957691216057308
    return (wide / (tl.exp(inner) + 1.0)).to(x.dtype)


@triton.jit
def quick_gelu(x):
    """x * sigmoid(1.702 * x), in fp32, rounded to the dtype."""
    wide = x.to(tl.float32)
    return (wide / (tl.exp(wide * -1.702) + 1.0)).to(x.dtype)
