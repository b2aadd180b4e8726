"""Fused multiply-add for processors without the instruction.

Contract: the bits of the instruction. The product of two floats is exact in double precision. The sum is rounded to
odd there: an inexact sum has its last bit set. Rounding that double to float is then rounding the exact sum once (Boldo
and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

Value = Any
_DOUBLE, _LONG = ir.DoubleType(), ir.IntType(64)


def multiply_add(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    """Return ``x * y + z`` rounded once; the arguments are floats, or vectors of floats."""
    kind = x.type
    wide, long = (_like(kind, each) for each in (_DOUBLE, _LONG))
    product, added = b.fmul(b.fpext(x, wide), b.fpext(y, wide)), b.fpext(z, wide)
    total = b.fadd(product, added)
    part = b.fsub(total, product)
    error = b.fadd(b.fsub(product, b.fsub(total, part)), b.fsub(added, part))  # exact: Knuth's sum of two
    bits, error_bits = b.bitcast(total, long), b.bitcast(error, long)
    even = b.icmp_signed("==", b.and_(bits, _constant(long, 1)), _constant(long, 0))
    inexact = b.fcmp_ordered("!=", error, _constant(wide, 0.0))  # False for NaN, of a sum that is not finite
    toward_zero = b.icmp_signed("<", b.xor(bits, error_bits), _constant(long, 0))
    step = b.select(toward_zero, _constant(long, -1), _constant(long, 1))
    odd = b.add(bits, b.select(b.and_(even, inexact), step, _constant(long, 0)))
    return b.fptrunc(b.bitcast(odd, wide), kind)


def _like(kind: ir.Type, element: ir.Type) -> ir.Type:
    """Return ``element``, or a vector of it if ``kind`` is a vector."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _constant(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)
