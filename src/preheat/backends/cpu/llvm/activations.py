"""Activations of 16 numbers.

Contract, in float32 with exp as :mod:`preheat.backends.cpu.llvm.emit` has it. silu: x / (1 + exp(-x)). quick_gelu: x /
(1 + exp(-1.702 * x)). gelu_tanh: x / (1 + exp(-2 * sqrt(2 / pi) * (x * x * x * 0.044715 + x))), the cube rounded
twice, its product and sum fused. gelu: x times the share of the normal distribution below x. The share above t *
sqrt(2) is exp(-t * p(t)) / 2 for t from 0 to 4.5, then zero. p is a polynomial of degree 8, fused from the highest term
on. It approximates -log(erfc(t)) / t so that erfc has an error of 3e-9. Gated activations multiply by up in the end.
clamped_silu_and_mul keeps the gate at 7 or less and up between -7 and 7, and multiplies quick_gelu of the gate by up +
1.
relu2: the square of the greater of x and 0; NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from preheat.backends.cpu.llvm.emit import Function, Value
from preheat.ops.kinds import Activation

Emit = Callable[[Function, Value], Value]

_TAIL = (
    -8.044105015869718e-06, 0.00010602919064695016, -0.0005879598902538419, 0.0015767775475978851,
    -5.879998570890166e-05, -0.019217131659388542, 0.10279920697212219, 0.6366161108016968, 1.1283793449401855,
)  # fmt: skip
_TAIL_END = 4.5

CLAMP = 7.0
"""The bound of :data:`preheat.ops.activation.CLAMP`; the emitters import no torch."""


def _sigmoid_times(e: Function, x: Value, power: Value) -> Value:
    """Return ``x`` / (1 + exp(``power``))."""
    return e.b.fdiv(x, e.b.fadd(e.v(1.0), e.exp(power)))


def _silu(e: Function, x: Value) -> Value:
    return _sigmoid_times(e, x, e.b.fneg(x))


def _quick_gelu(e: Function, x: Value) -> Value:
    return _sigmoid_times(e, x, e.b.fmul(x, e.v(-1.702)))


def _gelu_tanh(e: Function, x: Value) -> Value:
    cube = e.b.fmul(e.b.fmul(x, x), x)
    inner = e.fma(cube, e.v(0.044715), x)
    return _sigmoid_times(e, x, e.b.fmul(inner, e.v(-2 * math.sqrt(2 / math.pi))))


def _gelu(e: Function, x: Value) -> Value:
    b = e.b
    t = b.fmul(e.intrinsic("fabs", x), e.v(math.sqrt(0.5)))
    total = e.v(_TAIL[0])
    for term in _TAIL[1:]:
        total = e.fma(total, t, e.v(term))
    above = b.fmul(e.v(0.5), e.exp(b.fneg(b.fmul(total, t))))
    above = b.select(b.fcmp_ordered(">", t, e.v(_TAIL_END)), e.v(0.0), above)
    below = b.select(b.fcmp_ordered("<", x, e.v(0.0)), above, b.fsub(e.v(1.0), above))
    return b.fmul(x, below)


def _relu2(e: Function, x: Value) -> Value:
    positive = e.b.select(e.b.fcmp_ordered("<", x, e.v(0.0)), e.v(0.0), x)
    return e.b.fmul(positive, positive)


def _clamped(e: Function, x: Value) -> Value:
    return _quick_gelu(e, e.b.select(e.b.fcmp_ordered(">", x, e.v(CLAMP)), e.v(CLAMP), x))


def _clamped_up(e: Function, x: Value) -> Value:
    return e.b.fadd(kept_between(e, x, CLAMP), e.v(1.0))


UPS: Mapping[Activation, Emit] = {"clamped_silu_and_mul": _clamped_up}
"""Changes of the up of a gated activation, where there is one."""

ACTIVATIONS: Mapping[Activation, Emit] = {
    "silu_and_mul": _silu,
    "clamped_silu_and_mul": _clamped,
    "gelu_tanh_and_mul": _gelu_tanh,
    "gelu_and_mul": _gelu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu2": _relu2,
}
"""Activations by name; of a gated one, the activation of the gate."""


def kept_between(e: Function, x: Value, limit: float) -> Value:
    """Return ``x`` kept between -``limit`` and ``limit``; NaN stays NaN."""
    b = e.b
    x = b.select(b.fcmp_ordered(">", x, e.v(limit)), e.v(limit), x)
    return b.select(b.fcmp_ordered("<", x, e.v(-limit)), e.v(-limit), x)
