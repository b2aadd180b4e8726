"""Kernels of a recurrence: inputs of each token, the recurrence itself, and the gated norm behind it.

Contract. As in :mod:`preheat.ops.delta`: the same operations in the same order, each rounded once, with the same tree
for each sum. ``enable_fp_fusion=False`` keeps multiplications and additions apart. Exponentials, logarithms, divisions
and square roots are the device's, so bits differ from a CPU's. log1p(e) is log(1 + e) * e / ((1 + e) - 1).
``RULE`` is the recurrence's :class:`~preheat.ops.values.StateRule`, known when a kernel is compiled.

A program of the recurrence takes some columns of a value head's matrix through all tokens of a row, one after the
other, and keeps them in registers. Rows that decode and prompts run the same program. Columns never meet. So neither
the number of columns in a program, nor warps, nor the number of rows, nor a cut of a prompt changes a bit.

The key dim is spread over ``LANES`` neighboring lanes of a warp. Number r * LANES + lane is number r of a lane. So the
first levels of the tree are additions inside of a lane, and the last levels exchange numbers between lanes. Each lane
reads up to 4 neighboring numbers at once, so keys, queries and matrices lie in memory in the order of :func:`places`.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import constexpr_function

from preheat.backends.cuda.device.launch import COMPILED, begin

LANES = 8
"""Lanes of a warp that share a column."""

NEIGHBORS = 4
"""Numbers that a lane reads at once."""

SCALARS, DECAY, BETA, CROSS, SKIP = tl.constexpr(4), tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""The numbers of a token and a value head: their count, and the places of decay, beta, tree(k * q) and skip."""

TAPE = tl.constexpr(4)
"""Tokens of a sequence's tape, see :mod:`preheat.backends.cuda.recurrence.rows`."""


@constexpr_function
def log2(number):
    """Return the logarithm of a power of two."""
    return number.bit_length() - 1


@constexpr_function
def next_power(number):
    """Return the least power of two that is no less than ``number``."""
    return 1 << (number - 1).bit_length()


@constexpr_function
def limited(rule):
    """Return whether steps have limits."""
    return rule.limits != (0.0, math.inf)


@triton.jit
def halves(x):
    """Return the sum of x [rows, numbers] over numbers: the first half plus the second half, until one is left."""
    for _ in tl.static_range(log2(x.shape[1])):
        one, other = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        x = one + other
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _lane_sums(x, LANES: tl.constexpr):
    """Return the sums of each lane's own numbers of x [runs, columns, run]: [columns, lanes]."""
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.reshape(tl.permute(x, (1, 2, 0)), [COLUMNS, LANES, x.shape[0] * x.shape[2] // LANES])
    for _ in tl.static_range(log2(x.shape[2])):
        one, other = tl.split(tl.reshape(x, [COLUMNS, LANES, x.shape[2] // 2, 2]))
        x = one + other
    return tl.reshape(x, [COLUMNS, LANES])


@triton.jit
def _add_pairs(one, other, more, others):
    return one + more, other + others


@triton.jit
def _add(one, other):
    return one + other


@triton.jit
def column_sum(x, LANES: tl.constexpr):
    """Return the tree sums of x, see :func:`column_sums`."""
    x = _lane_sums(x, LANES)
    if COMPILED:
        return tl.reduce(x, 1, _add)
    return halves(x)


@triton.jit
def column_sums(x, y, LANES: tl.constexpr):
    """Return the tree sums of x and of y [runs, columns, run] over the key dim, in the order of :func:`places`.

    Both are [columns]. Their lanes meet at the same time, so one sum waits beside the other.
    """
    x, y = _lane_sums(x, LANES), _lane_sums(y, LANES)
    if COMPILED:  # lanes meet in halves, too: 4 apart, then 2, then 1
        return tl.reduce((x, y), 1, _add_pairs)
    return halves(x), halves(y)


@cache
def places(size: int, device: torch.device) -> Tensor:
    """Return the place of each number of a key dim of ``size`` in memory, int32 [size].

    A lane's own numbers come in the order of their reversed bits, so neighbors are the halves of a sum.
    """
    lanes, run = split_of(size)
    each, runs = run // lanes, size // run
    bits, found = (size // lanes).bit_length() - 1, [0] * size
    for own in range(size // lanes):
        turned = int(f"{own:0{bits}b}"[::-1], 2) if bits else 0
        for lane in range(lanes):
            found[own * lanes + lane] = turned % runs * run + lane * each + turned // runs
    return torch.tensor(found, dtype=torch.int32, device=device)


def split_of(size: int) -> tuple[int, int]:
    """Return the lanes that share a column of ``size`` numbers, and the numbers that they read at once."""
    lanes = min(LANES, size)
    return lanes, min(NEIGHBORS * lanes, size)


@triton.jit
def silu(x):
    """Return x / (1 + exp(-x)) in fp32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _taps(taps, channel, wanted, tap: tl.constexpr, TAPS: tl.constexpr):
    """Return the weights of ``tap`` for the ``wanted`` ones of ``channel`` [n]; a lane reads four taps at once."""
    if TAPS != 4:
        return tl.load(taps + channel * TAPS + tap, mask=wanted, other=0.0)
    here = channel[:, None] * 4 + tl.arange(0, 4)[None, :]
    whole = tl.load(taps + here, mask=wanted[:, None] & (here >= 0), other=0.0)
    even, odd = tl.split(tl.reshape(whole, [channel.shape[0], 2, 2]))
    one, other = tl.split(odd if tap % 2 else even)
    return other if tap // 2 else one


@triton.jit
def _convolved(
    x, window, taps, conv_bias, token, place, slot, fresh, channel, wanted, stride, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Return the convolution of ``channel`` [n] at a token, fp32 with its activation; place counts from the row.

    Only ``wanted`` channels are read.
    """
    found = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):  # masks in place of branches: loads of all taps are under way at once
        at = place - (TAPS - 1) + tap
        given = tl.load(x + (token - (TAPS - 1) + tap) * stride + channel, mask=wanted & (at >= 0), other=0.0)
        kept = window + (slot * (TAPS - 1) + at + TAPS - 1) * CHANNELS + channel
        given = tl.where(at >= 0, given, tl.load(kept, mask=wanted & (at < 0) & (fresh == 0), other=0.0))
        product = given.to(tl.float32) * _taps(taps, channel, wanted, tap, TAPS)
        if tap == 0:
            found = product
        else:
            found += product
    if conv_bias is not None:
        found += tl.load(conv_bias + channel, mask=wanted, other=0.0)
    return silu(found)


@triton.jit
def _unit(x):
    """Return x [n] divided by its length."""
    return x * tl.rsqrt(tl.sum(halves(tl.reshape(x * x, [1, x.shape[0]])), 0) + 1e-6)


@triton.jit
def _steps(x, RULE: tl.constexpr):
    """Return the steps of x, softplus within the limits."""
    small = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + small
    soft = tl.where(more == 1.0, small, tl.log(more) * small / tl.where(more == 1.0, 1.0, more - 1.0))
    soft = tl.where(x > 20.0, x, soft)
    if limited(RULE):
        soft = tl.minimum(tl.maximum(soft, RULE.limits[0]), RULE.limits[1])
    return soft


@triton.jit
def entry_of(positions, slots, token, TAPES: tl.constexpr):
    """Return where the numbers of a ``token`` lie: among those of other tokens, or with ``TAPES`` on its slot's tape.

    A tape has :data:`TAPE` places, which tokens take in turn. The sequence in slot n begins at place n.
    """
    if TAPES == 0:
        return token
    slot = tl.minimum(tl.load(slots + token), TAPES - 1)
    return (slot * TAPE + (tl.load(positions + token) + slot) % TAPE).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def prepare(
    x, positions, slots, table, window, taps, rate, bias, conv_bias, skip, order, pair, v, scalars, stride, factor,
    KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr,
    OWNERS: tl.constexpr, TAPES: tl.constexpr, RULE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run steps 1 to 3 of the contract, for a token and a key head with its value heads a program.

    See :func:`entry_of`.
    """
    begin(overlap)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    behind = tl.load(table + OWNERS + 2 * token)
    if behind == 0:
        return
    first, slot = behind - 1, tl.load(table + OWNERS + 2 * token + 1).to(tl.int64)
    fresh = (tl.load(positions + token) == token - first).to(tl.int32)  # positions of a row are neighbors
    HEADS: tl.constexpr = KEY_HEADS * SHARE
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    OWN: tl.constexpr = SHARE * VALUE
    keys, values, shares = tl.arange(0, KEY), tl.arange(0, next_power(OWN)), tl.arange(0, next_power(SHARE))
    own, real, inside = head * SHARE + shares, shares < SHARE, values < OWN
    at = x + token * stride + CHANNELS + HEADS * VALUE + own
    b = tl.load(at, mask=real, other=0.0).to(tl.float32)
    a = tl.load(at + HEADS, mask=real, other=0.0).to(tl.float32) if RULE.betas else b
    a, rates = a + tl.load(bias + own, mask=real, other=0.0), tl.load(rate + own, mask=real, other=0.0)
    entry = entry_of(positions, slots, token, TAPES)
    turned = (entry * KEY_HEADS + head) * (2 * KEY) + tl.load(order + keys)
    given = (x, window, taps, conv_bias, token, token - first, slot, fresh)
    query = _convolved(*given, head * KEY + keys, keys >= 0, stride, CHANNELS, TAPS)
    key = _convolved(*given, (KEY_HEADS + head) * KEY + keys, keys >= 0, stride, CHANNELS, TAPS)
    if RULE.unit:
        query, key = _unit(query) * factor, _unit(key)
    value = _convolved(*given, 2 * KEY_HEADS * KEY + head * OWN + values, inside, stride, CHANNELS, TAPS)
    step = _steps(a, RULE)
    tl.store(pair + turned, key)
    tl.store(pair + KEY + turned, query)
    tl.store(v + entry * (HEADS * VALUE) + head * OWN + values, value, mask=inside)
    found = scalars + (entry * HEADS + own) * SCALARS
    tl.store(found + DECAY, tl.exp(step * rates), mask=real)
    tl.store(found + BETA, 1.0 / (1.0 + tl.exp(-b)) if RULE.betas else step, mask=real)
    if RULE.skip:
        tl.store(found + SKIP, tl.load(skip + own, mask=real, other=0.0), mask=real)
    cross = tl.sum(halves(tl.reshape(key * query, [1, KEY])), 0)
    tl.store(found + CROSS, cross + tl.zeros(shares.shape, tl.float32), mask=real)


@triton.jit
def _keep_windows(
    x, table, window, first, slot, fresh, part, last, unit, stride, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of a row's parts to their slots, for the channels of a ``unit`` of work."""
    OWN: tl.constexpr = (CHANNELS + UNITS - 1) // UNITS
    WIDE: tl.constexpr = next_power(OWN)
    HIGH: tl.constexpr = next_power(TAPS - 1)
    tap, wide = tl.arange(0, HIGH)[:, None], tl.arange(0, WIDE)[None, :]
    channel = unit * OWN + wide
    inside = (tap < TAPS - 1) & (wide < OWN) & (channel < CHANNELS)
    while part < last:
        end, write = tl.load(table + PARTS + 2 * part), tl.load(table + PARTS + 2 * part + 1).to(tl.int64)
        at = end - first - (TAPS - 1) + tap
        new = tl.load(x + (first + at).to(tl.int64) * stride + channel, mask=inside & (at >= 0), other=0.0)
        old = window + (slot * (TAPS - 1) + at + TAPS - 1) * CHANNELS + channel
        kept = tl.load(old, mask=inside & (at < 0) & (fresh == 0), other=0.0)
        tl.debug_barrier()  # other threads of this program may overwrite a number before this one has read it
        tl.store(window + (write * (TAPS - 1) + tap) * CHANNELS + channel, tl.where(at >= 0, new, kept), mask=inside)
        part += 1


@triton.jit
def _row(table, row, PARTS: tl.constexpr):
    """Return the first token of a row, its slot to read, its first part, and the part behind its last one."""
    words, inside = table + 4 * row, row < PARTS // 4
    first, slot = tl.load(words, mask=inside, other=0), tl.load(words + 1, mask=inside, other=0)
    part, last = tl.load(words + 2, mask=inside, other=0), tl.load(words + 3, mask=inside, other=0)
    return first, slot.to(tl.int64), part, last


@triton.jit(do_not_specialize_on_alignment=["positions"])
def keep_windows(
    x, positions, table, window, stride, PARTS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    UNITS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Keep the windows of every n-th row, for one of ``UNITS`` parts of the channels."""
    begin(overlap)
    row = tl.program_id(1)
    first, slot, part, last = _row(table, row, PARTS)
    while part < last:  # a row beyond the last one has no part
        fresh = (tl.load(positions + first) == 0).to(tl.int32)
        _keep_windows(
            x, table, window, first, slot, fresh, part, last, tl.program_id(0), stride, PARTS, CHANNELS, TAPS, UNITS
        )
        row += tl.num_programs(1)
        first, slot, part, last = _row(table, row, PARTS)


@triton.jit
def _read(
    given, token, end, run, numbers, column, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, VALUE: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    """Return a token's key and query [runs, columns, run], values [columns], decay, beta, tree(k * q) and skip.

    Each lane reads its own numbers. From token ``end`` on, nothing is read and the numbers are any.
    """
    KEY: tl.constexpr = run.shape[0] * numbers.shape[0]
    pair, v, scalars = given
    pair += token * (2 * KEY_HEADS * KEY)
    there, found = token < end, scalars + token * (KEY_HEADS * SHARE * SCALARS)
    inside = run[:, None, None] * numbers.shape[0] + numbers[None, None, :] + 0 * column[None, :, None]
    wanted = there & (inside >= 0)
    key, query = tl.load(pair + inside, mask=wanted), tl.load(pair + KEY + inside, mask=wanted)
    value = tl.load(v + token * (KEY_HEADS * SHARE * VALUE) + column, mask=there & (column >= 0))
    rate, share = tl.load(found + DECAY, mask=there), tl.load(found + BETA, mask=there)
    cross = tl.load(found + CROSS, mask=there)
    skip = cross
    if RULE.skip:
        skip = tl.load(found + SKIP, mask=there)
    return key, query, value, rate, share, cross, skip


@triton.jit(do_not_specialize_on_alignment=["positions"])
def recur(
    x, positions, table, window, matrix, begun, pair, v, scalars, out, stride, KEY_HEADS: tl.constexpr,
    SHARE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, RUN: tl.constexpr, LANES: tl.constexpr, RULE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run step 4 of the contract for some columns of a value head, and keep windows; a program has every n-th row.

    Numbers of the next token are on their way. :mod:`preheat.backends.cuda.recurrence.prompts` serves long rows.
    """
    begin(overlap)
    HEADS: tl.constexpr = KEY_HEADS * SHARE
    BLOCKS: tl.constexpr = VALUE // COLUMNS
    block, head = tl.program_id(0), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    run, numbers = tl.arange(0, KEY // RUN), tl.arange(0, RUN)
    here = run[:, None, None] * RUN + numbers[None, None, :] + column[None, :, None] * KEY
    row = tl.program_id(2)
    first, slot, part, last = _row(table, row, PARTS)
    while part < last:  # a row beyond the last one has no part
        held = (slot * HEADS + head) * (KEY * VALUE)
        state = tl.load(matrix + held + here)  # on its way while windows are kept
        start, size = first.to(tl.int64), tl.load(table + PARTS + 2 * last - 2) - first
        given = (
            pair + (start * KEY_HEADS + head // SHARE) * (2 * KEY), v + (start * HEADS + head) * VALUE,
            scalars + (start * HEADS + head) * SCALARS,
        )  # fmt: skip
        key, query, value, rate, share, cross, skip = _read(
            given, 0, 1, run, numbers, column, KEY_HEADS, SHARE, VALUE, RULE
        )
        fresh = (tl.load(positions + first) == 0).to(tl.int32)
        _keep_windows(
            x, table, window, first, slot, fresh, part, last, head * BLOCKS + block, stride, PARTS,
            2 * KEY_HEADS * KEY + HEADS * VALUE, TAPS, HEADS * BLOCKS,
        )  # fmt: skip
        until, write = tl.load(table + PARTS + 2 * part), tl.load(table + PARTS + 2 * part + 1)  # of the part
        state = tl.where(fresh == 0, state, 0.0)
        answers = out + (start * HEADS + head) * VALUE + column
        for token in range(size):
            state = state * rate
            if RULE.delta:
                seen, answer = column_sums(state * key, state * query, LANES)
                change = (value - seen) * share
            else:
                answer, change = column_sum(state * query, LANES), value * share
            state = state + key * change[None, :, None]
            answer = answer + cross * change
            if RULE.skip:
                answer = answer + skip * value
            tl.store(answers + token * (HEADS * VALUE), answer)
            if first + token + 1 == until:
                tl.store(matrix + (write.to(tl.int64) * HEADS + head) * (KEY * VALUE) + here, state)
                if begun is not None:
                    tl.store(begun + write, tl.load(positions + first) + until - first, mask=block + head == 0)
                part += 1
                until = tl.load(table + PARTS + 2 * part, mask=part < last, other=0)
                write = tl.load(table + PARTS + 2 * part + 1, mask=part < last, other=0)
            key, query, value, rate, share, cross, skip = _read(
                given, token + 1, size, run, numbers, column, KEY_HEADS, SHARE, VALUE, RULE
            )
        row += tl.num_programs(2)
        first, slot, part, last = _row(table, row, PARTS)


@triton.jit
def finish(
    x, table, out, norm, result, stride, share, eps, CHANNELS: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr,
    OWNERS: tl.constexpr, EACH: tl.constexpr, RULE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run step 5 of the contract, for a token and value head a program.

    ``EACH``: each head has weights of its own. A padding token's result is zero.
    """
    value = tl.arange(0, VALUE)
    at = tl.program_id(1) * VALUE + value
    weight = tl.load(norm + (at if EACH else value))  # no kernel writes weights
    begin(overlap)
    token = tl.program_id(0).to(tl.int64)
    here = token * (HEADS * VALUE) + at
    if tl.load(table + OWNERS + 2 * token) == 0:
        tl.store(result + here, tl.zeros([VALUE], result.dtype.element_ty))
    else:
        wide = tl.load(out + here)
        gate = silu(tl.load(x + token * stride + CHANNELS + at).to(tl.float32))
        if RULE.gate_first:
            wide = wide * gate
        scale = tl.rsqrt(tl.sum(halves(tl.reshape(wide * wide, [1, VALUE])), 0) * share + eps)
        wide = wide * scale * weight
        tl.store(result + here, (wide if RULE.gate_first else wide * gate).to(result.dtype.element_ty))
