"""A compiled function of a recurrence: step 4 of :mod:`preheat.ops.delta`, with the same bits.

Columns of a state never meet in this step. So 16 columns of a value head go through all tokens of a row before the next
16 do, and their part of the state stays in the nearest cache.

A head is a unit of work, with the rows in order: a row may write a slot that a row before has read. A thread claims
the next unit, so the bits never depend on threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from llvmlite import ir
from torch import Tensor

from preheat.backends.cpu.llvm import targets
from preheat.backends.cpu.llvm.emit import LONG, POINTER, Function, Value
from preheat.backends.cpu.llvm.machine import Code, compile_code
from preheat.backends.cpu.llvm.targets import Target
from preheat.ops.delta import DeltaRows, Heads, tree
from preheat.ops.values import Recurrence

SHARED_FROM = 1 << 19
"""Numbers of states that tokens change, from which threads share them. Fewer take less than a thread's wake-up."""

MOST_HELPERS = 63


@cache
def source(target: Target, value: Recurrence) -> str:
    """Return the function of ``value``, in LLVM's language."""
    module = ir.Module("delta")
    module.triple = target.triple
    Rule(module, value).write()
    return str(module)


class Rule(Function):
    """The body of ``recur(matrix, q, k, both, v, decay, beta, out, rows, claimed, count)``.

    ``claimed`` is the number of heads that threads have begun, 0 before the first one.
    ``rows`` are integers of 64 bits [count, 5]: the slots to read and to write, the first token, the number of tokens,
    and whether the row begins its sequence. A thread takes a head through all rows in their order, so a row may read
    the slot that a row before it wrote.
    """

    def __init__(self, module: ir.Module, value: Recurrence) -> None:
        super().__init__(module, "recur", [*[POINTER] * 10, LONG])
        self.value = value

    def write(self) -> None:
        """Write the function."""
        value, (matrix, *_, rows, claimed, count) = self.value, self.args
        size = value.key_dim * value.value_dim
        with self.claims(claimed, value.value_heads) as head, self.loop(0, count) as number:
            row = self.at(rows, self.mul(number, 5), LONG)
            read, write, first, extend, begins = (self.field(row, at) for at in range(5))
            old, new = (
                self.at(matrix, self.mul(self.add(self.mul(slot, value.value_heads), head), size))
                for slot in (read, write)
            )

            def columns(at: Value, mask: Value | None) -> None:
                source, state = self.at(old, at), self.at(new, at)
                fresh = self.b.icmp_signed("!=", begins, self.i(0))
                with self.loop(0, size, value.value_dim) as place:
                    kept = self.vector(source, place, mask)
                    self.put(self.b.select(fresh, self.v(0.0), kept), state, place, mask)
                with self.loop(first, self.add(first, extend)) as token:
                    self._token(token, head, at, mask, state)

            self.over(value.value_dim, columns)
        self.close()

    @contextmanager
    def claims(self, claimed: Value, units: Value) -> Iterator[Value]:
        """Run the body for each unit that this thread claims."""
        look, body, end = self._blocks(3)
        self.b.branch(look)
        self.b.position_at_end(look)
        unit = self.b.atomic_rmw("add", claimed, self.i(1), "acq_rel")
        self.b.cbranch(self.less(unit, units), body, end)
        self.b.position_at_end(body)
        yield unit
        self.b.branch(look)
        self.b.position_at_end(end)

    def _token(self, token: Value, head: Value, column: Value, mask: Value | None, state: Value) -> None:
        """Take the columns of ``state`` through one token."""
        value, b = self.value, self.b
        _, q, k, both, v, decay, beta, out, *_ = self.args
        own = self.add(self.mul(token, value.value_heads), head)
        share = self.div(head, value.value_heads // value.key_heads)
        shared = self.add(self.mul(token, value.key_heads), share)
        query, key = (self.at(each, self.mul(shared, value.key_dim)) for each in (q, k))
        factor = self.splat(self.load(decay, own))

        used = (query, key) if value.rule.delta else (query,)

        def terms(row: int) -> list[Value]:
            kept = b.fmul(self.vector(state, row * value.value_dim, mask), factor)
            self.put(kept, state, row * value.value_dim, mask)
            return [b.fmul(kept, self.splat(self.load(each, row))) for each in used]

        def total(first: int, size: int) -> list[Value]:
            """Return the sums at place ``first`` where ``size`` numbers are left."""
            if size == value.key_dim:
                return terms(first)
            halves = total(first, 2 * size), total(first + size, 2 * size)
            return [b.fadd(one, other) for one, other in zip(*halves, strict=True)]

        answer, *seen = total(0, 1)
        place = self.add(self.mul(own, value.value_dim), column)
        change = self.vector(v, place, mask)
        for held in seen:
            change = b.fsub(change, held)
        change = b.fmul(change, self.splat(self.load(beta, own)))
        for row in range(value.key_dim):
            grown = b.fmul(self.splat(self.load(key, row)), change)
            at = row * value.value_dim
            self.put(b.fadd(self.vector(state, at, mask), grown), state, at, mask)
        answer = b.fadd(answer, b.fmul(self.splat(self.load(both, shared)), change))
        self.put(answer, out, place, mask)


class CompiledRecur:
    """The compiled function of ``value``, as :func:`preheat.ops.delta.recur`, with ``threads`` threads.

    Its machine code is kept in ``folder``.
    """

    def __init__(self, value: Recurrence, folder: Path | None, threads: int = 1) -> None:
        self.code = Code(compile_code(source(targets.here(), value), folder)[0])
        self._recur = CFUNCTYPE(None, *[c_void_p] * 10, c_int64)(self.code.address("recur"))
        self._threads, self._size = threads, value.value_heads * value.key_dim * value.value_dim

    def __call__(self, heads: Heads, matrix: Tensor, rows: DeltaRows, begins: Tensor) -> Tensor:
        """Return out, and move the states ``matrix`` on."""
        table = torch.stack((rows.read, rows.write, rows.first, rows.extend, begins.long()), 1)
        both = tree(heads.k * heads.q, -1)
        given = [each.contiguous() for each in (heads.q, heads.k, both, heads.v, heads.decay, heads.beta)]
        out, claimed = torch.empty_like(given[3]), torch.zeros(1, dtype=torch.int64)
        places = [each.data_ptr() for each in (matrix, *given, out, table, claimed)]
        helpers = self._threads - 1 if self._size * len(out) >= SHARED_FROM else 0
        helping = [_helpers().submit(self._recur, *places, len(table)) for _ in range(helpers)]
        self._recur(*places, len(table))
        for each in helping:
            each.result()
        return out


@cache
def _helpers() -> ThreadPoolExecutor:
    """Return the threads beside the caller's; they wait without work."""
    return ThreadPoolExecutor(MOST_HELPERS, "delta")
