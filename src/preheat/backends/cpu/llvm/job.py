"""Jobs that threads share: a function of a model runs as one, phase by phase, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from llvmlite import ir

from preheat.backends.cpu.llvm.emit import ALL_CLAIMED, LONG, POINTER, SPINS_BEFORE_YIELD, Function, Value
from preheat.backends.cpu.llvm.kinds import (
    COUNTERS,
    ENDED,
    FRAME,
    FUNCTION,
    JOB,
    LAYER,
    LAYER_FRAME,
    LENGTH,
    LINE,
    LIST,
    POSTED,
    TAKEN,
)

Phase = tuple[Value, Value, Value]
"""Arguments of :meth:`Function.units` and :meth:`Function.finished`: a counter, the number of units, and the job."""

JOB_WORDS = 5
"""Words of a listed job: a function, a layer's frame, the addresses of ``x`` and ``attended``, and the rows.

Where one of the last three words is 0, the field stays as the job before left it.
"""

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
        assert self._phases < COUNTERS, "a function has more phases than a job has counters"
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
    """Write the functions by which threads share jobs.

    ``start(frame, function, layer, thread)`` publishes a job and takes part in it until the job is done.
    ``run(frame, jobs, count, thread)`` starts one listed job after another.
    ``post(frame, jobs, count)`` publishes a list and returns. The first thread that sees the list runs it.
    ``join(frame)`` takes part in the latest list, as thread 0, until the list is done.
    ``work(frame, thread, spins, seen)`` takes part in lists, and in jobs after the job number ``seen``. It returns the
    latest job's number after ``spins`` empty turns, or -1 when the function is null.
    """
    start = _start(module, counters)
    run = _run(module, start)
    _post(module)
    _join(module, run)
    _work(module, run)


def _run(module: ir.Module, start: Value) -> Value:
    """Write the function that starts the jobs of a list, and return it."""
    e = Function(module, "run", [POINTER, POINTER, LONG, LONG])
    frame, listed, most, thread = e.args
    with e.loop(0, most) as at:
        words = e.at(listed, e.mul(at, JOB_WORDS), LONG)
        for part, name in ((2, "x"), (3, "attended"), (4, "rows")):  # no thread works now: the job before is closed
            word = e.field(words, part)
            with e.when(e.b.icmp_signed("!=", word, e.i(0))):
                e.store(word, frame, FRAME[name], LONG, 8)
        e.b.call(start, [frame, e.field(words, 0, POINTER), e.field(words, 1, POINTER), thread])
    e.close()
    return e.function


def _post(module: ir.Module) -> None:
    """Write the function that publishes a list of jobs."""
    e = Function(module, "post", [POINTER, POINTER, LONG])
    frame, listed, count = e.args
    e.store_atomic(e.b.ptrtoint(listed, LONG), e.at(frame, LIST, LONG), "release")
    e.store_atomic(count, e.at(frame, LENGTH, LONG), "release")
    place = e.at(frame, POSTED, LONG)
    e.store_atomic(e.add(e.load_atomic(place), 1), place, "seq_cst")
    e.close()


def _take_list(e: Function, frame: Value, thread: Value, run: Value) -> None:
    """Run the latest list of jobs if no thread has begun it.

    The number of the list that was taken last is read first. If it were read last, a thread that waits between the two
    reads could find that a newer list was taken, and run that list once more.
    """
    place = e.at(frame, TAKEN, LONG)
    taken = e.load_atomic(place)
    posted = e.load_atomic(e.at(frame, POSTED, LONG))
    with e.when(e.b.icmp_signed("!=", taken, posted)), e.when(e.exchanged(place, taken, posted)):
        e.b.call(run, [frame, e.field(frame, LIST, POINTER), e.field(frame, LENGTH), thread])
        e.store_atomic(posted, e.at(frame, ENDED, LONG), "release")


def _join(module: ir.Module, run: Value) -> None:
    """Write the function that takes part in the latest list until the list is done."""
    e = Function(module, "join", [POINTER])
    (frame,) = e.args
    seen, turns = e.variable(e.i(0)), e.variable(e.i(0))
    _take_list(e, frame, e.i(0), run)

    def done() -> Value:
        number = e.load_atomic(e.at(frame, JOB, LONG))
        with e.when(e.b.icmp_signed("!=", number, e.get(seen))):
            e.set(seen, number)
            _take_part(e, frame, e.i(0), number, _read_job(e, frame, number))
            e.set(turns, e.i(0))
        posted, ended = (e.load_atomic(e.at(frame, at, LONG)) for at in (POSTED, ENDED))
        return e.b.icmp_signed("==", posted, ended)

    e.spin(done, turns)
    e.close()


class _Published(NamedTuple):
    """The function of a job, its layer's frame, and whether both belong to that job and not to a later one."""

    function: Value
    layer: Value
    whole: Value


def _read_job(e: Function, frame: Value, number: Value) -> _Published:
    """Return what is published of job ``number``.

    The counters get a job's number before its function and its layer are stored, so they are read last. A function with
    a layer of another kind would follow addresses that this layer does not have.
    """
    function, layer = (e.load_atomic(e.at(frame, at, LONG)) for at in (FUNCTION, LAYER))
    word = e.load_atomic(e.field(frame, FRAME["counters"], POINTER))
    whole = e.b.icmp_signed("==", e.b.lshr(word, e.i(32)), number)
    return _Published(function, layer, whole)


def _take_part(e: Function, frame: Value, thread: Value, number: Value, job: _Published) -> None:
    """Run a thread's part of job ``number``, unless a later job is being published: then this one is over."""
    function, layer = (e.b.inttoptr(each, POINTER) for each in job[:2])
    with e.when(job.whole), e.denormals_kept():
        e.b.call(_Callee(function, _KIND), [frame, layer, thread, number])


def _start(module: ir.Module, counters: int) -> Value:
    """Write the function that publishes a job, and return it."""
    e = Function(module, "start", [POINTER, POINTER, POINTER, LONG])
    e.function.attributes.add("noinline")  # so that few functions change how denormals are treated
    frame, function, layer, thread = e.args
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
        e.b.call(_Callee(function, _KIND), [frame, layer, thread, number])
    # Close the job before its fields change: a late thread that reads the next job's rows would find units to claim.
    count(e.b.or_(tag, e.i(ALL_CLAIMED)))
    e.close()
    return e.function


def _work(module: ir.Module, run: Value) -> None:
    """Write the function that takes part in jobs."""
    e = Function(module, "work", [POINTER, LONG, LONG, LONG], LONG)
    frame, thread, spins, given = e.args
    seen, left = e.variable(given), e.variable(spins)
    e.set(seen, given)
    e.set(left, spins)
    look, part, call, stop, idle, leave = e._blocks(6)
    b = e.b
    b.branch(look)
    b.position_at_end(look)
    _take_list(e, frame, thread, run)
    number = e.load_atomic(e.at(frame, JOB, LONG))
    b.cbranch(b.icmp_signed("!=", number, e.get(seen)), part, idle)
    b.position_at_end(part)
    e.set(seen, number)
    e.set(left, spins)
    job = _read_job(e, frame, number)
    b.cbranch(b.icmp_signed("==", job.function, e.i(0)), stop, call)
    b.position_at_end(call)
    _take_part(e, frame, thread, number, job)
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
