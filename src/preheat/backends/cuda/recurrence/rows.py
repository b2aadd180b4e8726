"""The recurrence for rows of one token: states come through shared memory, some rows ahead, and are seldom written.

Contract. As :mod:`preheat.backends.cuda.recurrence.kernels`: the same operations in the same order, so the same bits. A
row that decodes moves its whole state for one token, so the bandwidth of memory is the limit. A program that reads a
state, computes and writes it waits for memory most of the time. Here a program takes many rows, and the states of the
next rows are on their way while it computes.

Tapes. A state is written behind each :data:`TAPE`-th token only. The numbers of the tokens behind it, a fiftieth of a
state each, lie on a tape of the sequence's slot, with the token's change d in place of its values. So the state behind
them is S * decay + k * d once for each, and each operation gives what it gave. This changes no bit, and saves three
writes of four. Sequences of neighboring slots write behind different tokens, so that steps take equal time.

``begun`` [state slots] is the position up to which a state was made elsewhere: by a kernel for prompts, or of another
slot's state. Tokens before it are not on the tape. Kernels for prompts read whole states, so :func:`settle_rows` comes
before them.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.recurrence.kernels import SCALARS, TAPE, next_power
from preheat.backends.cuda.recurrence.prompts import (
    begin_token,
    copy_tokens,
    end_token,
    pass_token,
    places_of,
    state_layout,
    take,
)


@gluon.jit
def _waiting(begun, position, sequence, own):
    """Return how many tokens on its tape the state of a sequence lacks, before the token at ``position``.

    ``own``: the state lies in the slot of the sequence; other states lack none. Dummy steps have any positions, and
    none of them may find a number below zero.
    """
    own = own & (position > 0)
    since = gl.load(begun + sequence + 1, mask=own, other=0)
    return gl.maximum(gl.where(own, gl.minimum((position + sequence) % TAPE, position - since), 0), 0)


@gluon.jit
def _row(table, positions, slots, begun, row, PARTS: gl.constexpr, TAPES: gl.constexpr):
    """Return a row's token, slots to read and to write, position, sequence, tokens on its tape, and whether it exists.

    The tape's tokens are those that the state lacks.
    """
    words, inside = table + 4 * row, row < PARTS // 4
    token, slot = gl.load(words, mask=inside, other=0), gl.load(words + 1, mask=inside, other=0)
    part, last = gl.load(words + 2, mask=inside, other=0), gl.load(words + 3, mask=inside, other=0)
    there = part < last
    write = gl.load(table + PARTS + 2 * part + 1, mask=there, other=0)
    position = gl.load(positions + token, mask=there, other=0)
    sequence = gl.minimum(gl.load(slots + token, mask=there, other=0), TAPES - 1)
    waiting = _waiting(begun, position, sequence, there & (slot == sequence + 1))
    return token.to(gl.int64), slot.to(gl.int64), write.to(gl.int64), position, sequence, waiting, there


@gluon.jit
def _tape(
    given, sequence, position, waiting, head, block, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, KEY: gl.constexpr,
    VALUE: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Return where the numbers of a head lie, from the first token on that ``waiting`` ones begin with."""
    pair, v, scalars = given
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    entry = (sequence * TAPE + (position + sequence) % TAPE - waiting).to(gl.int64)
    return (
        pair + (entry * KEY_HEADS + head // SHARE) * (2 * KEY),
        v + (entry * HEADS + head) * VALUE + block * COLUMNS,
        scalars + (entry * HEADS + head) * SCALARS,
    )  # fmt: skip


@gluon.jit
def _ask(
    matrix, given, states, chunks, row, place, here, head, block, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr,
    VALUE: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Ask for the state of a ``row`` and the numbers of its tokens, if it exists, into a ``place`` of the ring."""
    _, slot, _, position, sequence, waiting, there = row
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    KEY: gl.constexpr = states.shape[1] * states.shape[3]
    at = matrix + (slot * HEADS + head) * (KEY * VALUE) + here
    async_copy.async_copy_global_to_shared(states.index(place), at, mask=there & (here >= 0))
    numbers = _tape(given, sequence, position, waiting, head, block, KEY_HEADS, SHARE, KEY, VALUE, COLUMNS)
    size = gl.where(there, waiting + 1, 0)
    copy_tokens(numbers, chunks, place, 0, size, KEY_HEADS, SHARE, VALUE, TAPE, COLUMNS)


@gluon.jit
def _window(
    x, window, row, unit, stride, CHANNELS: gl.constexpr, TAPS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Return the last inputs behind a row's token [taps, channels] for the channels of a ``unit``, and where they go.

    A thread has all taps of a channel: it reads them before it writes any.
    """
    token, slot, write, position, _, _, there = row
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
    kept = gl.load(old, mask=inside & (tap < TAPS - 2) & (position > 0), other=0.0)
    to = window + (write * (TAPS - 1) + tap) * CHANNELS + channel
    return gl.where(tap == TAPS - 2, new, kept), to, inside


@gluon.jit
def _numbers(PLACES: gl.constexpr, RUNS: gl.constexpr, RUN: gl.constexpr, COLUMNS: gl.constexpr):
    """Return shared memory for the numbers of the tokens of ``PLACES`` rows: by token, and by row."""
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    two: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    three: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    pairs = gl.allocate_shared_memory(gl.float32, [PLACES * TAPE * 2, RUNS, RUN], two)
    values = gl.allocate_shared_memory(gl.float32, [PLACES * TAPE, COLUMNS], one)
    scalars = gl.allocate_shared_memory(gl.float32, [PLACES * TAPE, SCALARS], one)
    chunks = (
        pairs._reinterpret(gl.float32, [PLACES, TAPE * 2, RUNS, RUN], three),
        values._reinterpret(gl.float32, [PLACES, TAPE, COLUMNS], two),
        scalars._reinterpret(gl.float32, [PLACES, TAPE, SCALARS], two),
    )
    return (pairs, values, scalars), chunks


@gluon.jit(do_not_specialize_on_alignment=["positions", "slots"])
def recur_rows(
    x, positions, slots, table, window, matrix, begun, pair, v, scalars, out, stride, KEY_HEADS: gl.constexpr,
    SHARE: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr, TAPS: gl.constexpr, PARTS: gl.constexpr,
    COLUMNS: gl.constexpr, RUN: gl.constexpr, LANES: gl.constexpr, RULE: gl.constexpr, TAPES: gl.constexpr,
    PLACES: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Run step 4 of the contract for some columns of a value head, and keep windows; a program has every n-th row.

    Each row has one token. The states of ``PLACES`` - 1 rows are on their way. Numbers lie on ``TAPES`` tapes.
    """
    begin(overlap)
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    RUNS: gl.constexpr = KEY // RUN
    BLOCKS: gl.constexpr = VALUE // COLUMNS
    layout: gl.constexpr = state_layout(RUNS, COLUMNS, LANES, gl.num_warps())
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    states = gl.allocate_shared_memory(
        gl.float32, [PLACES, RUNS, COLUMNS, RUN], gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1])
    )
    shared, chunks = _numbers(PLACES, RUNS, RUN, COLUMNS)
    block, head, number = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    column = block * COLUMNS + gl.arange(0, COLUMNS, columns)
    here = places_of(column, KEY, RUN, layout)
    given, every = (pair, v, scalars), gl.num_programs(2)
    for place in gl.static_range(PLACES - 1):
        behind = _row(table, positions, slots, begun, number + place * every, PARTS, TAPES)
        _ask(matrix, given, states, chunks, behind, place, here, head, block, KEY_HEADS, SHARE, VALUE, COLUMNS)
    row = _row(table, positions, slots, begun, number, PARTS, TAPES)
    behind = _row(table, positions, slots, begun, number + (PLACES - 1) * every, PARTS, TAPES)
    place = 0
    while row[6]:
        async_copy.wait_group(PLACES - 2)
        tl.debug_barrier()  # all threads' copies are there, and the row before has been read
        asked = (place + PLACES - 1) % PLACES
        _ask(matrix, given, states, chunks, behind, asked, here, head, block, KEY_HEADS, SHARE, VALUE, COLUMNS)
        behind = _row(table, positions, slots, begun, number + PLACES * every, PARTS, TAPES)
        kept, to, inside = _window(
            x, window, row, head * BLOCKS + block, stride, 2 * KEY_HEADS * KEY + HEADS * VALUE, TAPS, HEADS * BLOCKS
        )
        token, slot, write, position, sequence, waiting, _ = row
        state = gl.where(position == waiting, 0.0, states.index(place).load(layout))  # no token before the tape's
        at = place * TAPE + waiting
        for passed in range(place * TAPE, at):
            state = pass_token(shared, passed, state, layout)
        own = take(shared, at, layout, RULE)
        state, seen = begin_token(state, own, LANES, RULE)
        answers = out + (token * HEADS + head) * VALUE + column
        state, change = end_token(shared, at, state, own, seen, answers, LANES, layout, RULE)
        stays, turn = (slot == write) & (slot == sequence + 1), (position + sequence) % TAPE
        if (stays == 0) | (turn == TAPE - 1):
            gl.store(matrix + (write * HEADS + head) * (KEY * VALUE) + here, state)
        else:
            gl.store(v + ((sequence * TAPE + turn).to(gl.int64) * HEADS + head) * VALUE + column, change)
        anew = ((stays == 0) | (position == 0)) & (block + head == 0)
        gl.store(begun + write, gl.where(stays, 0, position + 1), mask=anew)
        gl.store(to, kept, mask=inside)
        number += every
        row = _row(table, positions, slots, begun, number, PARTS, TAPES)
        place = (place + 1) % PLACES
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize_on_alignment=["positions", "slots"])
def settle_rows(
    positions, slots, table, matrix, begun, pair, v, scalars, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr, RUN: gl.constexpr,
    LANES: gl.constexpr, RULE: gl.constexpr, TAPES: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Bring the states that rows will read up to the rows' first tokens, for some columns of a value head.

    A program has every n-th row.
    """
    begin(overlap)
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    RUNS: gl.constexpr = KEY // RUN
    layout: gl.constexpr = state_layout(RUNS, COLUMNS, LANES, gl.num_warps())
    shared, chunks = _numbers(1, RUNS, RUN, COLUMNS)
    block, head, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    column = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    here = places_of(column, KEY, RUN, layout)
    while row < PARTS // 4:
        words = table + 4 * row
        token, slot = gl.load(words), gl.load(words + 1)
        if gl.load(words + 2) < gl.load(words + 3):
            position, sequence = gl.load(positions + token), gl.minimum(gl.load(slots + token), TAPES - 1)
            waiting = _waiting(begun, position, sequence, slot == sequence + 1)
            if waiting > 0:
                at = matrix + (slot.to(gl.int64) * HEADS + head) * (KEY * VALUE) + here
                numbers = _tape(
                    (pair, v, scalars), sequence, position, waiting, head, block, KEY_HEADS, SHARE, KEY, VALUE, COLUMNS
                )
                tl.debug_barrier()  # the row before has been read
                copy_tokens(numbers, chunks, 0, 0, waiting, KEY_HEADS, SHARE, VALUE, TAPE, COLUMNS)
                state = gl.where(position == waiting, 0.0, gl.load(at))
                async_copy.wait_group(0)
                tl.debug_barrier()
                for passed in range(waiting):
                    state = pass_token(shared, passed, state, layout)
                gl.store(at, state)
        row += gl.num_programs(2)
