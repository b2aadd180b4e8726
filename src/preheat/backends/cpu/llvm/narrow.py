"""Numbers of 16 and 8 bits in memory.

Contract. A narrow number is widened exactly. A float is rounded to the nearest narrow number, ties to even; NaN stays
NaN. Except in bfloat16, a float beyond the greatest narrow number becomes that number. Only integer operations, single
additions and exact products occur, so no processor needs instructions for these numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir

from preheat.backends.cpu.llvm.emit import FLOATS, HALVES, LANES, WORDS, Function, Value
from preheat.backends.cpu.llvm.kinds import Stored

_MANTISSA, _BIAS, _SIGN = 23, 127, -(1 << 31)


class Narrow(NamedTuple):
    """A format: all bits, the mantissa's bits, the exponent's bias, the greatest number, and NaN's code."""

    bits: int
    mantissa: int
    bias: int
    most: float
    nan: int

    @property
    def kind(self) -> ir.Type:
        """LLVM's type of one number."""
        return ir.IntType(self.bits)

    @property
    def least(self) -> float:
        """The least normal number."""
        return float(2.0 ** (1 - self.bias))

    def widened(self, e: Function, codes: Value) -> Value:
        """Return 16 numbers as floats."""
        b, words = e.b, e.b.zext(codes, WORDS)
        if self.bias == _BIAS:
            return b.bitcast(b.shl(words, e.w(_MANTISSA - self.mantissa)), FLOATS)
        size = b.and_(words, e.w((1 << (self.bits - 1)) - 1))
        small = b.icmp_signed("<", size, e.w(1 << self.mantissa))
        shifted = b.add(b.shl(size, e.w(_MANTISSA - self.mantissa)), e.w((_BIAS - self.bias) << _MANTISSA))
        # A number below the least normal one is read as if it were normal, with a one too much in front.
        raised = b.bitcast(b.add(shifted, b.select(small, e.w(1 << _MANTISSA), e.w(0))), FLOATS)
        found = b.fsub(raised, b.select(small, e.v(self.least), e.v(0.0)))
        found = b.select(b.icmp_signed(">=", size, e.w(self.nan)), e.v(float("nan")), found)
        sign = b.and_(b.shl(words, e.w(32 - self.bits)), e.w(_SIGN))
        return b.bitcast(b.or_(b.bitcast(found, WORDS), sign), FLOATS)

    def narrowed(self, e: Function, x: Value) -> Value:
        """Return the codes of the numbers nearest to the 16 floats ``x``."""
        b, dropped = e.b, _MANTISSA - self.mantissa
        unknown = b.fcmp_unordered("uno", x, x)
        bits = b.bitcast(x, WORDS)
        size = b.and_(bits, e.w(~_SIGN))
        if self.bias != _BIAS:
            size = b.select(b.icmp_signed(">", size, e.w(_bits(self.most))), e.w(_bits(self.most)), size)
        odd = b.and_(b.lshr(size, e.w(dropped)), e.w(1))
        code = b.lshr(b.add(size, b.add(odd, e.w((1 << (dropped - 1)) - 1))), e.w(dropped))
        if self.bias != _BIAS:
            code = self._code(e, code, size)
        sign = b.lshr(b.and_(bits, e.w(_SIGN)), e.w(32 - self.bits))
        code = b.select(unknown, e.w(self.nan), b.or_(code, sign))
        return b.trunc(code, ir.VectorType(self.kind, LANES))

    def _code(self, e: Function, code: Value, size: Value) -> Value:
        """Return the code with this format's bias, for floats of the bits ``size``; ``code`` has float32's."""
        b = e.b
        small = b.icmp_signed("<", size, e.w(_bits(self.least)))
        steps = b.fmul(b.bitcast(size, FLOATS), e.v(2.0 ** (self.bias - 1 + self.mantissa)))
        steps = b.select(small, e.intrinsic("roundeven", steps), e.v(0.0))
        return b.select(small, b.fptosi(steps, WORDS), b.sub(code, e.w((_BIAS - self.bias) << self.mantissa)))


def _bits(x: float) -> int:
    """Return the bits of a float32 that is not negative."""
    return int(np.float32(x).view(np.int32))


def numbers(e: Function, address: Value, stored: Stored) -> Value:
    """Load 16 numbers as floats. Float16 numbers are finite, and the processor widens them."""
    if stored == "float32":
        return e.vector(address)
    if stored == "float16":
        return e.b.fpext(e.b.load(address, typ=ir.VectorType(ir.HalfType(), LANES), align=2), FLOATS)
    return NARROW[stored].widened(e, e.b.load(address, typ=HALVES, align=2))


NARROW = {
    "bfloat16": Narrow(16, 7, 127, 3.3895313892515355e38, 0x7FC0),
    "float16": Narrow(16, 10, 15, 65504.0, 0x7E00),
    "float8_e4m3fn": Narrow(8, 3, 7, 448.0, 0x7F),
    "float8_e5m2": Narrow(8, 2, 15, 57344.0, 0x7F),
}
"""Formats by the names of torch's dtypes."""
