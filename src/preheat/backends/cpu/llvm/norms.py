"""Norms of rows.

Contract. Sums of a row are in 16 lanes, then a tree; lanes beyond the row's end count as zero. Sums are multiplied by 1
/ size, the reciprocal of the root is correctly rounded twice. A number less the mean (kind "layer") times the
reciprocal is rounded, then times the factor, then plus the bias. Squares join their sum fused. A factor of kind
"rms_plus_one" is 1 + weight in float32. Kind "identity" copies a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from preheat.backends.cpu.llvm.emit import Function, Value
from preheat.backends.cpu.llvm.kinds import RowNorm
from preheat.ops.kinds import NormKind

Column = Callable[[Value, Value | None], Value]
"""The numbers of a row from a column on, in the lanes of a mask."""


def _mean(e: Function, size: int, join: Callable[[Value, Value], Value], column: Column) -> Value:
    """Return the mean of a row's numbers: each vector joins a sum in 16 lanes by ``join(vector, sum)``."""
    total = e.variable(e.v(0.0))
    e.set(total, e.v(0.0))
    e.over(size, lambda at, mask: e.set(total, join(column(at, mask), e.get(total))))
    return e.b.fmul(e.tree(e.get(total), e.b.fadd), e.f(1.0 / size))


def _scaled(e: Function, how: RowNorm, column: Column) -> Column:
    """Return a row's numbers divided by the root of the mean of their squares."""
    mean = _mean(e, how.size, lambda each, total: e.fma(each, each, total), column)
    root = e.intrinsic("sqrt", e.b.fadd(mean, e.f(how.eps)))
    factor = e.splat(e.b.fdiv(e.f(1.0), root))
    return lambda at, mask: e.b.fmul(column(at, mask), factor)


def _rms(e: Function, how: RowNorm, x: Value) -> Column:
    return _scaled(e, how, lambda at, mask: e.vector(x, at, mask))


def _layer(e: Function, how: RowNorm, x: Value) -> Column:
    mean = e.splat(_mean(e, how.size, e.b.fadd, lambda at, mask: e.vector(x, at, mask)))

    def centered(at: Value, mask: Value | None) -> Value:
        found = e.b.fsub(e.vector(x, at, mask), mean)
        return found if mask is None else e.b.select(mask, found, e.v(0.0))

    return _scaled(e, how, centered)


def _identity(e: Function, how: RowNorm, x: Value) -> Column:
    return lambda at, mask: e.vector(x, at, mask)


NORMS: Mapping[NormKind, Callable[[Function, RowNorm, Value], Column]] = {
    "rms": _rms,
    "rms_plus_one": _rms,
    "layer": _layer,
    "identity": _identity,
}
"""Norms before their factors, by kind."""


def norm(e: Function, how: RowNorm, x: Value, factors: Value, out: Value, rows: Value) -> None:
    """Norm ``rows`` rows."""
    with e.loop(0, rows) as row:
        base = e.mul(row, how.size)
        norm_row(e, how, e.at(x, base), factors, e.at(out, base))


def norm_row(e: Function, how: RowNorm, x: Value, factors: Value, out: Value, *, add: bool = False) -> None:
    """Norm the row at ``x`` to ``out``, or ``add`` it to the numbers there. ``factors`` are followed by the bias."""
    scaled = NORMS[how.kind](e, how, x)

    def column(at: Value, mask: Value | None) -> None:
        found = scaled(at, mask)
        if how.kind != "identity":
            found = e.b.fmul(found, e.vector(factors, at, mask))
        if how.bias:
            found = e.b.fadd(found, e.vector(factors, e.add(at, how.size), mask))
        e.put(e.b.fadd(e.vector(out, at, mask), found) if add else found, out, at, mask)

    e.over(how.size, column)
