"""Norms of rows."""

from __future__ import annotations

from preheat.backends.cpu.llvm.emit import LANES, Function, Value


def norm(e: Function, size: int, eps: float, x: Value, weight: Value, out: Value, rows: Value) -> None:
    """Norm ``rows`` rows of ``size`` numbers."""
    with e.loop(0, rows) as row:
        base = e.mul(row, size)
        norm_row(e, size, eps, e.at(x, base), weight, e.at(out, base))


def norm_row(e: Function, size: int, eps: float, x: Value, weight: Value, out: Value) -> None:
    """Norm one row of ``size`` numbers."""
    total = e.variable(e.v(0.0))
    e.set(total, e.v(0.0))
    with e.loop(0, size, LANES) as column:
        each = e.vector(x, column)
        e.set(total, e.fma(each, each, e.get(total)))
    mean = e.b.fmul(e.tree(e.get(total), e.b.fadd), e.f(1.0 / size))
    root = e.intrinsic("sqrt", e.b.fadd(mean, e.f(eps)))
    factor = e.splat(e.b.fdiv(e.f(1.0), root))
    with e.loop(0, size, LANES) as column:
        scaled = e.b.fmul(e.vector(x, column), factor)
        e.store(e.b.fmul(scaled, e.vector(weight, column)), out, column)
