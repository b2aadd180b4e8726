"""Rotary positions, the paged cache, and attention of one token with the queries of one key head."""

from __future__ import annotations

from llvmlite import ir

from preheat.backends.cpu.llvm.emit import HALF, HALVES, INT, LANES, LONG, WORD, WORDS, Function, Value
from preheat.backends.cpu.llvm.kinds import SPLIT, LayerKind
from preheat.backends.cpu.llvm.norms import norm_row

VALUES_AT_ONCE = 16
"""Most vectors of a value that are summed at once."""


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
