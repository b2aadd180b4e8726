"""The recurrence for prompts: tokens come through shared memory, some at a time.

Contract. As :mod:`preheat.backends.cuda.recurrence.kernels`: the same operations in the same order, so the same bits.
There a program asks for each token's numbers one token ahead. A prompt has thousands of tokens, and each would wait for
the L2 cache. Here a program copies ``CHUNK`` tokens at once into shared memory, while it computes the tokens before
them.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import constexpr_function

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.recurrence.kernels import BETA, CROSS, DECAY, NEIGHBORS, SCALARS, SKIP, log2

BUFFERS = gl.constexpr(2)


@constexpr_function
def state_layout(runs, columns, lanes, warps):
    """Return the layout of a state [runs, columns, run] in registers: lanes share a column, warps have columns each."""
    down = 32 // lanes
    return gl.BlockedLayout([runs, columns // (down * warps), NEIGHBORS], [1, down, lanes], [1, warps, 1], [2, 1, 0])


@gluon.jit
def places_of(column, KEY: gl.constexpr, RUN: gl.constexpr, layout: gl.constexpr):
    """Return the places of a head's numbers in memory, [runs, columns, run], for its columns ``column``."""
    run = gl.arange(0, KEY // RUN, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    number = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return run * RUN + column[None, :, None] * KEY + number


@gluon.jit
def _added(one, other):
    return one + other


@gluon.jit
def _lane_sums(x, LANES: gl.constexpr):
    """See :func:`preheat.backends.cuda.recurrence.kernels._lane_sums`."""
    COLUMNS: gl.constexpr = x.shape[1]
    x = gl.reshape(gl.permute(x, (1, 2, 0)), [COLUMNS, LANES, x.shape[0] * x.shape[2] // LANES])
    for _ in gl.static_range(log2(x.shape[2])):
        one, other = gl.split(gl.reshape(x, [COLUMNS, LANES, x.shape[2] // 2, 2]))
        x = one + other
    return gl.reshape(x, [COLUMNS, LANES])


@gluon.jit
def _added_lanes(x, layout: gl.constexpr):
    """Return the sums of x [columns, lanes] over lanes: 4 apart, then 2, then 1."""
    return gl.convert_layout(gl.reduce(x, 1, _added), layout)


@gluon.jit
def copy_tokens(
    given, chunks, turn, first, size, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, VALUE: gl.constexpr,
    CHUNK: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Ask for the numbers of the tokens from ``first`` on, below ``size``, into the buffer ``turn`` of ``chunks``."""
    pair, v, scalars = given
    pairs, values, numbers = chunks[0].index(turn), chunks[1].index(turn), chunks[2].index(turn)
    RUNS: gl.constexpr = pairs.shape[1]
    RUN: gl.constexpr = pairs.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    wide: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 * 4 // RUN, RUN // 4], [WARPS, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [WARPS, 1], [1, 0])
    each: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    token = gl.arange(0, CHUNK * 2, gl.SliceLayout(1, gl.SliceLayout(2, wide)))[:, None, None]
    run = gl.arange(0, RUNS, gl.SliceLayout(0, gl.SliceLayout(2, wide)))[None, :, None]
    number = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(1, wide)))[None, None, :]
    at = token // 2 * (2 * KEY_HEADS * RUNS * RUN) + token % 2 * (RUNS * RUN) + run * RUN + number
    pair += gl.to_tensor(first).to(gl.int64) * (2 * KEY_HEADS * RUNS * RUN)
    async_copy.async_copy_global_to_shared(pairs, pair + at, mask=token // 2 < size - first)
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, flat))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, flat))[None, :]
    v += gl.to_tensor(first).to(gl.int64) * (KEY_HEADS * SHARE * VALUE)
    at = token * (KEY_HEADS * SHARE * VALUE) + column
    async_copy.async_copy_global_to_shared(values, v + at, mask=token < size - first)
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, each))[:, None]
    number = gl.arange(0, SCALARS, gl.SliceLayout(0, each))[None, :]
    scalars += gl.to_tensor(first).to(gl.int64) * (KEY_HEADS * SHARE * SCALARS)
    at = token * (KEY_HEADS * SHARE * SCALARS) + number
    async_copy.async_copy_global_to_shared(numbers, scalars + at, mask=token < size - first)
    async_copy.commit_group()


@gluon.jit
def take(shared, token, state: gl.constexpr, RULE: gl.constexpr):
    """Return a token's key [runs, 1, run], values [columns], decay, beta, tree(k * q) and skip, if there is one."""
    pairs, values, numbers = shared
    column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, state))
    key = gl.expand_dims(pairs.index(token * 2).load(gl.SliceLayout(1, state)), 1)
    value, own = values.index(token).load(column), numbers.index(token)
    rate = own.slice(DECAY, 1).load(column)
    share = own.slice(BETA, 1).load(column)
    cross = own.slice(CROSS, 1).load(column)
    skip = own.slice(SKIP, 1).load(column) if RULE.skip else cross
    return (key, value, rate, share, cross, skip) if RULE.skip else (key, value, rate, share, cross)


@gluon.jit
def begin_token(state, numbers, LANES: gl.constexpr, RULE: gl.constexpr):
    """Return the state behind a token's decay, and the sums of each lane's own numbers of state * key.

    The sums are any numbers where the rule subtracts nothing.
    """
    state = state * numbers[2][None, :, None]
    seen = numbers[1]
    if RULE.delta:
        seen = _lane_sums(state * numbers[0], LANES)
    return state, seen


@gluon.jit
def pass_token(shared, token, state, layout: gl.constexpr):
    """Return the state behind a token whose change is known: it stands in place of the token's values."""
    pairs, values, numbers = shared
    column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    key = gl.expand_dims(pairs.index(token * 2).load(gl.SliceLayout(1, layout)), 1)
    rate, change = numbers.index(token).slice(DECAY, 1).load(column), values.index(token).load(column)
    return state * rate[None, :, None] + key * change[None, :, None]


@gluon.jit
def end_token(
    shared, token, state, numbers, seen, answers, LANES: gl.constexpr, layout: gl.constexpr, RULE: gl.constexpr
):
    """Store a token's answers, and return the state behind the token and its change [columns]."""
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    key, value, share, cross = numbers[0], numbers[1], numbers[3], numbers[4]
    if RULE.delta:
        seen = _added_lanes(seen, columns)
    query = gl.expand_dims(shared[0].index(token * 2 + 1).load(gl.SliceLayout(1, layout)), 1)
    answer = _added_lanes(_lane_sums(state * query, LANES), columns)
    change = (value - seen) * share if RULE.delta else value * share
    answer = answer + cross * change
    if RULE.skip:
        answer = answer + numbers[5] * value
    gl.store(answers, answer)
    return state + key * change[None, :, None], change


@gluon.jit(do_not_specialize_on_alignment=["positions"])
def recur_prompts(
    positions, table, matrix, begun, pair, v, scalars, out, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr, RUN: gl.constexpr,
    LANES: gl.constexpr, RULE: gl.constexpr, CHUNK: gl.constexpr, ONE: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Run step 4 of the contract for some columns of a value head; a program has every n-th row.

    ``ONE``: only a step of one row is served, else only a step of several rows.
    """
    begin(overlap)
    HEADS: gl.constexpr = KEY_HEADS * SHARE
    RUNS: gl.constexpr = KEY // RUN
    layout: gl.constexpr = state_layout(RUNS, COLUMNS, LANES, gl.num_warps())
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    two: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    three: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shared = (  # a token's numbers
        gl.allocate_shared_memory(gl.float32, [BUFFERS * CHUNK * 2, RUNS, RUN], two),
        gl.allocate_shared_memory(gl.float32, [BUFFERS * CHUNK, COLUMNS], one),
        gl.allocate_shared_memory(gl.float32, [BUFFERS * CHUNK, SCALARS], one),
    )
    chunks = (  # the same memory, by chunks
        shared[0]._reinterpret(gl.float32, [BUFFERS, CHUNK * 2, RUNS, RUN], three),
        shared[1]._reinterpret(gl.float32, [BUFFERS, CHUNK, COLUMNS], two),
        shared[2]._reinterpret(gl.float32, [BUFFERS, CHUNK, SCALARS], two),
    )
    block, head, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    column = block * COLUMNS + gl.arange(0, COLUMNS, columns)
    here = places_of(column, KEY, RUN, layout)
    several = False
    if PARTS > 4:  # the table has room for a second row
        several = gl.load(table + 6) < gl.load(table + 7)
    if several == ONE:
        row += PARTS  # another launch serves the step
    while row < PARTS // 4:
        words = table + 4 * row
        first, slot = gl.load(words), gl.load(words + 1).to(gl.int64)
        part, last = gl.load(words + 2), gl.load(words + 3)
        if part < last:
            start, size = first.to(gl.int64), gl.load(table + PARTS + 2 * last - 2) - first
            given = (
                pair + (start * KEY_HEADS + head // SHARE) * (2 * KEY),
                v + (start * HEADS + head) * VALUE + block * COLUMNS,
                scalars + (start * HEADS + head) * SCALARS,
            )  # fmt: skip
            tl.debug_barrier()  # the row before has been read
            copy_tokens(given, chunks, 0, 0, size, KEY_HEADS, SHARE, VALUE, CHUNK, COLUMNS)
            state = gl.load(matrix + (slot * HEADS + head) * (KEY * VALUE) + here)
            before = gl.load(positions + first)
            state = gl.where(before == 0, 0.0, state)
            until, write = gl.load(table + PARTS + 2 * part), gl.load(table + PARTS + 2 * part + 1)  # of the part
            answers = out + (start * HEADS + head) * VALUE + column
            for chunk in range(gl.cdiv(size, CHUNK)):
                tl.debug_barrier()  # the chunk before the last has been read
                done, turn = chunk * CHUNK, (chunk + 1) % BUFFERS
                copy_tokens(given, chunks, turn, done + CHUNK, size, KEY_HEADS, SHARE, VALUE, CHUNK, COLUMNS)
                async_copy.wait_group(1)
                tl.debug_barrier()
                base = chunk % BUFFERS * CHUNK
                count = gl.minimum(size - done, CHUNK)
                token = 0
                while token < count:
                    left = until - first - done  # the part's end
                    ends = gl.minimum(left, count) if left > token else count
                    own = take(shared, base + token, layout, RULE)
                    state, seen = begin_token(state, own, LANES, RULE)
                    for _ in range((ends - token - 1) // 2):  # two tokens: no key moves between registers
                        held, at = base + token, answers + (done + token) * (HEADS * VALUE)
                        behind = take(shared, held + 1, layout, RULE)
                        state = end_token(shared, held, state, own, seen, at, LANES, layout, RULE)[0]
                        state, seen = begin_token(state, behind, LANES, RULE)
                        own = take(shared, held + 2, layout, RULE)
                        state = end_token(
                            shared, held + 1, state, behind, seen, at + HEADS * VALUE, LANES, layout, RULE
                        )[0]
                        state, seen = begin_token(state, own, LANES, RULE)
                        token += 2
                    if token < ends - 1:
                        held, at = base + token, answers + (done + token) * (HEADS * VALUE)
                        behind = take(shared, held + 1, layout, RULE)
                        state = end_token(shared, held, state, own, seen, at, LANES, layout, RULE)[0]
                        own = behind
                        state, seen = begin_token(state, own, LANES, RULE)
                    at = answers + (done + ends - 1) * (HEADS * VALUE)
                    state = end_token(shared, base + ends - 1, state, own, seen, at, LANES, layout, RULE)[0]
                    token = ends
                    if left == token:
                        gl.store(matrix + (write.to(gl.int64) * HEADS + head) * (KEY * VALUE) + here, state)
                        if begun is not None:
                            gl.store(begun + write, before + until - first, mask=block + head == 0)
                        part += 1
                        until = gl.load(table + PARTS + 2 * part, mask=part < last, other=0)
                        write = gl.load(table + PARTS + 2 * part + 1, mask=part < last, other=0)
            async_copy.wait_group(0)
        row += gl.num_programs(2)
