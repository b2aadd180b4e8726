"""The functions of a model: the front of a layer, its back, one product, and a norm.

Contract, beside that of :mod:`preheat.backends.cpu.llvm.emit`. Activations are float32. An output of a product is one
sum over inputs 0, 1, ... in order, then the bias. A norm's mean of squares is a sum in 16 lanes, then a tree; a row
times the reciprocal of the root is rounded, then times the weight. Attention works split by split of 256 keys at
absolute positions: scores are sums over the head's dimensions in order, times the scale; weights are exp(score - the
split's maximum), their sum is in 16 lanes, then a tree; values are added key by key. Splits are merged in rising order.
Keys and values are rounded to the cache's dtype. A value that is not finite is stored as zero, and its key as NaN.

Work is cut into units of (outputs) or (row, key head). A thread claims the next unit, so sums never depend on threads.
"""

from __future__ import annotations

from llvmlite import ir

from preheat.backends.cpu.llvm.attend import Attend, Cache, append
from preheat.backends.cpu.llvm.emit import POINTER, Value
from preheat.backends.cpu.llvm.job import Job, wait
from preheat.backends.cpu.llvm.kinds import LAYER_FRAME, SPLIT, LayerKind, Product
from preheat.backends.cpu.llvm.norms import norm, norm_row
from preheat.backends.cpu.llvm.products import product


def front(module: ir.Module, name: str, how: LayerKind) -> None:
    """Write the front of a layer: from ``x`` to ``attended``.

    It norms the rows, computes queries, keys and values, stores keys and values in the cache, and attends.
    """
    e = Job(module, name)
    x, qkv, attended = (e.pointer(each) for each in ("x", "qkv", "attended"))
    positions, tables = e.pointer("positions"), e.pointer("tables")
    parts = {each: e.part(each) for each in ("cos", "sin", "cache", "q_norm", "k_norm")}
    window = e.field(e.layer, LAYER_FRAME["window"])
    normed = e.own("normed", e.mul(e.rows, how.hidden))
    width, out_width = how.qkv.outputs, how.heads * how.dim
    group = how.heads // how.kv_heads

    def kept(row: Value, column: Value, vector: Value) -> None:
        e.store(vector, qkv, e.add(e.mul(row, width), column))

    def make() -> None:
        norm(e, how.hidden, how.eps, x, e.part("norm"), normed, e.rows)

    bias = e.part("qkv_bias") if how.qkv.bias else None
    phases = product(e, how.qkv, e.part("qkv"), bias, normed, kept, make)
    wait(e, phases)

    def placed(unit: Value) -> tuple[Value, Value, Value, Cache]:
        head, row = e.div(unit, e.rows), e.rem(unit, e.rows)
        table = e.field(tables, row, POINTER)
        return head, row, e.field(positions, row), Cache(e, how, parts["cache"], table, head)

    phase = e.phase(e.mul(e.rows, how.kv_heads))
    with e.units(*phase) as unit:
        head, row, place, cache = placed(unit)
        append(e, how, e.at(qkv, e.mul(row, width)), parts, cache, head, place)
    wait(e, [phase])
    scores = e.own("scores", group * SPLIT)
    phase = e.phase(e.mul(e.rows, how.kv_heads))
    with e.units(*phase) as unit:
        head, row, place, cache = placed(unit)
        mine, out = e.at(qkv, e.mul(row, width)), e.at(attended, e.mul(row, out_width))
        Attend(e, how, cache, head, (mine, scores, out)).write(place, window)
    wait(e, [phase])
    e.close()


def back(module: ir.Module, name: str, how: LayerKind) -> None:
    """Write the back of a layer: from ``attended`` to ``x``.

    It adds the output projection of ``attended`` to ``x``, then the feed-forward block.
    """
    e = Job(module, name)
    x, attended, inner = (e.pointer(each) for each in ("x", "attended", "inner"))
    normed = e.own("normed", e.mul(e.rows, how.hidden))

    def added(row: Value, column: Value, vector: Value) -> None:
        at = e.add(e.mul(row, how.hidden), column)
        e.store(e.b.fadd(e.vector(x, at), vector), x, at)

    def kept(row: Value, column: Value, vector: Value) -> None:
        e.store(vector, inner, e.add(e.mul(row, how.down.inputs), column))

    def make() -> None:
        norm(e, how.hidden, how.eps, x, e.part("post_norm"), normed, e.rows)

    def bias(each: str, of: Product) -> Value | None:
        return e.part(f"{each}_bias") if of.bias else None

    wait(e, product(e, how.o, e.part("o"), bias("o", how.o), attended, added))
    wait(e, product(e, how.gate_up, e.part("gate_up"), bias("gate_up", how.gate_up), normed, kept, make))
    wait(e, product(e, how.down, e.part("down"), bias("down", how.down), inner, added))
    e.close()


def alone(module: ir.Module, name: str, how: Product) -> None:
    """Write one product, from ``x`` to ``attended``.

    The weight is at ``qkv`` of the layer's frame, and the bias at ``qkv_bias``.
    """
    e = Job(module, name)
    x, out = e.pointer("x"), e.pointer("attended")

    def kept(row: Value, column: Value, vector: Value) -> None:
        e.store(vector, out, e.add(e.mul(row, how.results), column))

    wait(e, product(e, how, e.part("qkv"), e.part("qkv_bias") if how.bias else None, x, kept))
    e.close()


def norms(module: ir.Module, name: str, size: int, eps: float) -> None:
    """Write a norm of each row, from ``x`` to ``attended``.

    The weight is at ``norm`` of the layer's frame.
    """
    e = Job(module, name)
    x, out, weight = e.pointer("x"), e.pointer("attended"), e.part("norm")
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        base = e.mul(row, size)
        norm_row(e, size, eps, e.at(x, base), weight, e.at(out, base))
    wait(e, [phase])
    e.close()
