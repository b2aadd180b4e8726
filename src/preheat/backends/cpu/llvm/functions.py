"""The functions of a model: the front of a layer, its back, one product, a norm, and the job that threads share.

Contract, beside that of :mod:`preheat.backends.cpu.llvm.emit`. Activations are float32. An output of a product is one
sum over inputs 0, 1, ... in order, then the bias. A norm's mean of squares is a sum in 16 lanes, then a tree; a row
times the reciprocal of the root is rounded, then times the weight. Attention works split by split of 256 keys at
absolute positions: scores are sums over the head's dimensions in order, times the scale; weights are exp(score - the
split's maximum), their sum is in 16 lanes, then a tree; values are added key by key. Splits are merged in rising order.
Keys and values are rounded to the cache's dtype. A value that is not finite is stored as zero, and its key as NaN.

Work is cut into units of (outputs) or (row, key head). A thread claims the next unit, so sums never depend on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llvmlite import ir

from preheat.backends.cpu.llvm.emit import (
    ALL_CLAIMED,
    FLOATS,
    HALF,
    HALVES,
    INT,
    LANES,
    LONG,
    POINTER,
    WORD,
    WORDS,
    Function,
    Value,
)
from preheat.backends.cpu.llvm.kinds import (
    FRAME,
    FUNCTION,
    JOB,
    LAYER,
    LAYER_FRAME,
    LINE,
    PANEL,
    SPLIT,
    LayerKind,
    Product,
    Stored,
)

ROWS_AT_ONCE = 4
"""Rows that read a weight together, where there are as many. Changes no bits."""

VECTORS = {1: 8, ROWS_AT_ONCE: 4}
"""Most vectors of outputs that so many rows sum at once; 16 sums fit into registers."""

VALUES_AT_ONCE = 16
"""Most vectors of a value that are summed at once."""

_ARGS = [POINTER, POINTER, LONG, LONG]


class Job(Function):
    """A function (frame, layer, thread, job) whose phases threads share."""

    def __init__(self, module: ir.Module, name: str) -> None:
        super().__init__(module, name, _ARGS)
        self.frame, self.layer, self.thread, self.number = self.args
        self.rows = self.field(self.frame, FRAME["rows"])
        self._phases = 0

    def pointer(self, name: str) -> Value:
        """Load the address ``name`` from the step's frame."""
        return self.field(self.frame, FRAME[name], POINTER)

    def part(self, name: str) -> Value:
        """Load the address ``name`` from the layer's frame."""
        return self.field(self.layer, LAYER_FRAME[name], POINTER)

    def own(self, name: str, size: Value) -> Value:
        """Return this thread's part of a buffer, of ``size`` floats."""
        return self.at(self.pointer(name), self.mul(self.thread, size))

    def phase(self, units: Value) -> tuple[Value, Value, Value]:
        """Return the arguments of :meth:`units` and :meth:`finished` for the next counter."""
        word = self.at(self.pointer("counters"), self._phases * LINE, LONG)
        self._phases += 1
        return word, self.i(units), self.number


# --- products ---


def weights_at(e: Function, stored: Stored, weight: Value, panel: Value, inputs: int, k: Value) -> list[Value]:
    """Return the two vectors of input ``k`` in a panel, as floats."""
    at = e.mul(e.add(e.mul(panel, inputs), k), PANEL)
    if stored == "float32":
        return [e.vector(weight, e.add(at, LANES * half)) for half in (0, 1)]
    words = e.b.load(e.at(weight, at, HALF), typ=WORDS, align=4)  # a word: outputs j and j + 16
    return [e.b.bitcast(e.b.shl(words, e.w(16)), FLOATS), e.b.bitcast(e.b.and_(words, e.w(-65536)), FLOATS)]


def sums(e: Function, how: Product, weight: Value, unit: Value, x: Value, rows: int, vectors: int) -> list[list[Value]]:
    """Return the products of rows with a unit's outputs: [row][vector].

    The ``rows`` rows lie at ``x``; the ``unit`` has ``vectors`` vectors of outputs.
    """
    totals = [[e.variable(e.v(0.0)) for _ in range(vectors)] for _ in range(rows)]
    for line in totals:
        for total in line:
            e.set(total, e.v(0.0))
    panels = [e.add(e.mul(unit, vectors // 2), number) for number in range(vectors // 2)]
    with e.loop(0, how.inputs) as k:
        weights = [each for panel in panels for each in weights_at(e, how.stored, weight, panel, how.inputs, k)]
        for row, line in enumerate(totals):
            factor = e.splat(e.load(x, e.add(k, row * how.inputs)))
            for total, each in zip(line, weights, strict=True):
                e.set(total, e.fma(each, factor, e.get(total)))
    return [[e.get(total) for total in line] for line in totals]


def widest(how: Product, rows: int) -> int:
    """Return the most vectors that a unit may have, for ``rows`` rows at once.

    The outputs must be a multiple of a unit's vectors. Gates lie beside their ups, so a gated unit has at least 4.
    """
    least = 4 if how.gated else 2
    options = [each for each in (8, 4, 2) if least <= each <= VECTORS[rows] and how.outputs % (each * LANES) == 0]
    return options[0]


def product(
    e: Job,
    how: Product,
    weight: Value,
    bias: Value | None,
    x: Value,
    finish: Callable[[Value, Value, Value], None],
    make: Callable[[], None] | None = None,
) -> list[tuple[Value, Value, Value]]:
    """Multiply the rows at ``x`` by a weight.

    ``finish(row, column, vector)`` stores 16 results. ``make`` fills ``x`` first, in each thread for itself. Returns
    the phases to wait for.
    """
    made = None if make is None else e.variable(e.i(0))
    if made is not None:
        e.set(made, e.i(0))
    phases, start = [], e.i(0)
    for rows in (ROWS_AT_ONCE, 1):
        vectors = widest(how, rows)
        stop = e.add(start, e.mul(e.div(e.sub(e.rows, start), rows), rows))
        count = e.choose(e.less(start, stop), how.outputs // (LANES * vectors), 0)
        phases.append(phase := e.phase(count))
        with e.units(*phase) as unit:
            if made is not None and make is not None:
                with e.when(e.b.icmp_signed("==", e.get(made), e.i(0))):
                    make()
                    e.set(made, e.i(1))
            with e.loop(start, stop, rows) as row:
                found = sums(e, how, weight, unit, e.at(x, e.mul(row, how.inputs)), rows, vectors)
                for place, line in enumerate(found):
                    _finish(e, how, bias, unit, e.add(row, place), line, finish)
        start = stop
    return phases


def _finish(
    e: Function, how: Product, bias: Value | None, unit: Value, row: Value, line: list[Value],
    finish: Callable[[Value, Value, Value], None],
) -> None:  # fmt: skip
    """Add the bias of a unit's outputs, apply SwiGLU, and store."""
    first = e.mul(unit, LANES * len(line))
    if bias is not None:
        line = [e.b.fadd(each, e.vector(bias, e.add(first, LANES * at))) for at, each in enumerate(line)]
    if not how.gated:
        for at, each in enumerate(line):
            finish(row, e.add(first, LANES * at), each)
        return
    for pair in range(len(line) // 4):  # a panel of gates, then the panel of their ups
        for half in (0, 1):
            gate, up = line[4 * pair + half], line[4 * pair + 2 + half]
            silu = e.b.fdiv(gate, e.b.fadd(e.v(1.0), e.exp(e.b.fneg(gate))))
            column = e.add(e.mul(unit, LANES * len(line) // 2), LANES * (2 * pair + half))
            finish(row, column, e.b.fmul(silu, up))


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


# --- attention ---


def turn(e: Function, how: LayerKind, head: Value, cos: Value, sin: Value, position: Value) -> None:
    """Turn a head in place: partners are half a head apart."""
    half = how.dim // 2
    for column in range(0, half, LANES):
        at = e.add(e.mul(position, half), column)
        c, s = e.vector(cos, at), e.vector(sin, at)
        first, second = e.vector(head, column), e.vector(head, column + half)
        e.store(e.b.fsub(e.b.fmul(first, c), e.b.fmul(second, s)), head, column)
        e.store(e.b.fadd(e.b.fmul(second, c), e.b.fmul(first, s)), head, column + half)


class Cache:
    """One layer's cache [blocks, 2, kv heads, slots, dim] for one key head of a sequence.

    A block's keys lie in tiles of 16: for each dimension the 16 keys side by side. Values lie row by row.
    """

    def __init__(self, e: Function, how: LayerKind, cache: Value, table: Value, head: Value) -> None:
        self.e, self.how, self._cache, self._table, self._head = e, how, cache, table, head
        self._narrow = how.cached == "bfloat16"
        self._kind = HALF if self._narrow else ir.FloatType()

    def _base(self, position: Value, values: int) -> Value:
        """Return the element where a block's keys or values begin.

        The block holds ``position``; ``values`` is 0 for the head's keys and 1 for its values.
        """
        e, how = self.e, self.how
        block = e.b.sext(e.load(self._table, e.div(position, how.block_size), WORD), LONG)
        row = e.add(e.mul(e.add(e.mul(block, 2), values), how.kv_heads), self._head)
        return e.mul(row, how.block_size * how.dim)

    def keys(self, position: Value) -> Value:
        """Return the address of the tile of keys that begins at ``position``.

        ``position`` is a multiple of 16.
        """
        e, how = self.e, self.how
        inside = e.mul(e.rem(position, how.block_size), how.dim)
        return e.at(self._cache, e.add(self._base(position, 0), inside), self._kind)

    def value(self, position: Value) -> Value:
        """Return the address of the value of ``position``."""
        e, how = self.e, self.how
        inside = e.mul(e.rem(position, how.block_size), how.dim)
        return e.at(self._cache, e.add(self._base(position, 1), inside), self._kind)

    def read(self, address: Value, at: Value) -> Value:
        """Load 16 numbers as floats, from element ``at`` on."""
        if not self._narrow:
            return self.e.vector(address, at)
        return self.e.widened(self.e.b.load(self.e.at(address, at, HALF), typ=HALVES, align=2))

    def write(self, position: Value, key: Value, value: Value) -> None:
        """Store a key and a value of ``dim`` floats."""
        e, how = self.e, self.how
        wrong = e.variable(e.v(0.0))
        e.set(wrong, e.v(0.0))
        out = self.value(position)
        for column in range(0, how.dim, LANES):
            given = e.vector(value, column)
            nothing = e.b.fsub(given, given)  # zero, or NaN where the number is not finite
            e.set(wrong, e.b.fadd(e.get(wrong), nothing))
            finite = e.b.fcmp_ordered("ord", nothing, nothing)
            self._store(e.b.select(finite, given, e.v(0.0)), out, column)
        odd = e.splat(e.tree(e.get(wrong), e.b.fadd))
        tile = self.keys(e.sub(position, e.rem(position, LANES)))
        lane = e.rem(position, LANES)
        for column in range(0, how.dim, LANES):
            marked = e.b.fadd(e.vector(key, column), odd)
            numbers = e.narrowed(marked) if self._narrow else marked
            for place in range(LANES):
                each = e.b.extract_element(numbers, ir.Constant(INT, place))
                at = e.add((column + place) * LANES, lane)
                e.store(each, tile, at, self._kind, align=2 if self._narrow else 4)

    def _store(self, numbers: Value, out: Value, column: int) -> None:
        if self._narrow:
            self.e.store(self.e.narrowed(numbers), self.e.at(out, column, HALF), 0, HALVES, align=2)
        else:
            self.e.store(numbers, out, column)


def append(
    e: Function, how: LayerKind, qkv: Value, parts: dict[str, Value], cache: Cache, head: Value, place: Value
) -> None:
    """Norm and turn the queries and the key of key head ``head``, and store its key and value."""
    group = how.heads // how.kv_heads
    queries = [e.at(qkv, e.mul(e.add(e.mul(head, group), number), how.dim)) for number in range(group)]
    key = e.at(qkv, e.mul(e.add(head, how.heads), how.dim))
    value = e.at(qkv, e.mul(e.add(head, how.heads + how.kv_heads), how.dim))
    for each, weight in (*((query, "q_norm") for query in queries), (key, "k_norm")):
        if how.qk_norm is not None:
            norm_row(e, how.dim, how.qk_norm, each, parts[weight], each)
        turn(e, how, each, parts["cos"], parts["sin"], place)
    cache.write(place, key, value)


class Attend:
    """Attention of one token with the queries of one key head.

    ``qkv`` are the token's queries, keys and values, ``scores`` is room for a KV split, ``out`` takes the results.
    """

    def __init__(
        self, e: Function, how: LayerKind, cache: Cache, head: Value, buffers: tuple[Value, Value, Value]
    ) -> None:
        self.e, self.how, self.cache = e, how, cache
        qkv, self.scores, out = buffers
        self.group = how.heads // how.kv_heads
        numbers = [e.mul(e.add(e.mul(head, self.group), number), how.dim) for number in range(self.group)]
        self.queries = [e.at(qkv, number) for number in numbers]
        self.outs = [e.at(out, number) for number in numbers]

    def write(self, place: Value, window: Value) -> None:
        """Attend from position ``place``, over the ``window`` tokens up to it, or over all if the window is 0."""
        e = self.e
        first = e.choose(e.less(0, window), e.most(e.add(e.sub(place, window), 1), 0), 0)
        end = e.add(place, 1)
        tops = [self._begun(e.f(float("-inf"))) for _ in self.queries]
        masses = [self._begun(e.f(0.0)) for _ in self.queries]
        for out in self.outs:
            for column in range(0, self.how.dim, LANES):
                e.store(e.v(0.0), out, column)
        with e.loop(e.mul(e.div(first, SPLIT), SPLIT), end, SPLIT) as split:
            span = split, e.most(split, first), e.least(e.add(split, SPLIT), end)
            peaks = self._scores(*span)
            for number, peak in enumerate(peaks):
                self._merge(number, (tops[number], masses[number], peak), *span)
        for out, mass in zip(self.outs, masses, strict=True):
            total = e.splat(e.get(mass))
            for column in range(0, self.how.dim, LANES):
                e.store(e.b.fdiv(e.vector(out, column), total), out, column)

    def _begun(self, value: Value) -> Value:
        """Return a variable that begins anew wherever the code comes by."""
        variable = self.e.variable(value)
        self.e.set(variable, value)
        return variable

    def _scores(self, split: Value, low: Value, high: Value) -> list[Value]:
        """Write the scores of the keys of ``split``; return each query's maximum.

        Keys before ``low`` and from ``high`` on are hidden: their score is -inf, whatever their slots hold.
        """
        e, how = self.e, self.how
        lows, highs = (e.splat(e.b.trunc(each, WORD), WORDS) for each in (low, high))
        peaks = [self._begun(e.v(float("-inf"))) for _ in self.queries]
        with e.loop(e.mul(e.div(low, LANES), LANES), high, LANES) as at:
            keys = self.cache.keys(at)
            totals = [self._begun(e.v(0.0)) for _ in self.queries]
            with e.loop(0, how.dim) as column:
                each = self.cache.read(keys, e.mul(column, LANES))
                for total, query in zip(totals, self.queries, strict=True):
                    e.set(total, e.fma(each, e.splat(e.load(query, column)), e.get(total)))
            position = e.b.add(e.splat(e.b.trunc(at, WORD), WORDS), e.lanes())
            seen = e.b.and_(e.b.icmp_signed(">=", position, lows), e.b.icmp_signed("<", position, highs))
            for number, (total, peak) in enumerate(zip(totals, peaks, strict=True)):
                score = e.b.select(seen, e.b.fmul(e.get(total), e.v(how.scale)), e.v(float("-inf")))
                e.store(score, self.scores, e.add(number * SPLIT, e.sub(at, split)))
                e.set(peak, e.greater(e.get(peak), score))
        return [e.tree(e.get(peak), e.greater) for peak in peaks]

    def _merge(self, number: int, state: tuple[Value, Value, Value], split: Value, low: Value, high: Value) -> None:
        """Merge a split's values, by the scores of query ``number``, into its output.

        ``state`` are the highest score and the mass until now, variables, and the split's maximum.
        """
        e = self.e
        top, mass, peak = state
        scores, out = e.at(self.scores, number * SPLIT), self.outs[number]
        own = self._weights(scores, peak, split, low, high)
        highest = e.greater(e.get(top), peak)
        before, here = (self._exp(e.b.fsub(each, highest)) for each in (e.get(top), peak))
        e.set(mass, e.fma(e.get(mass), before, e.b.fmul(own, here)))
        e.set(top, highest)
        step = min(self.how.dim, VALUES_AT_ONCE * LANES)
        for first in range(0, self.how.dim, step):
            columns = range(first, min(first + step, self.how.dim), LANES)
            totals = [self._begun(e.v(0.0)) for _ in columns]
            with e.loop(low, high) as position:
                value = self.cache.value(position)
                factor = e.splat(e.load(scores, e.sub(position, split)))
                for total, column in zip(totals, columns, strict=True):
                    e.set(total, e.fma(self.cache.read(value, column), factor, e.get(total)))
            for total, column in zip(totals, columns, strict=True):
                kept = e.b.fmul(e.get(total), e.splat(here))
                e.store(e.fma(e.vector(out, column), e.splat(before), kept), out, column)

    def _weights(self, scores: Value, peak: Value, split: Value, low: Value, high: Value) -> Value:
        """Replace the scores of a split by their weights, and return the sum of the weights."""
        e = self.e
        peaks, total = e.splat(peak), self._begun(e.v(0.0))
        with e.loop(e.mul(e.div(low, LANES), LANES), high, LANES) as at:
            score = e.vector(scores, e.sub(at, split))
            hidden = e.b.fcmp_ordered("==", score, e.v(float("-inf")))
            weight = e.b.select(hidden, e.v(0.0), e.exp(e.b.fsub(score, peaks)))
            e.store(weight, scores, e.sub(at, split))
            e.set(total, e.b.fadd(e.get(total), weight))
        return e.tree(e.get(total), e.b.fadd)

    def _exp(self, x: Value) -> Value:
        """Return e to the power of a scalar."""
        return self.e.b.extract_element(self.e.exp(self.e.splat(x)), ir.Constant(INT, 0))


# --- whole functions ---


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
    _wait(e, phases)

    def placed(unit: Value) -> tuple[Value, Value, Value, Cache]:
        head, row = e.div(unit, e.rows), e.rem(unit, e.rows)
        table = e.field(tables, row, POINTER)
        return head, row, e.field(positions, row), Cache(e, how, parts["cache"], table, head)

    phase = e.phase(e.mul(e.rows, how.kv_heads))
    with e.units(*phase) as unit:
        head, row, place, cache = placed(unit)
        append(e, how, e.at(qkv, e.mul(row, width)), parts, cache, head, place)
    _wait(e, [phase])
    scores = e.own("scores", group * SPLIT)
    phase = e.phase(e.mul(e.rows, how.kv_heads))
    with e.units(*phase) as unit:
        head, row, place, cache = placed(unit)
        mine, out = e.at(qkv, e.mul(row, width)), e.at(attended, e.mul(row, out_width))
        Attend(e, how, cache, head, (mine, scores, out)).write(place, window)
    _wait(e, [phase])
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

    _wait(e, product(e, how.o, e.part("o"), bias("o", how.o), attended, added))
    _wait(e, product(e, how.gate_up, e.part("gate_up"), bias("gate_up", how.gate_up), normed, kept, make))
    _wait(e, product(e, how.down, e.part("down"), bias("down", how.down), inner, added))
    e.close()


def alone(module: ir.Module, name: str, how: Product) -> None:
    """Write one product, from ``x`` to ``attended``.

    The weight is at ``qkv`` of the layer's frame, and the bias at ``qkv_bias``.
    """
    e = Job(module, name)
    x, out = e.pointer("x"), e.pointer("attended")

    def kept(row: Value, column: Value, vector: Value) -> None:
        e.store(vector, out, e.add(e.mul(row, how.results), column))

    _wait(e, product(e, how, e.part("qkv"), e.part("qkv_bias") if how.bias else None, x, kept))
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
    _wait(e, [phase])
    e.close()


def _wait(e: Job, phases: Iterable[tuple[Value, Value, Value]]) -> None:
    for phase in phases:
        e.finished(*phase)


def jobs(module: ir.Module, counters: int) -> None:
    """Write the functions ``start`` and ``work``, by which threads share jobs.

    ``start(frame, function, layer)`` publishes a job and takes part in it, as thread 0, until the job is done.
    ``work(frame, thread, spins, seen)`` takes part in jobs after the job number ``seen``. It returns the latest job's
    number after ``spins`` empty turns, or -1 when the function is null.
    """
    kind = ir.FunctionType(ir.VoidType(), _ARGS)
    e = Function(module, "start", [POINTER, POINTER, POINTER])
    frame, function, layer = e.args
    place = e.at(frame, JOB, LONG)
    number = e.add(e.load_atomic(place), 1)
    words, tag = e.field(frame, FRAME["counters"], POINTER), e.b.shl(number, e.i(32))

    def count(value: Value) -> None:
        with e.loop(0, counters) as at:
            word = e.at(words, e.mul(at, LINE), LONG)
            e.store_atomic(value, e.at(word, 1, LONG), "release")
            e.store_atomic(value, word, "release")

    count(tag)
    e.store_atomic(e.b.ptrtoint(function, LONG), e.at(frame, FUNCTION, LONG), "release")
    e.store_atomic(e.b.ptrtoint(layer, LONG), e.at(frame, LAYER, LONG), "release")
    e.store_atomic(number, place, "seq_cst")
    with e.denormals_kept():
        e.b.call(_Callee(function, kind), [frame, layer, e.i(0), number])
    # Close the job before its fields change: a late thread that reads the next job's rows would find units to claim.
    count(e.b.or_(tag, e.i(ALL_CLAIMED)))
    e.close()
    e = Function(module, "work", [POINTER, LONG, LONG, LONG], LONG)
    frame, thread, spins, given = e.args
    seen, left = e.variable(given), e.variable(spins)
    e.set(seen, given)
    e.set(left, spins)
    look, run, call, stop, idle, leave = e._blocks(6)
    b = e.b
    b.branch(look)
    b.position_at_end(look)
    number = e.load_atomic(e.at(frame, JOB, LONG))
    b.cbranch(b.icmp_signed("!=", number, e.get(seen)), run, idle)
    b.position_at_end(run)
    e.set(seen, number)
    e.set(left, spins)
    function, layer = (e.field(frame, at, POINTER) for at in (FUNCTION, LAYER))
    b.cbranch(b.icmp_signed("==", b.ptrtoint(function, LONG), e.i(0)), stop, call)
    b.position_at_end(call)
    with e.denormals_kept():
        b.call(_Callee(function, kind), [frame, layer, thread, number])
    b.branch(look)
    b.position_at_end(stop)
    b.ret(e.i(-1))
    b.position_at_end(idle)
    e.pause()
    e.set(left, e.sub(e.get(left), 1))
    b.cbranch(b.icmp_signed(">", e.get(left), e.i(0)), look, leave)
    b.position_at_end(leave)
    e.close(e.get(seen))


class _Callee:
    """An address with a function's type, in the form that llvmlite's call asks for."""

    def __init__(self, pointer: Value, kind: ir.FunctionType) -> None:
        self._pointer, self.function_type, self.type = pointer, kind, ir.PointerType(kind)

    def get_reference(self) -> str:
        return str(self._pointer.get_reference())

    @property
    def args(self) -> list[_Argument]:
        return [_Argument(kind) for kind in self.function_type.args]


class _Argument:
    def __init__(self, kind: ir.Type) -> None:
        self.type, self.attributes = kind, None
