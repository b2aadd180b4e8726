"""Routed experts: a token's choice, the rows of each expert, and the sum over a token's experts.

Contract, as in :mod:`preheat.ops.moe`. The softmax over all experts: exp(logit - the greatest logit), a sum in 16
lanes, then a tree, and a division. The ``top_k`` most likely experts take the slots 0, 1, ... in falling order, of
equals the lowest number first. Their probabilities are the weights, divided by their sum in slot order if the model
says so. Weights are float32, as all activations are. An expert's row is multiplied by its weight, rounded, and the
products are added in slot order. A shared expert's row is multiplied by the sigmoid of the token's product with the
gate, a sum in 16 lanes, then a tree; it is added to the sum.

A unit of a product is an expert and a block of its outputs: the block is read once for all rows of the expert.
"""

from __future__ import annotations

from llvmlite import ir

from preheat.backends.cpu.llvm.emit import HALVES, INT, LANES, LONG, Value
from preheat.backends.cpu.llvm.job import Job, Once, wait
from preheat.backends.cpu.llvm.kinds import LayerKind, Routed, Shared
from preheat.backends.cpu.llvm.narrow import NARROW
from preheat.backends.cpu.llvm.products import Finish, Visits, edge, product, stored, visited_product

CHOSEN = -1.0
"""A probability less than all others: the expert has been chosen already."""


def experts(e: Job, how: LayerKind, routed: Routed, normed: Value, make: Once, finish: Finish) -> None:
    """Give the sum over the experts of each row of ``normed`` to ``finish``.

    ``make`` fills ``normed`` in each thread.
    """
    shared = routed.shared
    wait(e, product(e, routed.router, "router", normed, stored(e, e.pointer("logits"), routed.experts), make))
    if shared is not None:
        kept = stored(e, e.pointer("shared_inner"), shared.down.inputs)
        wait(e, product(e, shared.gate_up, "shared_gate_up", normed, kept, make))
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        _choose(e, routed, row)
        if shared is not None:
            make()
            _weigh_shared(e, shared, how.hidden, e.at(normed, e.mul(row, how.hidden)), row)
    wait(e, [phase])
    phase = e.phase(1)
    with e.units(*phase):
        _group(e, routed)
        if how.gate_up.terms is not None:
            _place_adapters(e, routed)
    wait(e, [phase])
    _products(e, how, routed, normed, make)
    if shared is not None:
        kept = stored(e, e.pointer("shared_outputs"), how.hidden)
        wait(e, product(e, shared.down, "shared_down", e.pointer("shared_inner"), kept))
    phase = e.phase(e.rows)
    with e.units(*phase) as row:
        _combine(e, how, routed, row, finish)
    wait(e, [phase])


def _choose(e: Job, routed: Routed, row: Value) -> None:
    """Write the experts and the weights of a row's slots."""
    likely = e.at(e.pointer("logits"), e.mul(row, routed.experts))
    _softmax(e, routed.experts, likely)
    chosen = e.at(e.pointer("chosen"), e.mul(row, routed.top_k), LONG)
    shares, total = e.at(e.pointer("shares"), e.mul(row, routed.top_k)), None
    for slot in range(routed.top_k):
        best, number = e.variable(e.f(CHOSEN)), e.variable(e.i(0))
        with e.loop(0, routed.experts) as expert:
            each = e.load(likely, expert)
            better = e.b.fcmp_ordered(">", each, e.get(best))
            e.set(number, e.choose(better, expert, e.get(number)))
            e.set(best, e.b.select(better, each, e.get(best)))
        share = e.load(likely, e.get(number))  # NaN where no probability is a number
        e.store(e.get(number), chosen, slot, LONG, align=8)
        e.store(share, shares, slot)
        e.store(e.f(CHOSEN), likely, e.get(number))
        total = share if total is None else e.b.fadd(total, share)
    if routed.renormalize:
        for slot in range(routed.top_k):
            e.store(e.b.fdiv(e.load(shares, slot), total), shares, slot)


def _softmax(e: Job, count: int, row: Value) -> None:
    """Replace ``count`` logits by their probabilities."""
    columns = [(at, None if at + LANES <= count else e.first(count - at)) for at in range(0, count, LANES)]

    def logits(at: int, mask: Value | None) -> Value:
        found = e.vector(row, at, mask)
        return found if mask is None else e.b.select(mask, found, e.v(float("-inf")))

    top = e.v(float("-inf"))
    for column in columns:
        top = e.greater(top, logits(*column))
    peak, total = e.splat(e.tree(top, e.greater)), e.v(0.0)
    for at, mask in columns:
        each = e.exp(e.b.fsub(logits(at, mask), peak))
        total = e.b.fadd(total, each if mask is None else e.b.select(mask, each, e.v(0.0)))
        e.put(each, row, at, mask)
    whole = e.splat(e.tree(total, e.b.fadd))
    for at, mask in columns:
        e.put(e.b.fdiv(e.vector(row, at, mask), whole), row, at, mask)


def _weigh_shared(e: Job, shared: Shared, hidden: int, x: Value, row: Value) -> None:
    """Write the weight of a row's shared expert."""
    gate, total = e.part("shared_gate"), e.variable(e.v(0.0))

    def join(column: Value, mask: Value | None) -> None:
        weights = _gate(e, shared, gate, column, LANES if mask is None else hidden % LANES)
        e.set(total, e.fma(e.vector(x, column, mask), weights, e.get(total)))

    e.over(hidden, join)
    score = e.splat(e.tree(e.get(total), e.b.fadd))
    share = e.b.fdiv(e.v(1.0), e.b.fadd(e.v(1.0), e.exp(e.b.fneg(score))))
    e.store(share, e.pointer("shared_shares"), e.mul(row, LANES))


def _gate(e: Job, shared: Shared, gate: Value, column: Value, count: int) -> Value:
    """Return ``count`` weights of the shared expert's gate as floats; other lanes are zero."""
    if shared.stored == "float32":
        return e.vector(gate, column, None if count == LANES else e.first(count))
    narrow = NARROW[shared.stored]
    if count == LANES:
        codes = e.b.load(e.at(gate, column, narrow.kind), typ=HALVES, align=2)
    else:
        codes = ir.Constant(HALVES, [0] * LANES)
        for lane in range(count):
            each = e.load(gate, e.add(column, lane), narrow.kind, align=2)
            codes = e.b.insert_element(codes, each, ir.Constant(INT, lane))
    return narrow.widened(e, codes)


def _group(e: Job, routed: Routed) -> None:
    """Sort the (row, slot) pairs by expert, for :class:`Visits`; pairs of an expert keep their order."""
    chosen, order, starts, visited = (e.pointer(name) for name in ("chosen", "order", "starts", "visited"))
    pairs = e.mul(e.rows, routed.top_k)

    def put(value: Value, pointer: Value, at: Value) -> None:
        e.store(e.i(value), pointer, at, LONG, align=8)

    with e.loop(0, routed.experts + 2) as expert:
        put(0, starts, expert)
    with e.loop(0, pairs) as at:  # counts, two places behind their expert
        place = e.add(e.field(chosen, at), 2)
        put(e.add(e.field(starts, place), 1), starts, place)
    found = e.variable(e.i(0))
    with e.loop(0, routed.experts) as expert:
        place = e.add(expert, 2)
        count = e.field(starts, place)
        with e.when(e.less(0, count)):
            e.set(found, e.add(e.get(found), 1))
            put(expert, visited, e.get(found))
        put(e.add(count, e.field(starts, e.add(expert, 1))), starts, place)
    put(e.get(found), visited, 0)
    with e.loop(0, pairs) as at:  # the place behind an expert moves from its first pair to its last
        place = e.add(e.field(chosen, at), 1)
        put(at, order, e.field(starts, place))
        put(e.add(e.field(starts, place), 1), starts, place)


def _place_adapters(e: Job, routed: Routed) -> None:
    """Write the adapter slot of each sorted pair: a slot has matrices for each expert."""
    slots, order, chosen, out = (e.pointer(name) for name in ("slots", "order", "chosen", "visit_slots"))
    with e.loop(0, e.mul(e.rows, routed.top_k)) as place:
        at = e.field(order, place)
        slot = e.field(slots, e.div(at, routed.top_k))
        mine = e.add(e.mul(slot, routed.experts), e.field(chosen, at))
        e.store(e.choose(e.less(-1, slot), mine, -1), out, place, LONG, align=8)


def _products(e: Job, how: LayerKind, routed: Routed, normed: Value, make: Once) -> None:
    """Write each (row, slot) pair's output of its expert."""
    order, inner, outputs = (e.pointer(name) for name in ("order", "inner", "outputs"))
    visited, starts, adapters = (e.pointer(name) for name in ("visited", "starts", "visit_slots"))
    visits = Visits(e.mul(e.rows, routed.top_k), visited, starts, adapters)

    def given(place: Value) -> Value:
        return e.at(normed, e.mul(e.div(e.field(order, place), routed.top_k), how.hidden))

    def inside(place: Value) -> Value:
        return e.at(inner, e.mul(place, how.down.inputs))

    kept, written = stored(e, inner, how.down.inputs), stored(e, outputs, how.hidden)
    wait(e, [visited_product(e, how.gate_up, "gate_up", visits, given, kept, make)])

    def sorted_back(place: Value, column: Value, vector: Value) -> None:
        written(e.field(order, place), column, vector)

    wait(e, [visited_product(e, how.down, "down", visits, inside, sorted_back)])


def _combine(e: Job, how: LayerKind, routed: Routed, row: Value, finish: Finish) -> None:
    """Give the sum of a row's outputs of its experts, in slot order, to ``finish``."""
    first = e.mul(row, routed.top_k)
    outputs, shares = e.at(e.pointer("outputs"), e.mul(first, how.hidden)), e.at(e.pointer("shares"), first)
    with e.loop(0, how.hidden, LANES) as column:
        total, mask = None, edge(e, how.hidden, column)
        for slot in slots(routed):
            each = e.vector(outputs, e.add(column, slot * how.hidden), mask)
            weighted = e.b.fmul(each, e.splat(e.load(shares, slot)))
            total = weighted if total is None else e.b.fadd(total, weighted)
        if routed.shared is not None:
            more = e.vector(e.pointer("shared_outputs"), e.add(e.mul(row, how.hidden), column), mask)
            share = e.vector(e.pointer("shared_shares"), e.mul(row, LANES))
            total = e.b.fadd(total, e.b.fmul(more, share))
        finish(row, column, total)


def slots(routed: Routed) -> range:
    """Return the slots of a row, in the order of their sum."""
    return range(routed.top_k)
