"""The functions of a model: the front of a layer, its back, one product, a norm, and copies of rows.

Contract, beside the contracts of :mod:`preheat.backends.cpu.llvm.emit`, of norms, activations, attention and the cache.
Activations are float32. An output of a product is one sum over inputs 0, 1, ... in order, then the bias, then the
activation; last it is kept within a limit or multiplied by a factor, if there is one. A layer's output joins the
residual stream in one addition, after its own norm, if there is one.

Work is cut into units of (outputs), (row, key head) or (row). A thread claims the next unit, so sums never depend on
threads.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from preheat.backends.cpu.llvm.attend import Attend, Token, append, queries_at_once, tokens_at_once
from preheat.backends.cpu.llvm.cache import Cache
from preheat.backends.cpu.llvm.emit import INT, LONG, POINTER, WORD, Value
from preheat.backends.cpu.llvm.job import Job, Once, wait
from preheat.backends.cpu.llvm.kinds import LAYER_FRAME, SPLIT, LayerKind, Product, RowNorm
from preheat.backends.cpu.llvm.norms import norm, norm_row
from preheat.backends.cpu.llvm.products import Finish, added, product, stored
from preheat.backends.cpu.llvm.routed import experts

WHOLE_ROWS = 16
"""Rows of a step from which a thread claims all key heads of a row at once: the claim of one head takes longer than to
write its key and its value."""


def front(module: ir.Module, name: str, how: LayerKind) -> None:
    """Write the front of a layer: from ``x`` to ``attended``.

    It norms the rows, or takes the given rows, computes queries, keys and values, stores keys and values in the cache,
    and attends.
    """
    e = Job(module, name)
    x, qkv, attended = (e.pointer(each) for each in ("x", "qkv", "attended"))
    positions, tables = e.pointer("positions"), e.pointer("tables")
    names = "cos", "sin", "cache", "scales", "slopes", "q_norm", "k_norm", "growth", "sinks", "distances"
    parts = {each: e.part(each) for each in names}
    window, group = (e.field(e.layer, LAYER_FRAME[each]) for each in ("window", "group"))
    width, out_width = how.qkv.results, how.heads * how.dim
    if how.norm is None:
        wait(e, product(e, how.qkv, "qkv", e.pointer("given"), stored(e, qkv, width)))
    else:
        normed, make = read_normed(e, how.norm, x, "norm")
        wait(e, product(e, how.qkv, "qkv", normed, stored(e, qkv, width), make))

    if how.whole_qk_norm is not None:
        _norm_heads(e, how.whole_qk_norm, qkv, width, (parts["q_norm"], parts["k_norm"]))

    def cached(row: Value, head: Value) -> tuple[Value, Cache]:
        table = e.at(e.field(tables, row, POINTER), group, WORD)
        return e.field(positions, row), Cache(e, how, parts, table, head)

    heads = e.choose(e.less(e.rows, WHOLE_ROWS), 1, how.kv_heads)  # of a unit
    phase = e.phase(e.mul(e.rows, e.div(how.kv_heads, heads)))
    with e.units(*phase) as unit, e.loop(0, heads) as number:
        head, row = e.add(e.mul(e.div(unit, e.rows), heads), number), e.rem(unit, e.rows)
        place, cache = cached(row, head)
        turns_at = row if how.by_token else place
        append(e, how, e.at(qkv, e.mul(row, width)), parts, cache, head, (place, turns_at))
    wait(e, [phase])
    together, count = queries_at_once(how), tokens_at_once(how)
    scores, ends = e.own("scores", together * count * SPLIT), e.pointer("ends")

    def attend(first: Value, row: Value, tokens: int) -> None:
        _, cache = cached(row, e.div(first, how.heads // how.kv_heads))
        some = [
            Token(e.at(qkv, e.mul(each, width)), e.at(attended, e.mul(each, out_width)), e.field(positions, each))
            for each in (e.add(row, number) for number in range(tokens))
        ]
        end = e.add(some[0].place, 1) if how.causal else e.field(ends, row)
        Attend(e, how, cache, first, some, scores, parts).write(window, end)

    groups = e.rows if count == 1 else e.div(e.add(e.rows, count - 1), count)
    phase = e.phase(e.mul(groups, how.heads // together))
    with e.units(*phase) as unit:
        first, row = e.mul(e.div(unit, groups), together), e.mul(e.rem(unit, groups), count)
        if count == 1:
            attend(first, row, 1)
        else:
            _by_text(e, tables, window, (row, count), lambda at, tokens: attend(first, at, tokens))
    wait(e, [phase])
    e.close()


def _by_text(
    e: Job, tables: Value, window: Value, span: tuple[Value, int], attend: Callable[[Value, int], None]
) -> None:
    """Let the tokens of ``span`` (first, count) attend together if they see the same keys, else one by one.

    Tokens of one text without a window see the same keys. Tokens of a text lie side by side.
    """
    row, count = span
    last, end = e.add(row, count - 1), e.least(e.add(row, count), e.rows)
    same = e.b.icmp_signed("==", e.field(tables, row), e.field(tables, e.sub(end, 1)))
    together = e.b.and_(e.b.and_(e.less(last, e.rows), same), e.b.icmp_signed("==", window, e.i(0)))
    with e.when(together):
        attend(row, count)
    with e.when(e.b.not_(together)), e.loop(row, end) as each:
        attend(each, 1)


def _norm_heads(
    e: Job, norms: tuple[RowNorm, RowNorm], qkv: Value, width: int, factors: tuple[Value, Value]
) -> None:  # fmt: skip
    """Norm all query heads of a row together, and all key heads; a row of ``qkv`` has ``width`` numbers."""
    phases, first = [], 0
    for how, each in zip(norms, factors, strict=True):
        phases.append(phase := e.phase(e.rows))
        with e.units(*phase) as row:
            place = e.at(qkv, e.add(e.mul(row, width), first))
            norm_row(e, how, place, each, place)
        first += how.size
    wait(e, phases)


def back(module: ir.Module, name: str, how: LayerKind) -> None:
    """Write the back of a layer: from ``attended`` to ``x``.

    It adds the output projection of ``attended`` to ``x``, then the feed-forward block or the routed experts. In a
    parallel layer the block reads ``x`` before the addition, but is added after it.
    """
    e = Job(module, name)
    x, attended, inner = (e.pointer(each) for each in ("x", "attended", "inner"))

    def join(name: str, out_norm: RowNorm | None, write: Callable[[Finish], None]) -> None:
        """Add the results that ``write`` gives to ``x``, with their norm if they have one."""
        target = x if out_norm is None else e.pointer("added")
        write(added(e, target, how.hidden) if out_norm is None else stored(e, target, how.hidden))
        if out_norm is not None:
            add_normed(e, out_norm, target, e.part(f"{name}_norm"), x)

    def gate_up() -> None:
        normed, make = read_normed(e, how.post_norm, x, "post_norm")
        wait(e, product(e, how.gate_up, "gate_up", normed, stored(e, inner, how.down.inputs), make))

    def block(finish: Finish) -> None:
        if how.routed is not None:
            normed, make = read_normed(e, how.post_norm, x, "post_norm")
            experts(e, how, how.routed, normed, make, finish)
            return
        if not how.parallel:
            gate_up()
        wait(e, product(e, how.down, "down", inner, finish))

    if how.parallel:
        assert how.routed is None, "no model has routed experts beside attention"
        gate_up()
    join("o", how.o_norm, lambda finish: wait(e, product(e, how.o, "o", attended, finish)))
    join("down", how.down_norm, block)
    e.close()


def read_normed(e: Job, how: RowNorm, x: Value, name: str) -> tuple[Value, Once]:
    """Return the place of the norm of the rows at ``x``, and the code that a thread runs before it reads there.

    Each thread norms all rows for itself. A norm that replaces the rows is made once, row by row, in a phase before.
    """
    factors = e.part(name)
    if not how.replaces:
        normed = e.own("normed", e.mul(e.rows, how.size))
        return normed, Once(e, lambda: norm(e, how, x, factors, normed, e.rows))
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        at = e.at(x, e.mul(row, how.size))
        norm_row(e, how, at, factors, at)
    wait(e, [phase])
    return x, Once(e, lambda: None)


def add_normed(e: Job, how: RowNorm, x: Value, factors: Value, out: Value) -> None:
    """Add the norm of each row at ``x`` to the row at ``out``."""
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        base = e.mul(row, how.size)
        norm_row(e, how, e.at(x, base), factors, e.at(out, base), add=True)
    wait(e, [phase])


def alone(module: ir.Module, name: str, how: Product) -> None:
    """Write one product, from ``x`` to ``attended``.

    Its operands are at ``qkv`` of the layer's frame, as in a front.
    """
    e = Job(module, name)
    x, out = e.pointer("x"), e.pointer("attended")
    wait(e, product(e, how, "qkv", x, stored(e, out, how.results)))
    e.close()


def take(module: ir.Module, name: str, hidden: int, width: int) -> None:
    """Write a copy of rows of ``x``, of ``hidden`` numbers, and of ``attended``, of ``width`` numbers.

    ``taken`` of the layer's frame are the numbers of the rows, integers of 32 bits.
    """
    e = Job(module, name)
    taken, parts = e.part("taken"), (("x", hidden), ("attended", width))
    pairs = [(e.pointer(each), e.part(f"taken_{each}"), size) for each, size in parts]
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        number = e.b.sext(e.load(taken, row, INT), LONG)
        for source, out, size in pairs:
            begin, end = e.at(source, e.mul(number, size)), e.at(out, e.mul(row, size))
            _copy(e, begin, end, size)
    wait(e, [phase])
    e.close()


def _copy(e: Job, begin: ir.Value, end: ir.Value, size: int) -> None:
    e.over(size, lambda at, mask: e.put(e.vector(begin, at, mask), end, at, mask))


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
