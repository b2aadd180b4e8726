"""The recurrence for rows of one token: states come through shared memory, some rows ahead.

Contract. As :mod:`preheat.backends.cuda.delta_kernels`: the same operations in the same order, so the same bits. A row
that decodes moves its whole state for one token, so the bandwidth of memory is the limit. A program that reads a state,
computes and writes it waits for memory most of the time. Here a program takes many rows, and the states of the next
rows are on their way while it computes.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from preheat.backends.cuda.delta_kernels import SCALARS, next_power
from preheat.backends.cuda.delta_prompts import begin_token, copy_tokens, end_token, places_of, state_layout, take
from preheat.backends.cuda.launch import begin


@gluon.jit
def _row(table, positions, row, PARTS: gl.constexpr):
    """Return a row's token, slots to read and to write, whether its state is zero, and whether the row exists."""
    words, inside = table + 4 * row, row < PARTS // 4
    token, slot = gl.load(words, mask=inside, other=0), gl.load(words + 1, mask=inside, other=0)
    part, last = gl.load(words + 2, mask=inside, other=0), gl.load(words + 3, mask=inside, other=0)
    there = part < last
    write = gl.load(table + PARTS + 2 * part + 1, mask=there, other=0)
    fresh = gl.load(positions + token, mask=there, other=0) == 0
    return token.to(gl.int64), slot.to(gl.int64), write.to(gl.int64), fresh, there


@gluon.jit
def _ask(
    given, states, chunks, row, place, here, head, block, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr,
    VALUE: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Ask for the state and the numbers of a ``row``, if it exists, into a ``place`` of the ring."""
    matrix, pair, v, scalars = given
    token, slot, _, _, there = row
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    KEY: gl.constexpr = states.shape[1] * states.shape[3]
    at = matrix + (slot * HEADS + head) * (KEY * VALUE) + here
    async_copy.async_copy_global_to_shared(states.index(place), at, mask=there & (here >= 0))
    numbers = (
        pair + (token * KEY_HEADS + head // SHARE) * (2 * KEY),
        v + (token * HEADS + head) * VALUE + block * COLUMNS,
        scalars + (token * HEADS + head) * SCALARS,
    )  # fmt: skip
    copy_tokens(numbers, chunks, place, 0, there.to(gl.int32), KEY_HEADS, SHARE, VALUE, 1, COLUMNS)


@gluon.jit
def _window(
    x, window, row, unit, stride, CHANNELS: gl.constexpr, TAPS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Return the last inputs behind a row's token [taps, channels] for the channels of a ``unit``, and where they go.

    A thread has all taps of a channel: it reads them before it writes any.
    """
    token, slot, write, fresh, there = row
    OWN: gl.constexpr = (CHANNELS + UNITS - 1) // UNITS
    WIDE: gl.constexpr = next_power(OWN)
    HIGH: gl.constexpr = next_power(TAPS - 1)
    layout: gl.constexpr = gl.BlockedLayout([HIGH, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    tap = gl.arange(0, HIGH, gl.SliceLayout(1, layout))[:, None]
    own = gl.arange(0, WIDE, gl.SliceLayout(0, layout))[None, :]
    channel = unit * OWN + own
    inside = there & (tap < TAPS - 1) & (own < OWN) & (channel < CHANNELS)
    new = gl.load(x + token * stride + channel, mask=inside & (tap == TAPS - 2), other=0.0)
    old = window + (slot * (TAPS - 1) + tap + 1) * CHANNELS + channel
    kept = gl.load(old, mask=inside & (tap < TAPS - 2) & (fresh == 0), other=0.0)
    to = window + (write * (TAPS - 1) + tap) * CHANNELS + channel
    return gl.where(tap == TAPS - 2, new, kept), to, inside


@gluon.jit(do_not_specialize_on_alignment=["positions"])
def recur_rows(
    x, positions, table, window, matrix, pair, v, scalars, out, stride, KEY_HEADS: gl.constexpr,
    SHARE: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr, TAPS: gl.constexpr, PARTS: gl.constexpr,
    COLUMNS: gl.constexpr, RUN: gl.constexpr, LANES: gl.constexpr, RULE: gl.constexpr, PLACES: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    """Run step 4 of the contract for some columns of a value head, and keep windows; a program has every n-th row.

    Each row has one token. The states of ``PLACES`` - 1 rows are on their way.
    """
    begin(overlap)
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    RUNS: gl.constexpr = KEY // RUN
    BLOCKS: gl.constexpr = VALUE // COLUMNS
    layout: gl.constexpr = state_layout(RUNS, COLUMNS, LANES, gl.num_warps())
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    two: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    states = gl.allocate_shared_memory(
        gl.float32, [PLACES, RUNS, COLUMNS, RUN], gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1])
    )
    shared = (  # a row's numbers
        gl.allocate_shared_memory(gl.float32, [PLACES * 2, RUNS, RUN], two),
        gl.allocate_shared_memory(gl.float32, [PLACES, COLUMNS], one),
        gl.allocate_shared_memory(gl.float32, [PLACES, SCALARS], one),
    )
    chunks = (  # the same memory, by rows
        shared[0]._reinterpret(gl.float32, [PLACES, 2, RUNS, RUN], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])),
        shared[1]._reinterpret(gl.float32, [PLACES, 1, COLUMNS], two),
        shared[2]._reinterpret(gl.float32, [PLACES, 1, SCALARS], two),
    )
    block, head, number = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    column = block * COLUMNS + gl.arange(0, COLUMNS, columns)
    here = places_of(column, KEY, RUN, layout)
    given, every = (matrix, pair, v, scalars), gl.num_programs(2)
    for place in gl.static_range(PLACES - 1):
        behind = _row(table, positions, number + place * every, PARTS)
        _ask(given, states, chunks, behind, place, here, head, block, KEY_HEADS, SHARE, VALUE, COLUMNS)
    row = _row(table, positions, number, PARTS)
    behind = _row(table, positions, number + (PLACES - 1) * every, PARTS)
    place = 0
    while row[4]:
        async_copy.wait_group(PLACES - 2)
        tl.debug_barrier()  # all threads' copies are there, and the row before has been read
        asked = (place + PLACES - 1) % PLACES
        _ask(given, states, chunks, behind, asked, here, head, block, KEY_HEADS, SHARE, VALUE, COLUMNS)
        behind = _row(table, positions, number + PLACES * every, PARTS)
        kept, to, inside = _window(
            x, window, row, head * BLOCKS + block, stride, 2 * KEY_HEADS * KEY + HEADS * VALUE, TAPS, HEADS * BLOCKS
        )
        state = gl.where(row[3], 0.0, states.index(place).load(layout))
        own = take(shared, place, layout, RULE)
        state, seen = begin_token(state, own, LANES, RULE)
        state = end_token(
            shared, place, state, own, seen, out + (row[0] * HEADS + head) * VALUE + column, LANES, layout, RULE
        )
        gl.store(matrix + (row[2] * HEADS + head) * (KEY * VALUE) + here, state)
        gl.store(to, kept, mask=inside)
        number += every
        row = _row(table, positions, number, PARTS)
        place = (place + 1) % PLACES
    async_copy.wait_group(0)
