"""The functions of a model: the front of a layer, its back, one product, and a norm.

Contract, beside the contracts of :mod:`preheat.backends.cpu.llvm.emit`, of norms, activations, attention and the cache.
Activations are float32. An output of a product is one sum over inputs 0, 1, ... in order, then the bias, then the
activation; last it is kept within a limit, if there is one. A layer's output joins the residual stream in one addition,
after its own norm, if there is one.

Work is cut into units of (outputs), (row, key head) or (row). A thread claims the next unit, so sums never depend on
threads.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from preheat.backends.cpu.llvm.attend import Attend, append, queries_at_once
from preheat.backends.cpu.llvm.cache import Cache
from preheat.backends.cpu.llvm.emit import POINTER, Value
from preheat.backends.cpu.llvm.job import Job, wait
from preheat.backends.cpu.llvm.kinds import LAYER_FRAME, SPLIT, LayerKind, Product, RowNorm
from preheat.backends.cpu.llvm.norms import norm, norm_row
from preheat.backends.cpu.llvm.products import edge, product

Finish = Callable[[Value, Value, Value], None]
"""Use of a product's results: the row, the first column, and 16 results."""


def front(module: ir.Module, name: str, how: LayerKind) -> None:
    """Write the front of a layer: from ``x`` to ``attended``.

    It norms the rows, computes queries, keys and values, stores keys and values in the cache, and attends.
    """
    e = Job(module, name)
    x, qkv, attended = (e.pointer(each) for each in ("x", "qkv", "attended"))
    positions, tables = e.pointer("positions"), e.pointer("tables")
    parts = {each: e.part(each) for each in ("cos", "sin", "cache", "scales", "slopes", "q_norm", "k_norm")}
    window = e.field(e.layer, LAYER_FRAME["window"])
    normed = e.own("normed", e.mul(e.rows, how.hidden))
    width, out_width = how.qkv.results, how.heads * how.dim

    def make() -> None:
        norm(e, how.norm, x, e.part("norm"), normed, e.rows)

    bias = e.part("qkv_bias") if how.qkv.bias else None
    phases = product(e, how.qkv, e.part("qkv"), bias, normed, stored(e, qkv, width), make)
    wait(e, phases)

    def cached(row: Value, head: Value) -> tuple[Value, Cache]:
        return e.field(positions, row), Cache(e, how, parts, e.field(tables, row, POINTER), head)

    phase = e.phase(e.mul(e.rows, how.kv_heads))
    with e.units(*phase) as unit:
        head, row = e.div(unit, e.rows), e.rem(unit, e.rows)
        place, cache = cached(row, head)
        append(e, how, e.at(qkv, e.mul(row, width)), parts, cache, head, place)
    wait(e, [phase])
    together = queries_at_once(how)
    scores = e.own("scores", together * SPLIT)
    phase = e.phase(e.mul(e.rows, how.heads // together))
    with e.units(*phase) as unit:
        first, row = e.mul(e.div(unit, e.rows), together), e.rem(unit, e.rows)
        place, cache = cached(row, e.div(first, how.heads // how.kv_heads))
        mine, out = e.at(qkv, e.mul(row, width)), e.at(attended, e.mul(row, out_width))
        Attend(e, how, cache, first, (mine, scores, out), parts["slopes"]).write(place, window)
    wait(e, [phase])
    e.close()


def back(module: ir.Module, name: str, how: LayerKind) -> None:
    """Write the back of a layer: from ``attended`` to ``x``.

    It adds the output projection of ``attended`` to ``x``, then the feed-forward block.
    """
    e = Job(module, name)
    x, attended, inner = (e.pointer(each) for each in ("x", "attended", "inner"))
    normed = e.own("normed", e.mul(e.rows, how.hidden))

    def make() -> None:
        norm(e, how.post_norm, x, e.part("post_norm"), normed, e.rows)

    def bias(each: str, of: Product) -> Value | None:
        return e.part(f"{each}_bias") if of.bias else None

    def join(each: str, of: Product, rows: Value, out_norm: RowNorm | None) -> None:
        """Add a product to ``x``, with its norm if it has one."""
        target = x if out_norm is None else e.pointer("added")
        finish = added(e, target, how.hidden) if out_norm is None else stored(e, target, how.hidden)
        wait(e, product(e, of, e.part(each), bias(each, of), rows, finish))
        if out_norm is not None:
            add_normed(e, out_norm, target, e.part(f"{each}_norm"), x)

    join("o", how.o, attended, how.o_norm)
    finish = stored(e, inner, how.down.inputs)
    wait(e, product(e, how.gate_up, e.part("gate_up"), bias("gate_up", how.gate_up), normed, finish, make))
    join("down", how.down, inner, how.down_norm)
    e.close()


def stored(e: Job, out: Value, width: int) -> Finish:
    """Return a finish that stores results in rows of ``width`` numbers at ``out``."""

    def finish(row: Value, column: Value, vector: Value) -> None:
        e.put(vector, out, e.add(e.mul(row, width), column), edge(e, width, column))

    return finish


def added(e: Job, out: Value, width: int) -> Finish:
    """Return a finish that adds results to rows of ``width`` numbers at ``out``."""

    def finish(row: Value, column: Value, vector: Value) -> None:
        at, mask = e.add(e.mul(row, width), column), edge(e, width, column)
        e.put(e.b.fadd(e.vector(out, at, mask), vector), out, at, mask)

    return finish


def add_normed(e: Job, how: RowNorm, x: Value, factors: Value, out: Value) -> None:
    """Add the norm of each row at ``x`` to the row at ``out``."""
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        base = e.mul(row, how.size)
        norm_row(e, how, e.at(x, base), factors, e.at(out, base), add=True)
    wait(e, [phase])


def alone(module: ir.Module, name: str, how: Product) -> None:
    """Write one product, from ``x`` to ``attended``.

    The weight is at ``qkv`` of the layer's frame, and the bias at ``qkv_bias``.
    """
    e = Job(module, name)
    x, out = e.pointer("x"), e.pointer("attended")
    bias = e.part("qkv_bias") if how.bias else None
    wait(e, product(e, how, e.part("qkv"), bias, x, stored(e, out, how.results)))
    e.close()


def norms(module: ir.Module, name: str, how: RowNorm) -> None:
    """Write a norm of each row, from ``x`` to ``attended``.

    The factors are at ``norm`` of the layer's frame.
    """
    e = Job(module, name)
    x, out, factors = e.pointer("x"), e.pointer("attended"), e.part("norm")
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        base = e.mul(row, how.size)
        norm_row(e, how, e.at(x, base), factors, e.at(out, base))
    wait(e, [phase])
    e.close()
