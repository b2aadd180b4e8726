"""Kernels that exchange between GPUs by writing into each other's memory.

Contract. A sum over ranks is the sum of their fp32 numbers in the tree's order (:mod:`preheat.ops.matmul`), plus the
bias, rounded once. Each rank has added its own K splits before. Every form below adds in this order, so the form and
the number of programs change no bit.

Forms. ``EACH``: every rank sends all its numbers to all others, and adds all. ``SHARES``: every rank adds one share of
the numbers, and sends the rounded sums to the others. It moves fewer bytes, and takes one wait more. ``GATHER``: every
rank gets the numbers of all, unchanged. ``BESIDE``: it gets the rows of all, side by side.

Memory. Each program of a rank has slots in every other rank's memory, two for each sender, used in turn. The program
sends a tile into a slot, then raises its flag there to the number of its step. It reads a slot of its own memory after
the flag has reached the step. Program p of one rank only meets the programs p of the others.

Epochs. Each program counts its steps in its own memory, on the device. A count is never given by the host, so graphs
may be replayed in any order, any number of times. Every rank launches the same exchanges in the same order, so the
counts of all ranks agree. A slot is written again two steps later. The flags that the sender has waited for until then
say that the slot was read, whatever the sizes and forms of both exchanges are.

Faults. A wait ends after a limit. Then the program raises its flags on all ranks, its own ones too, to ``GONE``. Every
rank that sees it tells its host, and waits no more. Flags only grow, so it stays. A host ends the waits of its rank by
raising the rank's own flags: a program that waits reads nothing but this GPU's memory. (Looks at a word of the host,
even one in 256, held up the other rank, whose looks held up this one: 1.8 ms an exchange.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from preheat.backends.cuda.device.launch import COMPILED, begin

EACH, SHARES, GATHER, BESIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

GONE = tl.constexpr(1 << 62)
"""The flag of a program that has given up: more than any step."""

LINE = tl.constexpr(16)
"""Numbers between two flags, so that no two lie in one line of a cache."""

LOOKS = tl.constexpr(256)
"""Looks at a flag between two looks at the clock."""


@triton.jit
def _clock(looks):
    """Return nanoseconds, or in the interpreter the number of ``looks``."""
    return globaltimer() if COMPILED else looks


@triton.jit
def raise_flags(flags, epoch, PID, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Raise this program's flag in the memory of every other rank, after all its writes."""
    tl.debug_barrier()
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            tl.atomic_max(flags[rank] + (PID * WORLD + RANK) * LINE, epoch, sem="release", scope="sys")


@triton.jit
def _look(flag):
    return tl.atomic_add(flag, tl.full([], 0, tl.int64), sem="acquire", scope="sys")


@triton.jit
def _give_up(flags, silent, PID, SILENT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Tell this rank's host that rank ``SILENT`` is gone, and end all waits of this program on all ranks."""
    gone = tl.full([], GONE, tl.int64)
    tl.store(silent, tl.full([], SILENT + 1, tl.int64))
    for rank in tl.static_range(WORLD):
        for sender in tl.static_range(WORLD):
            if rank != sender and (rank == RANK or sender == RANK):
                tl.atomic_max(flags[rank] + (PID * WORLD + sender) * LINE, gone, sem="release", scope="sys")


@triton.jit
def wait(flags, silent, epoch, patience, PID, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Wait until the flags of all other ranks have reached ``epoch``, for ``patience`` at most."""
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            flag = flags[RANK] + (PID * WORLD + rank) * LINE
            seen = _look(flag)
            if seen < epoch:
                looks = tl.full([], 0, tl.int64)
                began = _clock(looks)
                waiting = seen < epoch
                while waiting:
                    seen = _look(flag)
                    looks += 1
                    waiting = seen < epoch
                    if looks % LOOKS == 0:
                        waiting = waiting & (_clock(looks) - began < patience)
            if (seen < epoch) | (seen >= GONE):
                _give_up(flags, silent, PID, rank, RANK, WORLD)
    tl.debug_barrier()


@triton.jit
def slot(room, turn, sender, PID, STRIDE: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr):
    """Return the slot of a program for tiles of ``sender`` in ``room``; ``turn`` is the number of the step."""
    place = ((turn & 1).to(tl.int32) * WORLD + sender) * PROGRAMS + PID
    return room + place * STRIDE


@triton.jit
def _numbers(
    rank: tl.constexpr, own, room, turn, at, inside, PID, RANK: tl.constexpr, WORLD: tl.constexpr,
    STRIDE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Return the tile of ``rank``: ``own``, or what the rank has sent."""
    if rank == RANK:
        found = own
    else:
        place = slot(room, turn, rank, PID, STRIDE, WORLD, PROGRAMS)
        found = tl.load(place + at, mask=inside, other=0, cache_modifier=".cg")
    return found


@triton.jit
def _pair(
    rank: tl.constexpr, own, room, turn, at, inside, PID, RANK: tl.constexpr, WORLD: tl.constexpr,
    STRIDE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the tiles of ``rank`` and of the rank after it."""
    left = _numbers(rank, own, room, turn, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
    return left + _numbers(rank + 1, own, room, turn, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)


@triton.jit
def root(
    own, room, turn, at, inside, PID, RANK: tl.constexpr, WORLD: tl.constexpr, STRIDE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Return the sum of all ranks' tiles in the tree's order."""
    total = _pair(0, own, room, turn, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
    if WORLD >= 4:
        total += _pair(2, own, room, turn, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
    if WORLD == 8:
        right = _pair(4, own, room, turn, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
        right += _pair(6, own, room, turn, at, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
        total += right
    return total


@triton.jit
def biased(total, bias, at, inside, outputs, dtype: tl.constexpr):
    """Return the sums ``total`` plus the bias of their outputs, rounded to ``dtype``."""
    if bias is not None:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def send(
    mine, parts, turn, first, size, PID, FORM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write a tile that begins at the number ``first`` of ``mine`` into the slots of all other ranks."""
    lane = tl.arange(0, BLOCK)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            at = first + lane + (rank * BLOCK if FORM == SHARES else 0)
            given = tl.load(mine + at, mask=at < size, other=0)
            place = slot(parts[rank], turn, RANK, PID, STRIDE, WORLD, PROGRAMS)
            tl.store(place + lane, given, mask=at < size)


@triton.jit
def _receive(
    mine, bias, out, parts, results, turn, first, size, outputs, columns, PID, FORM: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write what a tile of all ranks makes to ``out``; with ``SHARES`` of this rank's share, also to the others."""
    lane = tl.arange(0, BLOCK)
    at = first + lane + (RANK * BLOCK if FORM == SHARES else 0)
    inside = at < size
    own = tl.load(mine + at, mask=inside, other=0)
    if FORM == GATHER:
        for rank in tl.static_range(WORLD):
            found = _numbers(rank, own, parts[RANK], turn, lane, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
            tl.store(out + tl.cast(size, tl.int64) * rank + at, found, mask=inside)
    elif FORM == BESIDE:
        to = out + (at // outputs).to(tl.int64) * columns
        for rank in tl.static_range(WORLD):
            found = _numbers(rank, own, parts[RANK], turn, lane, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
            column = at % outputs + rank * outputs
            tl.store(to + column, found, mask=inside & (column < columns))
    else:
        total = root(own, parts[RANK], turn, lane, inside, PID, RANK, WORLD, STRIDE, PROGRAMS)
        total = biased(total, bias, at, inside, outputs, out.dtype.element_ty)
        tl.store(out + at, total, mask=inside)
        if FORM == SHARES:
            for rank in tl.static_range(WORLD):
                if rank != RANK:
                    place = slot(results[rank], turn, RANK, PID, STRIDE, WORLD, PROGRAMS)
                    tl.store(place + lane, total, mask=inside)


@triton.jit
def _take(
    out, results, turn, first, size, PID, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Copy the other ranks' shares of a tile of sums to ``out``."""
    lane = tl.arange(0, BLOCK)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            at = first + lane + rank * BLOCK
            place = slot(results[RANK], turn, rank, PID, STRIDE, WORLD, PROGRAMS)
            found = tl.load(place + lane, mask=at < size, other=0, cache_modifier=".cg")
            tl.store(out + at, found, mask=at < size)


@triton.jit
def exchange(
    mine, bias, out, parts, results, flags, epochs, silent, size, outputs, columns, patience, FORM: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PROGRAMS: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Exchange ``size`` numbers of each rank, ``mine`` of this one, into ``out``.

    ``parts``, ``results`` and ``flags`` are the memory of each rank. Step j of a program sends its tile j, makes the
    result of tile j - 1 and, with ``SHARES``, takes the results of tile j - 2. ``mine`` has rows of ``outputs``
    numbers, ``out`` has rows of ``columns``, with ``BESIDE`` perhaps fewer than all ranks have.
    """
    begin(overlap)
    PID = tl.program_id(0)
    STEP: tl.constexpr = BLOCK * (WORLD if FORM == SHARES else 1)
    LAST: tl.constexpr = 1 if FORM == SHARES else 0
    count = tl.cdiv(tl.cdiv(size, STEP) - PID, tl.num_programs(0))
    epoch = tl.load(epochs + PID)
    for step in range(count + 1 + LAST):
        turn = epoch + step
        first = (PID + step * tl.num_programs(0)) * STEP
        before = first - tl.num_programs(0) * STEP
        if step > 0:
            wait(flags, silent, turn, patience, PID, RANK, WORLD)
        if FORM == SHARES:  # noqa: SIM102 - one is known to the compiler
            if step > 1:
                long_ago = before - tl.num_programs(0) * STEP
                _take(out, results, turn - 2, long_ago, size, PID, RANK, WORLD, BLOCK, STRIDE, PROGRAMS)
        if (step > 0) & (step <= count):
            _receive(
                mine, bias, out, parts, results, turn - 1, before, size, outputs, columns, PID, FORM, RANK, WORLD,
                BLOCK, STRIDE, PROGRAMS,
            )  # fmt: skip
        if step < count:
            send(mine, parts, turn, first, size, PID, FORM, RANK, WORLD, BLOCK, STRIDE, PROGRAMS)
        if step < count + LAST:
            raise_flags(flags, turn + 1, PID, RANK, WORLD)
    tl.store(epochs + PID, epoch + count + LAST)
