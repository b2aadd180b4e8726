"""Kernels of the gated delta rule: inputs of each token, the recurrence, and the gated norm behind it.

Contract. As in :mod:`preheat.ops.delta`: the same operations in the same order, each rounded once, with the same tree
for each sum. ``enable_fp_fusion=False`` keeps multiplications and additions apart. Exponentials, logarithms, divisions
and square roots are the device's, so bits differ from a CPU's. log1p(e) is log(1 + e) * e / ((1 + e) - 1).

A program of the recurrence takes some columns of a value head's matrix through all tokens of a row, one after the
other, and keeps them in registers. Rows that decode and prompts run the same program. Columns never meet. So neither
the number of columns in a program, nor warps, nor the number of rows, nor a cut of a prompt changes a bit.

The key dim is spread over ``LANES`` neighboring lanes of a warp. Number r * LANES + lane is number r of a lane. So the
first levels of the tree are additions inside of a lane, and the last levels exchange numbers between lanes. Each lane
reads up to 4 neighboring numbers at once, so keys, queries and matrices lie in memory in the order of :func:`places`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import constexpr_function

from preheat.backends.cuda.launch import COMPILED, begin

LANES = 8
"""Lanes of a warp that share a column."""

NEIGHBORS = 4
"""Numbers that a lane reads at once."""


@constexpr_function
def log2(number):
    """Return the logarithm of a power of two."""
    return number.bit_length() - 1


@triton.jit
def halves(x):
    """Return the sum of x [rows, numbers] over numbers: the first half plus the second half, until one is left."""
    for _ in tl.static_range(log2(x.shape[1])):
        one, other = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        x = one + other
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def column_sums(x, LANES: tl.constexpr):
    """Return the tree sums of x [runs, columns, run] over the key dim, in the order of :func:`places`: [columns]."""
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.reshape(tl.permute(x, (1, 2, 0)), [COLUMNS, LANES, x.shape[0] * x.shape[2] // LANES])
    for _ in tl.static_range(log2(x.shape[2])):
        one, other = tl.split(tl.reshape(x, [COLUMNS, LANES, x.shape[2] // 2, 2]))
        x = one + other
    x = tl.reshape(x, [COLUMNS, LANES])
    if COMPILED:  # lanes meet in halves, too: 4 apart, then 2, then 1
        return tl.sum(x, 1)
    return halves(x)


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
def _convolved(x, window, taps, token, place, slot, fresh, channel, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Return the convolution of ``channel`` [n] at a token, fp32 with its activation; place counts from the row."""
    found = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        at = place - (TAPS - 1) + tap
        if at >= 0:
            given = tl.load(x + (token - (TAPS - 1) + tap) * stride + channel)
        else:
            kept = window + (slot * (TAPS - 1) + at + TAPS - 1) * CHANNELS + channel
            given = tl.load(kept, mask=(channel >= 0) & (fresh == 0), other=0.0)
        product = given.to(tl.float32) * tl.load(taps + channel * TAPS + tap)
        if tap == 0:
            found = product
        else:
            found += product
    return silu(found)


@triton.jit
def _unit(x):
    """Return x [n] divided by its length."""
    return x * tl.rsqrt(tl.sum(halves(tl.reshape(x * x, [1, x.shape[0]])), 0) + 1e-6)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def prepare(
    x, positions, table, window, taps, rate, bias, order, q, k, both, v, decay, beta, stride, factor,
    KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr,
    OWNERS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run steps 1 to 3 of the contract, for a token and a key head with its value heads a program."""
    begin(overlap)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(table + OWNERS + token) - 1
    if row < 0:
        return
    first = tl.load(table + 4 + 4 * row)
    slot, fresh = tl.load(table + 5 + 4 * row).to(tl.int64), (tl.load(positions + first) == 0).to(tl.int32)
    HEADS: tl.constexpr = KEY_HEADS * SHARE
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    place, keys, values = token - first, tl.arange(0, KEY), tl.arange(0, VALUE)
    given = (x, window, taps, token, place, slot, fresh)
    query = _unit(_convolved(*given, head * KEY + keys, stride, CHANNELS, TAPS)) * factor
    key = _unit(_convolved(*given, (KEY_HEADS + head) * KEY + keys, stride, CHANNELS, TAPS))
    at = token * KEY_HEADS + head
    where = at * KEY + tl.load(order + keys)
    tl.store(q + where, query)
    tl.store(k + where, key)
    tl.store(both + at, tl.sum(halves(tl.reshape(key * query, [1, KEY])), 0))
    for other in tl.static_range(SHARE):
        own = head * SHARE + other
        channel = 2 * KEY_HEADS * KEY + own * VALUE + values
        tl.store(v + (token * HEADS + own) * VALUE + values, _convolved(*given, channel, stride, CHANNELS, TAPS))
        scalars = x + token * stride + CHANNELS + HEADS * VALUE + own
        tl.store(beta + token * HEADS + own, 1.0 / (1.0 + tl.exp(-tl.load(scalars).to(tl.float32))))
        a = tl.load(scalars + HEADS).to(tl.float32) + tl.load(bias + own)
        small = tl.exp(tl.minimum(a, 20.0))
        more = 1.0 + small
        soft = tl.where(more == 1.0, small, tl.log(more) * small / tl.where(more == 1.0, 1.0, more - 1.0))
        soft = tl.where(a > 20.0, a, soft)
        tl.store(decay + token * HEADS + own, tl.exp(soft * tl.load(rate + own)))


@triton.jit
def _keep_windows(
    x, table, window, first, slot, fresh, part, last, unit, stride, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of a row's parts to their slots, for the channels of a ``unit`` of work."""
    OWN: tl.constexpr = (CHANNELS + UNITS - 1) // UNITS
    WIDE: tl.constexpr = triton.next_power_of_2(OWN)
    HIGH: tl.constexpr = triton.next_power_of_2(TAPS - 1)
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


@triton.jit(do_not_specialize_on_alignment=["positions"])
def recur(
    x, positions, table, window, matrix, q, k, both, v, decay, beta, out, stride, KEY_HEADS: tl.constexpr,
    SHARE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, RUN: tl.constexpr, LANES: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run step 4 of the contract for some columns of a value head, and keep windows; a program has one row."""
    begin(overlap)
    row = tl.num_programs(2) - 1 - tl.program_id(2)  # prompts lie behind rows that decode, and take longest
    if row >= tl.load(table):
        return
    HEADS: tl.constexpr = KEY_HEADS * SHARE
    BLOCKS: tl.constexpr = VALUE // COLUMNS
    block, head = tl.program_id(0), tl.program_id(1)
    first, part = tl.load(table + 4 + 4 * row), tl.load(table + 6 + 4 * row)
    slot, last = tl.load(table + 5 + 4 * row).to(tl.int64), tl.load(table + 7 + 4 * row)
    fresh = (tl.load(positions + first) == 0).to(tl.int32)
    _keep_windows(
        x, table, window, first, slot, fresh, part, last, head * BLOCKS + block, stride, PARTS,
        2 * KEY_HEADS * KEY + HEADS * VALUE, TAPS, HEADS * BLOCKS,
    )  # fmt: skip
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    run, numbers = tl.arange(0, KEY // RUN)[:, None, None], tl.arange(0, RUN)[None, None, :]
    inside = run * RUN + numbers + 0 * column[None, :, None]  # a number's place; each lane reads its own keys
    here = inside + column[None, :, None] * KEY
    state = tl.load(matrix + (slot * HEADS + head) * (KEY * VALUE) + here, mask=(here >= 0) & (fresh == 0), other=0.0)
    end = tl.load(table + PARTS + 2 * last - 2)  # of the row
    until = tl.load(table + PARTS + 2 * part)  # of the part
    own, of_key = first.to(tl.int64) * HEADS + head, first.to(tl.int64) * KEY_HEADS + head // SHARE
    key, query = tl.load(k + of_key * KEY + inside), tl.load(q + of_key * KEY + inside)
    value, cross = tl.load(v + own * VALUE + column), tl.load(both + of_key)
    rate, share = tl.load(decay + own), tl.load(beta + own)
    for token in range(first, end):
        more = (token + 1 < end).to(tl.int64)  # the next token's numbers are on their way while this one is computed
        of_key += more * KEY_HEADS
        following = own + more * HEADS
        next_key, next_query = tl.load(k + of_key * KEY + inside), tl.load(q + of_key * KEY + inside)
        next_value, next_cross = tl.load(v + following * VALUE + column), tl.load(both + of_key)
        next_rate, next_share = tl.load(decay + following), tl.load(beta + following)
        state = state * rate
        change = (value - column_sums(state * key, LANES)) * share
        answer = column_sums(state * query, LANES) + cross * change
        state = state + key * change[None, :, None]
        tl.store(out + own * VALUE + column, answer)
        if token + 1 == until:
            write = tl.load(table + PARTS + 2 * part + 1).to(tl.int64)
            tl.store(matrix + (write * HEADS + head) * (KEY * VALUE) + here, state)
            part += 1
            until = tl.load(table + PARTS + 2 * part, mask=part < last, other=0)
        key, query, value, cross, rate, share = next_key, next_query, next_value, next_cross, next_rate, next_share
        own = following


@triton.jit
def finish(
    x, table, out, norm, result, stride, share, eps, CHANNELS: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr,
    OWNERS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run step 5 of the contract, for a value head of a token a program; a padding token's result is zero."""
    values = tl.arange(0, VALUE)
    weight = tl.load(norm + values)  # no kernel writes weights, so this need not wait
    begin(overlap)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = (token * HEADS + head) * VALUE + values
    if tl.load(table + OWNERS + token) == 0:
        tl.store(result + here, tl.zeros([VALUE], result.dtype.element_ty))
    else:
        wide = tl.load(out + here)
        scale = tl.rsqrt(tl.sum(halves(tl.reshape(wide * wide, [1, VALUE])), 0) * share + eps)
        gate = silu(tl.load(x + token * stride + CHANNELS + head * VALUE + values).to(tl.float32))
        tl.store(result + here, (wide * scale * weight * gate).to(result.dtype.element_ty))
