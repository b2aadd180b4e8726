"""Rotary positions, and attention of tokens with queries of one key head over the paged cache.

Contract. A rotated query may be multiplied by a factor of its position. Attention works split by split of 256 keys at
absolute positions. A score is a sum over the head's dimensions in order, times the layer's scale. ALiBi's term, slope *
(key's position - query's), is rounded, then added; so is the bias of the distance. Weights are exp(score - the split's
maximum). Their sum is in 16 lanes, then a tree; values are added key by key. Splits are merged in rising order. A sink
is merged last, as a split of the sum one without values. The result is divided by the sum of weights, then multiplied
by the scale of stored values, if any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from preheat.backends.cpu.llvm.cache import SCORE, VALUE, Cache
from preheat.backends.cpu.llvm.emit import FLOATS, INT, LANES, WORD, WORDS, Function, Value
from preheat.backends.cpu.llvm.kinds import SPLIT, LayerKind
from preheat.backends.cpu.llvm.norms import norm_row

VALUES_AT_ONCE = 16
"""Most vectors of a value that are summed at once."""

QUERIES_AT_ONCE = 8
"""Most queries that read keys and values together. Changes no bits."""


class Token(NamedTuple):
    """A token that attends: its queries, keys and values, the place of its results, and its position."""

    qkv: Value
    out: Value
    place: Value


def queries_at_once(how: LayerKind) -> int:
    """Return the number of queries of a unit of work; all of them have one key head."""
    group = how.heads // how.kv_heads
    return max(count for count in range(1, QUERIES_AT_ONCE + 1) if group % count == 0)


def tokens_at_once(how: LayerKind) -> int:
    """Return the number of tokens of a unit of work, where so many see the same keys. Changes no bits."""
    return 1 if how.causal else QUERIES_AT_ONCE // queries_at_once(how)


def turn(e: Function, how: LayerKind, head: Value, cos: Value, sin: Value, number: Value) -> None:
    """Turn a head in place by row ``number`` of the tables: partners are half a head apart."""
    half = how.dim // 2
    width = 2 * how.dim if how.by_token else half

    def column(at: Value, mask: Value | None) -> None:
        angle = e.add(e.mul(number, width), at)
        c, s = e.vector(cos, angle, mask), e.vector(sin, angle, mask)
        first, second = e.vector(head, at, mask), e.vector(head, e.add(at, half), mask)
        e.put(e.b.fsub(e.b.fmul(first, c), e.b.fmul(second, s)), head, at, mask)
        e.put(e.b.fadd(e.b.fmul(second, c), e.b.fmul(first, s)), head, e.add(at, half), mask)

    e.over(half, column)


def append(
    e: Function, how: LayerKind, qkv: Value, parts: dict[str, Value], cache: Cache, head: Value,
    at_places: tuple[Value, Value],
) -> None:  # fmt: skip
    """Norm and turn the queries and the key of key head ``head``, and store its key and value.

    ``at_places`` are the token's position, and its row of the tables of cosines and sines.
    """
    place, row = at_places
    group = how.heads // how.kv_heads
    key = e.at(qkv, e.mul(e.add(head, how.heads), how.dim))
    value = e.at(qkv, e.mul(e.add(head, how.heads + how.kv_heads), how.dim))

    def place_head(at: Value, weight: str) -> None:
        if how.qk_norm is not None:
            norm_row(e, how.qk_norm, at, parts[weight], at)
        if how.turns:
            turn(e, how, at, parts["cos"], parts["sin"], row)

    with e.loop(0, group) as number:
        query = e.at(qkv, e.mul(e.add(e.mul(head, group), number), how.dim))
        place_head(query, "q_norm")
        if how.grows:
            factor = e.splat(e.load(parts["growth"], place))
            e.over(how.dim, lambda at, mask: e.put(e.b.fmul(e.vector(query, at, mask), factor), query, at, mask))
    place_head(key, "k_norm")
    cache.write(place, key, value)


class Attend:
    """Attention of ``tokens`` of a text with some queries of one key head, from the query ``first`` on.

    ``scores`` is room for a KV split of each query. ``parts`` have ALiBi's slopes, the sinks and the biases of
    distances of all heads.
    """

    def __init__(
        self, e: Function, how: LayerKind, cache: Cache, first: Value, tokens: Sequence[Token], scores: Value,
        parts: dict[str, Value],
    ) -> None:  # fmt: skip
        self.e, self.how, self.cache, self.scores, self.tokens = e, how, cache, scores, tokens
        heads = [e.add(first, number) for number in range(queries_at_once(how))]
        pairs = [(token, number) for token in tokens for number in heads]
        self.queries = [e.at(token.qkv, e.mul(number, how.dim)) for token, number in pairs]
        self.outs = [e.at(token.out, e.mul(number, how.dim)) for token, number in pairs]
        self.places = [token.place for token, _ in pairs]
        self.slopes = [e.splat(e.load(parts["slopes"], number)) for _, number in pairs] if how.alibi else []
        self.sinks = [e.load(parts["sinks"], number) for _, number in pairs] if how.sinks else []
        tables = pairs if how.distances else []
        self.distances = [e.at(parts["distances"], e.mul(number, how.distances)) for _, number in tables]

    def write(self, window: Value, end: Value) -> None:
        """Attend over the keys before ``end``.

        With a ``window`` other than 0, less than that many tokens on each side are seen. Several tokens see the same
        keys, without a window.
        """
        e, place = self.e, self.tokens[0].place
        first = e.choose(e.less(0, window), e.most(e.add(e.sub(place, window), 1), 0), 0)
        if not self.how.causal:
            end = e.choose(e.less(0, window), e.least(e.add(place, window), end), end)
        tops = [self._begun(e.f(float("-inf"))) for _ in self.queries]
        masses = [self._begun(e.f(0.0)) for _ in self.queries]
        columns = self.cache.columns()
        for out in self.outs:
            for column, _, mask in columns:
                e.put(e.v(0.0), out, column, mask)
        with e.loop(e.mul(e.div(first, SPLIT), SPLIT), end, SPLIT) as split:
            span = split, e.most(split, first), e.least(e.add(split, SPLIT), end)
            peaks = self._scores(*span)
            factors = [
                self._merged(number, (tops[number], masses[number], peak), *span) for number, peak in enumerate(peaks)
            ]
            self._add_values(factors, *span)
        for number, out in enumerate(self.outs):
            (total, kept), scale = self._whole(number, tops[number], masses[number]), self.cache.scale(VALUE)
            for column, _, mask in columns:
                found = e.vector(out, column, mask)
                found = e.b.fdiv(found if kept is None else e.b.fmul(found, kept), total)
                e.put(found if scale is None else e.b.fmul(found, scale), out, column, mask)

    def _whole(self, number: int, top: Value, mass: Value) -> tuple[Value, Value | None]:
        """Return the whole mass of a query with its sink, and the factor of its output, vectors; None: no factor."""
        e = self.e
        if not self.sinks:
            return e.splat(e.get(mass)), None
        highest = e.greater(e.get(top), self.sinks[number])
        before, here = (self._exp(e.b.fsub(each, highest)) for each in (e.get(top), self.sinks[number]))
        return e.splat(e.fma(e.get(mass), before, here)), e.splat(before)

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
        scale = self.cache.scale(SCORE)
        own = [e.splat(e.b.trunc(place, WORD), WORDS) for place in self.places] if how.alibi else []
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
                score = e.b.fmul(e.get(total), scale)
                if how.alibi:
                    distance = e.b.sitofp(e.b.sub(position, own[number]), FLOATS)
                    score = e.b.fadd(score, e.b.fmul(self.slopes[number], distance))
                if how.distances:
                    distance = e.add(e.sub(at, self.places[number]), (how.distances - LANES) // 2)
                    score = e.b.fadd(score, e.vector(self.distances[number], distance))
                score = e.b.select(seen, score, e.v(float("-inf")))
                e.store(score, self.scores, e.add(number * SPLIT, e.sub(at, split)))
                e.set(peak, e.greater(e.get(peak), score))
        return [e.tree(e.get(peak), e.greater) for peak in peaks]

    def _merged(
        self, number: int, state: tuple[Value, Value, Value], split: Value, low: Value, high: Value
    ) -> tuple[Value, Value]:
        """Replace the scores of query ``number`` by weights, and merge their sum into its mass.

        ``state`` are the highest score and the mass until now, variables, and the split's maximum. Return the factors
        of the output until now and of the split's values, vectors.
        """
        e = self.e
        top, mass, peak = state
        scores = e.at(self.scores, number * SPLIT)
        own = self._weights(scores, peak, split, low, high)
        highest = e.greater(e.get(top), peak)
        before, here = (self._exp(e.b.fsub(each, highest)) for each in (e.get(top), peak))
        e.set(mass, e.fma(e.get(mass), before, e.b.fmul(own, here)))
        e.set(top, highest)
        return e.splat(before), e.splat(here)

    def _add_values(self, factors: list[tuple[Value, Value]], split: Value, low: Value, high: Value) -> None:
        """Merge a split's values, by the weights of each query, into the outputs."""
        e, columns = self.e, self.cache.columns()
        step = max(VALUES_AT_ONCE // len(factors), 1)
        for first in range(0, len(columns), step):
            some = columns[first : first + step]
            totals = [[self._begun(e.v(0.0)) for _ in some] for _ in factors]
            with e.loop(low, high) as position:
                value, place = self.cache.value(position), e.sub(position, split)
                parts = [self.cache.read_part(value, column) for column, _, _ in some]
                for number, line in enumerate(totals):
                    weight = e.splat(e.load(self.scores, e.add(number * SPLIT, place)))
                    for total, part in zip(line, parts, strict=True):
                        e.set(total, e.fma(part, weight, e.get(total)))
            for out, line, (before, here) in zip(self.outs, totals, factors, strict=True):
                for total, (column, _, mask) in zip(line, some, strict=True):
                    kept = e.b.fmul(e.get(total), here)
                    e.put(e.fma(e.vector(out, column, mask), before, kept), out, column, mask)

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
