"""A thread that is late for a job finds nothing to do, at each moment; without the closing of jobs it finds work."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install llvmlite")
from llvmlite import ir

from preheat.backends.cpu.llvm import functions, job, machine, targets, team
from preheat.backends.cpu.llvm.emit import LONG, POINTER, Function, Value
from preheat.backends.cpu.llvm.kinds import COUNTERS, ENDED, FRAME, FUNCTION, JOB, LAYER, POSTED, TAKEN, Product
from preheat.backends.cpu.llvm.memory import zeros
from tests.cpu.test_llvm import Alone
from tests.waiting import until

HOW = Product(64, 128, "float32")
EMPTY = 7.0


def code(*, closed: bool) -> machine.Code:
    """Return one product and the functions of jobs; a job that is not ``closed`` keeps its counters."""
    module = ir.Module("jobs")
    module.triple = targets.here().triple
    functions.alone(module, "alone", HOW)
    job.jobs(module, COUNTERS)
    source = str(module)
    if not closed:
        marks = re.findall(r'(%"[.\d]+") = or i64 .*, 4294967295', source)
        assert len(marks) == 1
        source, stores = re.subn(rf"^  store atomic i64 {re.escape(marks[0])}, .*\n", "", source, flags=re.MULTILINE)
        assert stores == 2
    return machine.Code(machine.compile_code(source, None)[0])


def late(alone: Alone, number: int, x: Tensor, out: Tensor) -> None:
    """Run a thread's part of job ``number``, when the fields of the frame are already the next job's."""
    alone.team.set("rows", len(x))
    alone.team.point("x", x)
    alone.team.point("attended", out)
    part = CFUNCTYPE(None, c_void_p, c_void_p, c_int64, c_int64)(alone.address)
    part(alone.team._shared.address, alone.frame.ctypes.data, 0, number)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("rows", [(1, 8), (8, 1)])
def test_a_thread_between_two_jobs_finds_nothing_to_do(closed, rows):
    """The thread has read a job's number; then the job ends, and the caller fills the frame for the next one."""
    alone = Alone(code(closed=closed), HOW, torch.randn(128, 64))
    alone(torch.randn(rows[0], 64))
    number, out = int(alone.team._frame[JOB]), torch.full((rows[1], 128), EMPTY)
    late(alone, number, torch.randn(rows[1], 64), out)
    assert bool((out == EMPTY).all()) == closed


def test_a_thread_with_the_number_of_an_older_job_finds_nothing_to_do():
    alone = Alone(code(closed=True), HOW, torch.randn(128, 64))
    for _ in range(3):
        alone(torch.randn(2, 64))
        out = torch.full((8, 128), EMPTY)
        for number in range(int(alone.team._frame[JOB]) + 1):
            late(alone, number, torch.randn(8, 64), out)
        assert bool((out == EMPTY).all())


# --- lists of jobs ---


def listed(alone: Alone, x: Tensor, out: Tensor) -> np.ndarray:
    """Return the list of two jobs: one row of ``x``, then all rows."""
    jobs = zeros(2 * job.JOB_WORDS, np.int64).reshape(2, -1)
    for words, rows in zip(jobs, (1, len(x)), strict=True):
        words[:] = alone.address, alone.frame.ctypes.data, x.data_ptr(), out.data_ptr(), rows
    return jobs


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_a_posted_list_has_the_bits_of_its_jobs(threads, late):
    """The caller joins at once, or after the other threads have done everything."""
    alone = Alone(code(closed=True), HOW, torch.randn(128, 64), threads)
    frame, x = alone.team._frame, torch.randn(6, 64)
    expected = alone(x)
    for _ in range(20):
        out = torch.full((6, 128), EMPTY)
        jobs = listed(alone, x, out)
        alone.team.post(jobs.ctypes.data, len(jobs))
        if late and threads > 1:
            assert until(lambda: frame[ENDED] == frame[POSTED])
        alone.team.join()
        assert torch.equal(out, expected)
    alone.team.join()  # there is none


def test_nothing_else_runs_before_a_posted_list_is_joined():
    alone = Alone(code(closed=True), HOW, torch.randn(128, 64))
    x, out = torch.randn(2, 64), torch.empty(2, 128)
    jobs = listed(alone, x, out)
    alone.team.post(jobs.ctypes.data, len(jobs))
    with pytest.raises(AssertionError, match="not joined yet"):
        alone(x)
    with pytest.raises(AssertionError, match="posted already"):
        alone.team.post(jobs.ctypes.data, len(jobs))
    alone.team.join()


# --- lists are taken once, whatever happens between two reads ---

RUNS = 1  # the word of the frame in which the lists that ran are counted


class Watched(Function):
    """A function that tells the word ``before_read`` of its reads, numbered from 0, before each of them."""

    reads = 0

    def load_atomic(self, pointer: Value) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [LONG])
        self.b.call(job._Callee(self.field(self.args[0], 0, POINTER), kind), [self.i(self.reads)])
        self.reads += 1
        return super().load_atomic(pointer)


def read_backwards(e: Function, frame: Value, thread: Value, run: Value) -> None:
    """Take a list as ``_take_list`` does, but read the number of the taken list last: the control."""
    posted, place = e.load_atomic(e.at(frame, POSTED, LONG)), e.at(frame, TAKEN, LONG)
    taken = e.load_atomic(place)
    with e.when(e.b.icmp_signed("!=", taken, posted)), e.when(e.exchanged(place, taken, posted)):
        e.b.call(run, [frame, frame, thread, thread])


def taking(take: Callable[..., None]) -> Callable[[np.ndarray, Callable[[int], None]], None]:
    """Compile ``take`` as a function of a frame that calls back before its reads."""
    module = ir.Module("taking")
    module.triple = targets.here().triple
    run = Function(module, "count", [POINTER, POINTER, LONG, LONG])
    run.store(run.add(run.field(run.args[0], RUNS), 1), run.args[0], RUNS, LONG, 8)
    run.close()
    e = Watched(module, "take", [POINTER])
    take(e, e.args[0], e.i(0), run.function)
    e.close()
    code = machine.Code(machine.compile_code(str(module), None)[0])

    def call(frame: np.ndarray, before_read: Callable[[int], None]) -> None:
        told = CFUNCTYPE(None, c_int64)(before_read)
        frame[0] = np.frombuffer(told, np.int64)[0]
        CFUNCTYPE(None, c_void_p)(code.address("take"))(frame.ctypes.data)

    return call


def runs_too_many(take: Callable[[np.ndarray, Callable[[int], None]], None], read: int, lists: int) -> int:
    """Return how often a list ran that had run, if others take and post ``lists`` lists before ``read``."""
    frame = zeros(64, np.int64)
    frame[POSTED] = 1

    def meanwhile(number: int) -> None:
        for _ in range(lists if number == read else 0):
            frame[TAKEN] = frame[POSTED]
            frame[RUNS] += 1
            frame[POSTED] += 1

    take(frame, meanwhile)
    return int(frame[RUNS] - frame[TAKEN])


CASES = [(read, lists) for read in (0, 1) for lists in range(4)]


def test_a_list_runs_once_whatever_happens_between_two_reads():
    take = taking(job._take_list)
    assert [runs_too_many(take, *case) for case in CASES] == [0] * len(CASES)


def test_a_list_could_run_twice_if_the_reads_were_swapped():
    """Control."""
    take = taking(read_backwards)
    assert max(runs_too_many(take, *case) for case in CASES) > 0


# --- a thread never runs a function with a layer of another job ---

PAIR = 2  # the words of the frame that a function fills with its own number and its layer


def marking(module: ir.Module, number: int) -> Function:
    """Return a function of a job that writes its number and its layer to the frame."""
    e = Function(module, f"mark{number}", [POINTER, POINTER, LONG, LONG])
    for at, value in enumerate((e.i(number), e.b.ptrtoint(e.args[1], LONG))):
        e.store(value, e.args[0], PAIR + at, LONG, 8)
    e.close()
    return e


def unchecked(e: Function, frame: Value, number: Value) -> job._Published:
    """Read a job as ``_read_job`` does, but not whether it is whole: the control."""
    function, layer, _ = job._read_job(e, frame, number)
    return job._Published(function, layer, ir.Constant(ir.IntType(1), 1))


def pair_of(read: Callable[..., job._Published], moment: int) -> list[int]:
    """Return the function and the layer that a late thread runs, if the next job is published before a read.

    The late job has function 1 and layer 1, the next one 2 and 2. Zeros: the thread runs nothing.
    """
    module = ir.Module("pair")
    module.triple = targets.here().triple
    for number in (1, 2):
        marking(module, number)
    e = Watched(module, "part", [POINTER])
    number = e.i(7)
    job._take_part(e, e.args[0], e.i(1), number, read(e, e.args[0], number))
    e.close()
    code = machine.Code(machine.compile_code(str(module), None)[0])
    frame, counters = zeros(64, np.int64), zeros(8, np.int64)

    def publish(next_one: int) -> None:
        counters[:2], frame[FUNCTION], frame[LAYER] = (6 + next_one) << 32, code.address(f"mark{next_one}"), next_one

    def meanwhile(at: int) -> None:
        if at == moment:
            publish(2)

    told = CFUNCTYPE(None, c_int64)(meanwhile)
    frame[0], frame[FRAME["counters"]] = np.frombuffer(told, np.int64)[0], counters.ctypes.data
    publish(1)
    CFUNCTYPE(None, c_void_p)(code.address("part"))(frame.ctypes.data)
    return frame[PAIR : PAIR + 2].tolist()


def test_a_function_runs_with_the_layer_of_its_job_or_not_at_all():
    assert [pair_of(job._read_job, moment) for moment in range(4)] == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_a_function_could_run_with_another_layer_without_the_last_read():
    """Control: it then follows addresses that the other layer may not have, such as those of adapters."""
    assert pair_of(unchecked, 1) == [1, 2]


def test_a_thread_without_a_processor_keeps_what_it_may_read(monkeypatch):
    monkeypatch.setattr(team, "_END_SECONDS", 0.0)
    kept = zeros(8, np.int64)
    alive = weakref.ref(kept)
    alone = Alone(code(closed=True), HOW, torch.randn(128, 64), 2)
    ended = team.Team(alone.team.code, 2, [kept])
    shared = ended._shared
    monkeypatch.setattr(shared, "wake", lambda: None)  # the thread sleeps on, as if it had no processor
    assert until(lambda: shared.asleep)
    del ended, kept
    gc.collect()
    assert alive() is not None and shared.kept
    monkeypatch.undo()
    shared.wake()
