"""A compiled function that draws tokens from logits, by the rules of :mod:`preheat.ops.sampler`.

Contract. The best token of a row is the one with the greatest logit; ties go to the lowest id. A row with a temperature
takes the token with the greatest ``noise - deficit`` among its near tokens; ties go to the lowest id. Deficit and noise
have the bits of :mod:`preheat.ops.top_k_top_p` and :mod:`preheat.ops.philox`. The logarithm of the noise is computed as
numpy computes it on processors with fused multiply-add: for x = 2**exponent * y with y in (sqrt(1/2), sqrt(2)] it is
fma(exponent, ln 2, P(y - 1) / Q(y - 1)). P and Q are polynomials of degree 5, by Horner's rule with fma.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from preheat.backends.cpu.llvm.digest import RowDigest
from preheat.backends.cpu.llvm.emit import FLOATS, INT, LANES, LONG, POINTER, WORDS, Function, Value

SETTINGS = 8
"""Words of 32 bits of a row's settings: temperature (0: the best token), furthest deficit, seed, position, choice."""

BLOCK = 4 * LANES
"""Tokens that share 16 Philox blocks: word i of block j belongs to token 4 * j + i."""

_BIT = ir.IntType(1)
_BITS = ir.VectorType(_BIT, LANES)
_WIDE = ir.VectorType(LONG, LANES)

_ROUNDS = 10
_MULTIPLIERS, _KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_P = (0.025899792, 0.38088378, 1.4800006, 2.1126776, 1.0, 0.0)
_Q = (0.0058750953, 0.15464763, 0.9864943, 2.453006, 2.6126776, 1.0)
_HALF_ROOT, _LN2 = (float(np.float32(each)) for each in (0.5**0.5, np.log(2.0)))

Words = list[Value]


def draw(module: ir.Module) -> None:
    """Write ``draw(logits, vocab, rows, settings, tokens, tail, digests, keys)``.

    It stores a token for each row of logits, and returns the number of rows without a finite maximum or with a NaN.
    ``tail`` has room for a block of logits. If ``digests`` is not null, it stores a digest for each row, too
    (:mod:`preheat.backends.cpu.llvm.digest`): a row that was just drawn from is still in the processor's caches.
    ``keys`` may be null.
    """
    e = Draw(module, "draw", [POINTER, LONG, LONG, *[POINTER] * 5], LONG)
    logits, vocab, rows, settings, tokens, tail, digests, table = e.args
    digested, read = (e.b.icmp_unsigned("!=", each, ir.Constant(POINTER, None)) for each in (digests, table))
    with_table, alone = RowDigest(e, vocab, table), RowDigest(e, vocab)
    bad = e.variable(e.i(0))
    e.set(bad, e.i(0))
    whole = e.div(vocab, BLOCK)
    blocks = e.div(e.add(vocab, BLOCK - 1), BLOCK)
    with e.loop(0, rows) as row:
        line = e.at(logits, e.mul(row, vocab))
        e.pad(line, vocab, e.mul(whole, BLOCK), tail)

        def block(number: Value, line: Value = line) -> Words:
            inside = e.b.icmp_signed("<", number, whole)
            place = e.b.select(inside, e.at(line, e.mul(number, BLOCK)), tail)
            return [e.vector(place, LANES * at) for at in range(4)]

        peak, best, usable = e.best(block, blocks)
        e.store(e.b.zext(best, LONG), tokens, row, LONG, 8)
        e.set(bad, e.add(e.get(bad), e.b.zext(e.b.not_(usable), LONG)))
        own = e.at(settings, e.mul(row, SETTINGS))
        random = e.b.fcmp_ordered(">", e.load(own), e.f(0.0))
        with e.when(e.b.and_(usable, random)):
            e.store(e.b.zext(e.race(block, blocks, own, peak), LONG), tokens, row, LONG, 8)
        with e.when(e.b.and_(digested, read)):
            e.store(with_table(line), digests, row, LONG, 8)
        with e.when(e.b.and_(digested, e.b.not_(read))):
            e.store(alone(line), digests, row, LONG, 8)
    e.close(e.get(bad))


def pick(module: ir.Module) -> None:
    """Write ``pick(ids, logits, count, settings)``: the token that a row draws among ``count`` tokens.

    The first logit is the greatest one. ``ids`` are integers of 64 bits; both lists have room for whole vectors.
    """
    e = Draw(module, "pick", [POINTER, POINTER, LONG, POINTER], LONG)
    listed, logits, count, own = e.args
    b, (best, ids) = e.b, e.start()
    top, temperature, furthest = (e.splat(each) for each in (e.load(logits), e.load(own), e.load(own, 1)))
    key, counter = ([e.splat(e.load(own, at, INT), WORDS) for at in pair] for pair in ((2, 3), (4, 5)))
    with e.loop(0, count, LANES) as at:
        numbers = b.trunc(b.load(e.at(listed, at, LONG), typ=_WIDE, align=8), WORDS)
        deficit = b.fdiv(b.fsub(top, e.vector(logits, at)), temperature)
        near = b.and_(b.fcmp_ordered("<=", deficit, furthest), e.first(e.sub(count, at)))
        words = e.philox([b.lshr(numbers, e.w(2)), *counter, e.w(0)], key)
        place, word = b.and_(numbers, e.w(3)), words[0]
        for which in (1, 2, 3):
            word = b.select(b.icmp_unsigned("==", place, e.w(which)), words[which], word)
        score = b.select(near, b.fsub(e.gumbel(word), deficit), e.v(-np.inf))
        equal = b.and_(b.fcmp_ordered("==", score, e.get(best)), b.icmp_unsigned("<", numbers, e.get(ids)))
        more = b.or_(b.fcmp_ordered(">", score, e.get(best)), equal)
        e.set(ids, b.select(more, numbers, e.get(ids)))
        e.set(best, b.select(more, score, e.get(best)))
    e.close(b.zext(e.winner(e.get(best), e.get(ids))[1], LONG))


class Draw(Function):
    """The body of the function that draws."""

    def pad(self, line: Value, vocab: Value, first: Value, place: Value) -> None:
        """Store a block at ``place``: the logits of a line from ``first`` on, then minus infinity."""
        for at in range(4):
            self.store(self.v(-np.inf), place, LANES * at)
        with self.loop(first, vocab) as at:
            self.store(self.load(line, at), place, self.sub(at, first))

    def numbers(self, block: Value, first: int, step: int) -> Value:
        """Return the ids of 16 tokens of a block."""
        lanes = ir.Constant(WORDS, [first + step * lane for lane in range(LANES)])
        return self.b.add(self.splat(self.b.trunc(self.mul(block, BLOCK), INT), WORDS), lanes)

    def better(self, score: Value, ids: Value, best: Value, best_ids: Value) -> None:
        """Keep, in the variables of the best, the greater score of each lane."""
        more = self.b.fcmp_ordered(">", score, self.get(best))
        self.set(best_ids, self.b.select(more, ids, self.get(best_ids)))
        self.set(best, self.b.select(more, score, self.get(best)))

    def winner(self, score: Value, ids: Value) -> tuple[Value, Value]:
        """Return the greatest score of all lanes and its id, the lowest of equal ones."""
        b, half = self.b, LANES // 2
        while half:
            mask = ir.Constant(WORDS, [(lane + half) % LANES for lane in range(LANES)])
            other, other_ids = (b.shuffle_vector(each, each, mask) for each in (score, ids))
            lower = b.and_(b.fcmp_ordered("==", other, score), b.icmp_unsigned("<", other_ids, ids))
            more = b.or_(b.fcmp_ordered(">", other, score), lower)
            score, ids = b.select(more, other, score), b.select(more, other_ids, ids)
            half //= 2
        return tuple(b.extract_element(each, ir.Constant(INT, 0)) for each in (score, ids))

    def start(self) -> tuple[Value, Value]:
        """Return variables of a best score and id in each lane."""
        found = self.variable(self.v(-np.inf)), self.variable(self.w(0))
        self.set(found[0], self.v(-np.inf))
        self.set(found[1], self.w(0))
        return found

    def best(self, block: Any, blocks: Value) -> tuple[Value, Value, Value]:
        """Return a line's greatest logit, its id, and whether the logit is finite and none is NaN."""
        b, (best, ids) = self.b, self.start()
        unknown = self.variable(ir.Constant(_BITS, [0] * LANES))
        self.set(unknown, ir.Constant(_BITS, [0] * LANES))
        with self.loop(0, blocks) as number:
            for at, logits in enumerate(block(number)):
                self.better(logits, self.numbers(number, LANES * at, 1), best, ids)
                self.set(unknown, b.or_(self.get(unknown), b.fcmp_unordered("uno", logits, logits)))
        peak, token = self.winner(self.get(best), self.get(ids))
        finite = b.and_(b.fcmp_ordered("<", peak, self.f(np.inf)), b.fcmp_ordered(">", peak, self.f(-np.inf)))
        return peak, token, b.and_(finite, b.not_(self.any(self.get(unknown))))

    def any(self, bits: Value) -> Value:
        """Return whether a lane is set."""
        kind = ir.IntType(LANES)
        return self.b.icmp_unsigned("!=", self.b.bitcast(bits, kind), ir.Constant(kind, 0))

    def race(self, block: Any, blocks: Value, own: Value, peak: Value) -> Value:
        """Return the winning token of a line, by the row's settings."""
        b, (best, ids) = self.b, self.start()
        top, temperature, furthest = self.splat(peak), self.splat(self.load(own)), self.splat(self.load(own, 1))
        key, counter = ([self.splat(self.load(own, at, INT), WORDS) for at in pair] for pair in ((2, 3), (4, 5)))
        with self.loop(0, blocks) as number:
            spread = [b.fdiv(b.fsub(top, logits), temperature) for logits in block(number)]
            near = [b.fcmp_ordered("<=", each, furthest) for each in spread]
            with self.when(self.any(b.or_(b.or_(near[0], near[1]), b.or_(near[2], near[3])))):
                spread = [b.select(ok, each, self.v(np.inf)) for ok, each in zip(near, spread, strict=True)]
                group = b.lshr(self.numbers(number, 0, 4), self.w(2))
                words = self.philox([group, *counter, self.w(0)], key)
                for at, (word, deficit) in enumerate(zip(words, self.dealt(spread), strict=True)):
                    self.better(b.fsub(self.gumbel(word), deficit), self.numbers(number, at, 4), best, ids)
        return self.winner(self.get(best), self.get(ids))[1]

    def dealt(self, vectors: Words) -> Words:
        """Return every fourth number of a block, from each of the first four on."""

        def wide(one: Value, two: Value, count: int) -> Value:
            mask = ir.Constant(ir.VectorType(INT, 2 * count), list(range(2 * count)))
            return self.b.shuffle_vector(one, two, mask)

        one, two, three, four = vectors
        all_ = wide(wide(one, two, LANES), wide(three, four, LANES), 2 * LANES)
        masks = [ir.Constant(WORDS, [4 * lane + at for lane in range(LANES)]) for at in range(4)]
        return [self.b.shuffle_vector(all_, all_, mask) for mask in masks]

    def philox(self, counter: Words, key: Words) -> Words:
        """Return the four output words of 16 counters under their key, by Philox4x32-10."""
        b = self.b
        for _ in range(_ROUNDS):
            (low0, high0), (low1, high1) = (self.multiplied(counter[at], _MULTIPLIERS[at // 2]) for at in (0, 2))
            counter = [b.xor(high1, b.xor(counter[1], key[0])), low1, b.xor(high0, b.xor(counter[3], key[1])), low0]
            key = [b.add(each, self.w(step)) for each, step in zip(key, _KEY_STEPS, strict=True)]
        return counter

    def multiplied(self, word: Value, factor: int) -> tuple[Value, Value]:
        """Return the low and the high words of a product."""
        b = self.b
        product = b.mul(b.zext(word, _WIDE), ir.Constant(_WIDE, [factor] * LANES))
        return b.trunc(product, WORDS), b.trunc(b.lshr(product, ir.Constant(_WIDE, [32] * LANES)), WORDS)

    def gumbel(self, word: Value) -> Value:
        """Return Gumbel variates of random words."""
        b = self.b
        uniform = b.fadd(b.uitofp(b.lshr(word, self.w(9)), FLOATS), self.v(0.5))
        return b.fneg(self.log(b.fneg(self.log(b.fmul(uniform, self.v(2.0**-23))))))

    def log(self, x: Value) -> Value:
        """Return natural logarithms of positive normal numbers."""
        b = self.b
        bits = b.bitcast(x, WORDS)
        exponent = b.sitofp(b.sub(b.lshr(bits, self.w(23)), self.w(126)), FLOATS)
        y = b.bitcast(b.or_(b.and_(bits, self.w(0x7FFFFF)), self.w(126 << 23)), FLOATS)
        small = b.fcmp_ordered("<=", y, self.v(_HALF_ROOT))
        exponent = b.select(small, b.fsub(exponent, self.v(1.0)), exponent)
        rest = b.fsub(b.select(small, b.fadd(y, y), y), self.v(1.0))
        above, below = (self._horner(each, rest) for each in (_P, _Q))
        return self.fma(exponent, self.v(_LN2), b.fdiv(above, below))

    def _horner(self, factors: tuple[float, ...], x: Value) -> Value:
        rounded = [self.v(float(np.float32(each))) for each in factors]
        total = rounded[0]
        for each in rounded[1:]:
            total = self.fma(total, x, each)
        return total
