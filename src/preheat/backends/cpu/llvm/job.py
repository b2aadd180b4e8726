"""Jobs that threads share: a function of a model runs as one, phase by phase, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llvmlite import ir

from preheat.backends.cpu.llvm.emit import ALL_CLAIMED, LONG, POINTER, SPINS_BEFORE_YIELD, Function, Value
from preheat.backends.cpu.llvm.kinds import FRAME, FUNCTION, JOB, LAYER, LAYER_FRAME, LINE

Phase = tuple[Value, Value, Value]
"""Arguments of :meth:`Function.units` and :meth:`Function.finished`: a counter, the number of units, and the job."""

JOB_WORDS = 4
"""Words of a listed job."""

_ARGS = [POINTER, POINTER, LONG, LONG]
_KIND = ir.FunctionType(ir.VoidType(), _ARGS)


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

    def phase(self, units: Value) -> Phase:
        """Return the arguments of :meth:`units` and :meth:`finished` for the next counter."""
        word = self.at(self.pointer("counters"), self._phases * LINE, LONG)
        self._phases += 1
        return word, self.i(units), self.number


class Once:
    """Work that a thread does before its first unit that needs it."""

    def __init__(self, e: Job, work: Callable[[], None]) -> None:
        self._e, self._work, self._done = e, work, e.variable(e.i(0))

    def __call__(self) -> None:
        e = self._e
        with e.when(e.b.icmp_signed("==", e.get(self._done), e.i(0))):
            self._work()
            e.set(self._done, e.i(1))


def wait(e: Job, phases: Iterable[Phase]) -> None:
    """Wait until all units of ``phases`` are done."""
    for phase in phases:
        e.finished(*phase)


def jobs(module: ir.Module, counters: int) -> None:
    """Write the functions ``start``, ``run`` and ``work``, by which threads share jobs.

    ``start(frame, function, layer)`` publishes a job and takes part in it, as thread 0, until the job is done.
    ``run(frame, jobs, count)`` starts one job after another. A job is four words: a function, a layer's frame, and the
    addresses of ``x`` and ``attended``. An address of 0 leaves the field as it is.
    ``work(frame, thread, spins, seen)`` takes part in jobs after the job number ``seen``. It returns the latest job's
    number after ``spins`` empty turns, or -1 when the function is null.
    """
    start = _start(module, counters)
    e = Function(module, "run", [POINTER, POINTER, LONG])
    frame, listed, most = e.args
    with e.loop(0, most) as at:
        function, layer = (e.field(listed, e.add(e.mul(at, JOB_WORDS), part), POINTER) for part in (0, 1))
        for part, name in ((2, "x"), (3, "attended")):  # no thread works now: the job before is closed
            address = e.field(listed, e.add(e.mul(at, JOB_WORDS), part))
            with e.when(e.b.icmp_signed("!=", address, e.i(0))):
                e.store(address, frame, FRAME[name], LONG, 8)
        e.b.call(start, [frame, function, layer])
    e.close()
    _work(module)


def _start(module: ir.Module, counters: int) -> Value:
    """Write the function that publishes a job, and return it."""
    e = Function(module, "start", [POINTER, POINTER, POINTER])
    e.function.attributes.add("noinline")  # so that only this function and "work" change how denormals are treated
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
        e.b.call(_Callee(function, _KIND), [frame, layer, e.i(0), number])
    # Close the job before its fields change: a late thread that reads the next job's rows would find units to claim.
    count(e.b.or_(tag, e.i(ALL_CLAIMED)))
    e.close()
    return e.function


def _work(module: ir.Module) -> None:
    """Write the function that takes part in jobs."""
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
        b.call(_Callee(function, _KIND), [frame, layer, thread, number])
    b.branch(look)
    b.position_at_end(stop)
    b.ret(e.i(-1))
    b.position_at_end(idle)
    e.pause()
    e.set(left, e.sub(e.get(left), 1))
    with e.when(e.less(e.get(left), e.sub(spins, SPINS_BEFORE_YIELD))):  # others may need this processor by now
        e.yield_processor()
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
