"""Write functions for LLVM: integers, loops, vectors of 16 floats, and units of work that threads share.

Contract. A vector has 16 lanes on every processor, and all its operations are elementwise; LLVM cuts it for the
machine, so results have the same bits with AVX-512, AVX2, SSE and NEON. A sum of lanes is a tree over halves: lane i
and lane i + 8, then + 4, + 2, + 1. No fast-math flag is set. A product and the sum that it joins are one fused
multiply-add. Denormal numbers count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from preheat.backends.cpu.llvm import targets
from preheat.backends.cpu.llvm.fused import multiply_add

Value = Any
"""A value of LLVM's: an instruction, an argument or a constant."""

LANES = 16
FLOAT, HALF, INT, WORD, LONG = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(32), ir.IntType(64)
POINTER, BYTE = ir.PointerType(), ir.IntType(8)
FLOATS, WORDS, HALVES, BYTES, FLAGS = (ir.VectorType(kind, LANES) for kind in (FLOAT, WORD, HALF, BYTE, ir.IntType(1)))

FIRST_LEVEL, SECOND_LEVEL = 3, 2
"""Caches by LLVM's number: all of them, and all but the first."""

SPINS_BEFORE_YIELD = 500
ALL_CLAIMED = 0xFFFFFFFF
"""The count of a job that is over: the lower half of a counter."""

_X86_FLUSHES, _ARM_FLUSHES = 0x8040, 1 << 24
"""Bits of the control registers that replace denormal numbers by zero."""

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LEAST, _EXP_MOST = -87.0, 88.0


_CONSTANTS: dict[tuple[ir.Type, str], Value] = {}


def constant(kind: ir.Type, value: Any) -> Value:
    """Return a constant. An object is written out once, so equal constants are one object."""
    key = kind, repr(value)  # 0.0 and -0.0 are equal, but not one constant
    if key not in _CONSTANTS:
        _CONSTANTS[key] = ir.Constant(kind, value)
    return _CONSTANTS[key]


class Function:
    """The body of one function while it is written; ``args`` are its arguments."""

    def __init__(self, module: ir.Module, name: str, args: Sequence[ir.Type], returns: ir.Type | None = None) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(returns or ir.VoidType(), args), name)
        self._entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))
        self.args = self.function.args

    def close(self, value: Value | None = None) -> None:
        """End the function."""
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value)
        ir.IRBuilder(self._entry).branch(self.function.basic_blocks[1])

    # --- integers of 64 bits ---

    def i(self, x: Value) -> Value:
        """Return ``x`` as a value."""
        return constant(LONG, x) if isinstance(x, int) else x

    def add(self, *terms: Value) -> Value:
        total = self.i(terms[0])
        for term in terms[1:]:
            total = self.b.add(total, self.i(term))
        return total

    def sub(self, a: Value, b: Value) -> Value:
        return self.b.sub(self.i(a), self.i(b))

    def mul(self, a: Value, b: Value) -> Value:
        return self.b.mul(self.i(a), self.i(b))

    def div(self, a: Value, b: Value) -> Value:
        return self.b.udiv(self.i(a), self.i(b))

    def rem(self, a: Value, b: Value) -> Value:
        return self.b.urem(self.i(a), self.i(b))

    def less(self, a: Value, b: Value) -> Value:
        return self.b.icmp_signed("<", self.i(a), self.i(b))

    def choose(self, condition: Value, a: Value, b: Value) -> Value:
        return self.b.select(condition, self.i(a), self.i(b))

    def most(self, a: Value, b: Value) -> Value:
        """Return the greater of two integers."""
        return self.choose(self.less(a, b), b, a)

    def least(self, a: Value, b: Value) -> Value:
        return self.choose(self.less(a, b), a, b)

    # --- memory ---

    def at(self, pointer: Value, index: Value, kind: ir.Type = FLOAT) -> Value:
        """Return the address of element ``index``."""
        return self.b.gep(pointer, [self.i(index)], source_etype=kind)

    def load(self, pointer: Value, index: Value = 0, kind: ir.Type = FLOAT, align: int = 4) -> Value:
        return self.b.load(self.at(pointer, index, kind), typ=kind, align=align)

    def vector(self, pointer: Value, index: Value = 0, mask: Value | None = None) -> Value:
        """Load 16 floats from element ``index`` on.

        Lanes outside of ``mask`` are zero, and their memory is not read.
        """
        if mask is None:
            return self.b.load(self.at(pointer, index), typ=FLOATS, align=4)
        load = self._external("llvm.masked.load.v16f32.p0", FLOATS, POINTER, INT, FLAGS, FLOATS)
        return self.b.call(load, [self.at(pointer, index), ir.Constant(INT, 4), mask, self.v(0.0)])

    def put(self, x: Value, pointer: Value, index: Value = 0, mask: Value | None = None) -> None:
        """Store the lanes of ``x`` in ``mask``, or all 16, from element ``index`` on."""
        if mask is None:
            self.store(x, pointer, index)
            return
        store = self._external("llvm.masked.store.v16f32.p0", ir.VoidType(), FLOATS, POINTER, INT, FLAGS)
        self.b.call(store, [x, self.at(pointer, index), ir.Constant(INT, 4), mask])

    def first(self, count: Value) -> Value:
        """Return a mask of the first ``count`` lanes."""
        if isinstance(count, int):
            return ir.Constant(FLAGS, [int(lane < count) for lane in range(LANES)])
        return self.b.icmp_signed("<", self.lanes(), self.splat(self.b.trunc(count, WORD), WORDS))

    def over(self, size: int, body: Callable[[Value, Value | None], None]) -> None:
        """Run ``body(column, mask)`` for the vectors of a row; the mask of the last one covers the rest of the row."""
        whole = size - size % LANES
        with self.loop(0, whole, LANES) as column:
            body(column, None)
        if whole < size:
            body(self.i(whole), self.first(size - whole))

    def prefetch(self, address: Value, level: int = FIRST_LEVEL) -> None:
        """Ask for the cache line at ``address``, which need not exist, into caches from ``level`` on."""
        one = ir.Constant(INT, 1)
        ask = self._external("llvm.prefetch.p0", ir.VoidType(), POINTER, INT, INT, INT)
        self.b.call(ask, [address, ir.Constant(INT, 0), ir.Constant(INT, level), one])  # to read, as data

    def store(self, value: Value, pointer: Value, index: Value = 0, kind: ir.Type = FLOAT, align: int = 4) -> None:
        self.b.store(value, self.at(pointer, index, kind), align=align)

    def field(self, frame: Value, number: int, kind: ir.Type = LONG) -> Value:
        """Load field ``number`` of a frame of words of 64 bits."""
        return self.b.load(self.at(frame, number, LONG), typ=kind, align=8)

    # --- variables and control ---

    def variable(self, value: Value) -> Value:
        """Return a variable that begins with ``value``."""
        place = ir.IRBuilder(self._entry).alloca(value.type)
        self.b.store(value, place)
        return place

    def room(self, floats: int) -> Value:
        """Return the address of room for ``floats`` floats, with any numbers in it."""
        entry = ir.IRBuilder(self._entry)
        return entry.inttoptr(entry.ptrtoint(entry.alloca(FLOAT, size=floats), LONG), POINTER)

    def get(self, variable: Value) -> Value:
        return self.b.load(variable, typ=variable.allocated_type)

    def set(self, variable: Value, value: Value) -> None:
        self.b.store(value, variable)

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
        """Count from ``start`` to below ``stop``."""
        start, stop = self.i(start), self.i(stop)
        head, body, end = self._blocks(3)
        before = self.b.block
        self.b.branch(head)
        self.b.position_at_end(head)
        count = self.b.phi(LONG)
        count.add_incoming(start, before)
        self.b.cbranch(self.b.icmp_signed("<", count, stop), body, end)
        self.b.position_at_end(body)
        yield count
        count.add_incoming(self.add(count, step), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Run the body if ``condition`` holds."""
        body, end = self._blocks(2)
        self.b.cbranch(condition, body, end)
        self.b.position_at_end(body)
        yield
        self.b.branch(end)
        self.b.position_at_end(end)

    def _blocks(self, count: int) -> list[Any]:
        return [self.function.append_basic_block() for _ in range(count)]

    # --- floats and vectors ---

    def f(self, x: float) -> Value:
        return constant(FLOAT, x)

    def v(self, x: float) -> Value:
        return constant(FLOATS, (x,) * LANES)

    def w(self, x: int) -> Value:
        """Return a vector of 32-bit integers with ``x`` in all lanes."""
        return constant(WORDS, (x,) * LANES)

    def lanes(self) -> Value:
        """Return the numbers of the lanes."""
        return constant(WORDS, tuple(range(LANES)))

    def splat(self, scalar: Value, kind: ir.Type = FLOATS) -> Value:
        """Return a vector with ``scalar`` in all lanes."""
        empty = constant(kind, ir.Undefined)
        one = self.b.insert_element(empty, scalar, constant(INT, 0))
        return self.b.shuffle_vector(one, empty, self.w(0))

    def intrinsic(self, name: str, *args: Value) -> Value:
        """Call one of LLVM's functions of floats; the result has the arguments' type."""
        kind = args[0].type
        key = f"llvm.{name}.{'v16f32' if kind == FLOATS else 'f32'}"
        known = self.module.globals.get(key)
        return self.b.call(known or ir.Function(self.module, ir.FunctionType(kind, [kind] * len(args)), key), args)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return ``a * b + c``, rounded once."""
        return self.intrinsic("fma", a, b, c) if targets.here().fused else multiply_add(self.b, a, b, c)

    def greater(self, a: Value, b: Value) -> Value:
        """Return the greater of floats; NaN if ``b`` is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def tree(self, x: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Join the lanes of ``x`` to a scalar, in a tree over halves."""
        half = LANES // 2
        while half:
            mask = constant(WORDS, tuple((lane + half) % LANES for lane in range(LANES)))
            x = join(x, self.b.shuffle_vector(x, constant(FLOATS, ir.Undefined), mask))
            half //= 2
        return self.b.extract_element(x, ir.Constant(INT, 0))

    def exp(self, x: Value) -> Value:
        """Return e to the power of a vector, by Cephes' polynomial in this order.

        NaN stays NaN. Powers below -87 give about 1e-38.
        """
        b = self.b
        x = b.select(b.fcmp_ordered("<", x, self.v(_EXP_LEAST)), self.v(_EXP_LEAST), x)
        x = b.select(b.fcmp_ordered(">", x, self.v(_EXP_MOST)), self.v(_EXP_MOST), x)
        power = self.intrinsic("roundeven", b.fmul(x, self.v(_LOG2_E)))
        rest = self.fma(power, self.v(-_LN2_LOW), self.fma(power, self.v(-_LN2_HIGH), x))
        sum_ = self.v(_EXP[0])
        for term in _EXP[1:]:
            sum_ = self.fma(sum_, rest, self.v(term))
        y = b.fadd(self.fma(sum_, b.fmul(rest, rest), rest), self.v(1.0))
        known = b.fcmp_ordered("ord", power, power)
        whole = b.fptosi(b.select(known, power, self.v(0.0)), WORDS)
        return b.fmul(y, b.bitcast(b.shl(b.add(whole, self.w(127)), self.w(23)), FLOATS))

    # --- threads ---

    def spin(self, leave: Callable[[], Value], turns: Value | None = None) -> None:
        """Wait until ``leave()`` holds; let others run after many ``turns``, a variable that counts from 0."""
        turns = self.variable(self.i(0)) if turns is None else turns
        wait, more, end = self._blocks(3)
        self.b.branch(wait)
        self.b.position_at_end(wait)
        self.b.cbranch(leave(), end, more)
        self.b.position_at_end(more)
        self.pause()
        self.set(turns, self.add(self.get(turns), 1))
        with self.when(self.less(SPINS_BEFORE_YIELD, self.get(turns))):
            self.yield_processor()
        self.b.branch(wait)
        self.b.position_at_end(end)

    def yield_processor(self) -> None:
        """Let another thread run, if one waits for this processor."""
        self.b.call(self._external("sched_yield", INT), [])

    def pause(self) -> None:
        """Tell the processor that this thread waits."""
        if self.module.triple.startswith(("aarch64", "arm64")):
            self.b.call(self._external("llvm.aarch64.hint", ir.VoidType(), INT), [ir.Constant(INT, 1)])
        else:
            self.b.call(self._external("llvm.x86.sse2.pause", ir.VoidType()), [])

    def _external(self, name: str, returns: ir.Type, *args: ir.Type) -> Value:
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(returns, args), name)

    def store_atomic(self, value: Value, pointer: Value, ordering: str) -> None:
        """Store a word of 64 bits atomically.

        The builder of llvmlite has such a method, but only for typed pointers.
        """
        self.b._insert(ir.instructions.StoreAtomicInstr(self.b.block, value, pointer, ordering, 8))

    @contextmanager
    def denormals_kept(self) -> Iterator[None]:
        """Run the body with denormal numbers, whatever the thread was told before."""
        b = self.b
        if self.module.triple.startswith(("aarch64", "arm64")):
            before = b.call(self._external("llvm.aarch64.get.fpcr", LONG), [])
            change = self._external("llvm.aarch64.set.fpcr", ir.VoidType(), LONG)
            b.call(change, [b.and_(before, self.i(~_ARM_FLUSHES))])
            yield
            b.call(change, [before])
            return
        change = self._external("llvm.x86.sse.ldmxcsr", ir.VoidType(), POINTER)
        before, during = self.variable(ir.Constant(INT, 0)), self.variable(ir.Constant(INT, 0))
        b.call(self._external("llvm.x86.sse.stmxcsr", ir.VoidType(), POINTER), [before])
        self.set(during, b.and_(self.get(before), ir.Constant(INT, ~_X86_FLUSHES)))
        b.call(change, [during])
        yield
        b.call(change, [before])

    def load_atomic(self, pointer: Value) -> Value:
        return self.b.load_atomic(pointer, "acquire", 8, typ=LONG)

    def exchanged(self, word: Value, old: Value, new: Value) -> Value:
        """Replace the ``old`` value of a word; return whether no other thread was faster."""
        swap = ir.instructions.CmpXchg(self.b.block, word, old, new, "acq_rel", "acquire", "")
        self.b._insert(swap)
        return self.b.extract_value(swap, 1)

    @contextmanager
    def units(self, word: Value, count: Value, job: Value) -> Iterator[Value]:
        """Run the body for each unit that this thread claims.

        ``word`` counts claimed units, and the word behind it finished units. The upper half of both is the number of
        the ``job``: a late thread sees the number of another job and leaves. The thread that runs a unit changes no
        result.
        """
        b = self.b
        head, attempt, body, end = self._blocks(4)
        done = self.at(word, 1, LONG)
        b.branch(head)
        b.position_at_end(head)
        seen, ours, number = self._tagged(word, job)
        b.cbranch(b.and_(ours, b.icmp_signed("<", number, self.i(count))), attempt, end)
        b.position_at_end(attempt)
        b.cbranch(self.exchanged(word, seen, self.add(seen, 1)), body, head)
        b.position_at_end(body)
        yield number
        b.atomic_rmw("add", done, self.i(1), "acq_rel")
        b.branch(head)
        b.position_at_end(end)

    def finished(self, word: Value, count: Value, job: Value) -> None:
        """Wait until all units are done, or the job is an old one."""
        done = self.at(word, 1, LONG)

        def leave() -> Value:
            _, ours, number = self._tagged(done, job)
            return self.b.or_(self.b.not_(ours), self.b.icmp_signed(">=", number, self.i(count)))

        self.spin(leave)

    def _tagged(self, word: Value, job: Value) -> tuple[Value, Value, Value]:
        seen = self.load_atomic(word)
        ours = self.b.icmp_signed("==", self.b.lshr(seen, self.i(32)), job)
        return seen, ours, self.b.and_(seen, self.i(ALL_CLAIMED))
