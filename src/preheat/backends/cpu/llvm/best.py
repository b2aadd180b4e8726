"""The function that finds the best tokens of a line of logits, in the order of :mod:`preheat.ops.order`.

Contract: the greater logit is the better one, and of equal logits the one with the lower id. Nothing is rounded. The
least logit among the best is found bit by bit: as an integer that rises with the number, it is the greatest one that
enough logits reach.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from preheat.backends.cpu.llvm.emit import FLOAT, INT, LANES, LONG, POINTER, WORD, WORDS, Function, Value

_SIGN, _LEAST = 0x80000000, 0x007FFFFF
"""The highest bit, and the rising integer of minus infinity."""


def best(module: ir.Module) -> None:
    """Write ``best(line, vocab, width, keys)``: the keys of the ``width`` best of ``vocab`` logits, in no order.

    Keys are integers of 64 bits that rise from the best token on; the lower half is the token's id. No logit is NaN.
    """
    e = Best(module, "best", [POINTER, LONG, LONG, POINTER])
    vocab, width, keys = e.args[1:]
    found, reached = e.variable(constant_word(0)), e.variable(vocab)
    e.set(found, constant_word(0))
    e.set(reached, vocab)
    with e.loop(0, 32) as step, e.when(e.b.icmp_signed("!=", e.get(reached), width)):
        bit = e.b.shl(constant_word(1), e.b.sub(constant_word(31), e.b.trunc(step, WORD)))
        tried = e.b.or_(e.get(found), bit)
        count = e.count(e.number(tried), ">=")
        with e.when(e.b.icmp_signed(">=", count, width)):
            e.set(found, tried)
            e.set(reached, count)
    least = e.number(e.get(found))
    left, place = e.variable(width), e.variable(e.i(0))
    e.set(left, e.sub(width, e.count(least, ">")))
    e.set(place, e.i(0))
    e.collect(least, left, place, keys)
    e.close()


def constant_word(value: int) -> Value:
    """Return an integer of 32 bits."""
    return ir.Constant(WORD, value)


class Best(Function):
    """The body of the function."""

    def number(self, rising: Value) -> Value:
        """Return the float that the integer ``rising`` stands for; below all floats, minus infinity."""
        b = self.b
        above = b.icmp_unsigned(">=", rising, constant_word(_SIGN))
        bits = b.select(above, b.xor(rising, constant_word(_SIGN)), b.not_(rising))
        none = b.icmp_unsigned("<", rising, constant_word(_LEAST))
        return b.select(none, self.f(-np.inf), b.bitcast(bits, FLOAT))

    def count(self, least: Value, relation: str) -> Value:
        """Return the number of logits with this relation to ``least``."""
        b, (line, vocab) = self.b, self.args[:2]
        some, rest = self.variable(self.w(0)), self.variable(self.i(0))
        self.set(some, self.w(0))
        self.set(rest, self.i(0))
        whole = self.mul(self.div(vocab, LANES), LANES)
        with self.loop(0, whole, LANES) as at:
            hit = b.fcmp_ordered(relation, self.vector(line, at), self.splat(least))
            self.set(some, b.add(self.get(some), b.zext(hit, WORDS)))
        with self.loop(whole, vocab) as at:
            hit = b.fcmp_ordered(relation, self.load(line, at), least)
            self.set(rest, self.add(self.get(rest), b.zext(hit, LONG)))
        total, half = self.get(some), LANES // 2
        while half:
            mask = ir.Constant(WORDS, [(lane + half) % LANES for lane in range(LANES)])
            total, half = b.add(total, b.shuffle_vector(total, total, mask)), half // 2
        return self.add(b.zext(b.extract_element(total, ir.Constant(INT, 0)), LONG), self.get(rest))

    def collect(self, least: Value, left: Value, place: Value, keys: Value) -> None:
        """Write the keys of all logits above ``least``, and of the first ``left`` ones that equal it."""
        b, (line, vocab) = self.b, self.args[:2]

        def one(at: Value) -> None:
            logit = self.load(line, at)
            equal = b.and_(b.fcmp_ordered("==", logit, least), b.icmp_signed(">", self.get(left), self.i(0)))
            with self.when(b.or_(equal, b.fcmp_ordered(">", logit, least))):
                self.store(self.key(logit, at), keys, self.get(place), LONG, 8)
                self.set(place, self.add(self.get(place), 1))
                self.set(left, self.sub(self.get(left), b.zext(equal, LONG)))

        whole, bits = self.mul(self.div(vocab, LANES), LANES), ir.IntType(LANES)
        with self.loop(0, whole, LANES) as first:
            hit = b.bitcast(b.fcmp_ordered(">=", self.vector(line, first), self.splat(least)), bits)
            with self.when(b.icmp_unsigned("!=", hit, ir.Constant(bits, 0))), self.loop(0, LANES) as lane:
                one(self.add(first, lane))
        with self.loop(whole, vocab) as at:
            one(at)

    def key(self, logit: Value, id: Value) -> Value:
        """Return a token's key; see :mod:`preheat.ops.order`."""
        b = self.b
        bits = b.bitcast(b.fadd(logit, self.f(0.0)), WORD)  # minus zero equals zero
        flips = b.or_(b.not_(b.ashr(bits, constant_word(31))), constant_word(_SIGN))
        return b.or_(b.shl(b.sext(b.xor(bits, flips), LONG), self.i(32)), id)
