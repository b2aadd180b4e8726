"""The inputs of a recurrence, several heads and tokens a program.

Contract. As :func:`preheat.backends.cuda.recurrence.kernels.prepare`: the same operations in the same order, so the
same bits. There a program of one warp has one token, and reads the taps of its channels and four inputs of each. Here a
program has some channels of ``TOKENS`` neighboring tokens. It reads taps once, and inputs that tokens share once.

A program has keys and queries of some key heads, or values, or the gates of all heads. A warp has a key beside its
query, 16 lanes each. A lane has the numbers that become neighbors in memory, see
:func:`preheat.backends.cuda.recurrence.kernels.places`, and their far halves. So a lane stores 16 bytes at once, and
most additions of a tree stay inside of a lane.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.recurrence.kernels import BETA, CROSS, DECAY, SCALARS, SKIP, TAPE, limited, log2
from preheat.ops.values import Recurrence

MANY = gl.constexpr(8)
"""More value heads of a key head are stored in a loop, so that the code stays short."""


def serves(value: Recurrence) -> bool:
    """Return whether :func:`prepare_heads` serves the sizes of ``value``."""
    return value.key_dim in (64, 128, 256) and value.value_size % 128 == 0


@constexpr_function
def value_unit(values, warps):
    """Return the values of a program: a power of two that divides ``values``, at most 8 a lane."""
    return min(values & -values, 256 * warps)


@constexpr_function
def _layout(registers, lanes, warps, size, more=()):
    """Return a layout of ``size`` numbers by the numbers that each bit of a register, lane or warp stands for.

    ``more``: dimensions behind it, in registers.
    """
    none = [0] * len(more)
    own = [[0, 1 << bit] for each in more for bit in range(each.bit_length() - 1)]
    found = [[[each, *none] for each in bits] for bits in (registers, lanes, warps)]
    return gl.DistributedLinearLayout(own + found[0], found[1], found[2], [], [size, *more])


@constexpr_function
def _pairs_layout(size, warps, more=()):
    """Return the layout of keys and queries of ``size`` numbers in turn, of a key head a warp.

    Bits 3 and 4 of a number become the lowest two in memory, so they are a lane's own.
    """
    registers = [16, 8, *(1 << bit for bit in range(6, size.bit_length() - 1))]
    heads = [2 * size << bit for bit in range(warps.bit_length() - 1)]
    return _layout(registers, [1, 2, 4, 32, size], heads, 2 * size * warps, more)


@constexpr_function
def _values_layout(size, warps, more=()):
    """Return the layout of ``size`` values: 4 neighbors a lane, up to twice."""
    inside = [1 << bit if 1 << bit < size else 0 for bit in range(8 + warps.bit_length() - 1)]
    return _layout([1, 2, *filter(None, inside[7:8])], inside[2:7], inside[8:], size, more)


SILU = gl.constexpr("""{
    .reg .pred far;
    .reg .f32 given, below;
    mov.f32 given, $1;
    mul.rn.f32 below, given, 0fBFB8AA3B;
    ex2.approx.ftz.f32 below, below;
    add.rn.f32 below, below, 0f3F800000;
    setp.gt.f32 far, below, 0f7E800000;
    @far mul.rn.f32 given, given, 0f3E800000;
    @far mul.rn.f32 below, below, 0f3E800000;
    rcp.approx.ftz.f32 below, below;
    mul.rn.f32 $0, given, below;
}""")
"""x / (1 + exp(-x)) with the bits of the compiler's exp and division, in 8 instructions instead of 15.

The compiler scales exponents below -126, whose exp is lost beside 1 anyway, and divisors below 2^-126, and this one is
at least 1. Beyond 2^126 the divisor and the number are divided by 4, as the compiler does.
"""


@gluon.jit
def _silu(x):
    return gl.inline_asm_elementwise(SILU, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _added(one, other):
    return one + other


@gluon.jit
def _multiplied(one, other):
    return one * other


@gluon.jit
def _halved(x, COUNT: gl.constexpr):
    """Return x [rows, numbers] with the first half added to the second half ``COUNT`` times, inside of lanes."""
    for _ in gl.static_range(COUNT):
        one, other = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        x = one + other
    return x


@gluon.jit
def _tree(x):
    """Return sums of x [rows, numbers] over numbers, see :func:`preheat.backends.cuda.recurrence.kernels.halves`."""
    x = _halved(x, log2(x.shape[1] // 64))
    x = gl.reduce(gl.reshape(x, [x.shape[0], 2, 32]), 1, _added)
    return gl.reduce(_halved(x, 2), 1, _added)


@gluon.jit
def _four(taps, channel, WHOLE: gl.constexpr):
    """Return the weights of four taps for ``channel`` [n]; a lane reads four at once, in the layout ``WHOLE``."""
    LAYOUT: gl.constexpr = channel.type.layout
    SIZE: gl.constexpr = channel.shape[0]
    channel = gl.convert_layout(channel, gl.SliceLayout(1, WHOLE), assert_trivial=True)
    here = channel[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, WHOLE))[None, :]
    even, odd = gl.split(gl.reshape(gl.load(taps + here), [SIZE, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True), gl.convert_layout(second, LAYOUT, assert_trivial=True),
        gl.convert_layout(third, LAYOUT, assert_trivial=True), gl.convert_layout(fourth, LAYOUT, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def _weights(taps, conv_bias, channel, TAPS: gl.constexpr, WHOLE: gl.constexpr):
    """Return the weights of each tap for ``channel`` [n], then the bias if there is one."""
    if TAPS == 4:
        found = _four(taps, channel, WHOLE)
    else:
        found = ()
        for tap in gl.static_range(TAPS):
            found += (gl.load(taps + channel * TAPS + tap),)
    if conv_bias is not None:
        found += (gl.load(conv_bias + channel),)
    return found


@gluon.jit
def _owner(given, token, tokens, OWNERS: gl.constexpr):
    """Return the first token of a token's row, counted from 1, the row's slot to read, and the token's position.

    All are zero from token ``tokens`` on.
    """
    _, positions, table, _, _ = given
    words, there = table + OWNERS + 2 * token, token < tokens
    slot = gl.load(words + 1, mask=there, other=0).to(gl.int64)
    return gl.load(words, mask=there, other=0), slot, gl.load(positions + token, mask=there, other=0)


@gluon.jit
def _entry(given, token, there, TAPES: gl.constexpr):
    """See :func:`preheat.backends.cuda.recurrence.kernels.entry_of`; tokens not ``there``, if given, have any entry."""
    if TAPES == 0:
        return token
    other: gl.constexpr = None if there is None else 0
    slot = gl.minimum(gl.load(given[4] + token, mask=there, other=other), TAPES - 1)
    return (slot * TAPE + (gl.load(given[1] + token, mask=there, other=other) + slot) % TAPE).to(gl.int64)


@gluon.jit
def _before(given, token, owner, channel, stride, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """Return the inputs before a token for ``channel`` [n], the oldest first: from its row, or from its window."""
    x, _, _, window, _ = given
    first, slot = owner[0] - 1, owner[1]
    fresh = owner[2] == token - first  # positions of a row are neighbors
    found = given[:0]
    for tap in gl.static_range(TAPS - 1):
        at = token - (TAPS - 1) + tap
        row = x + at * stride if at >= first else window + (slot * (TAPS - 1) + at - first + TAPS - 1) * CHANNELS
        there = gl.full(channel.shape, (at >= first) | (fresh == 0), gl.int1, channel.type.layout)
        found += (gl.load(row + channel, mask=there, other=0.0).to(gl.float32),)
    return found


@gluon.jit
def _convolved(inputs, weights):
    """Return the convolution of ``inputs`` of each tap, with its activation; a bias follows the weights of taps."""
    found = inputs[0] * weights[0]
    for tap in gl.static_range(1, len(inputs)):
        found += inputs[tap] * weights[tap]
    if len(weights) > len(inputs):
        found += weights[len(inputs)]
    return _silu(found)


@gluon.jit
def _put_pairs(
    made, y, token, head, factor, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, KEY: gl.constexpr,
    RULE: gl.constexpr,
):  # fmt: skip
    """Store the keys and queries of a token's key heads from ``head`` on, and their products' sums."""
    ROWS: gl.constexpr = y.shape[0] // KEY
    pair, _, scalars = made
    y = gl.reshape(y, [ROWS, KEY])
    LAYOUT: gl.constexpr = y.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    if RULE.unit:
        scale = gl.rsqrt(gl.convert_layout(_tree(y * y), gl.SliceLayout(1, LAYOUT)) + 1e-6)
        y = y * scale[:, None] * gl.where(row % 2 == 1, factor, 1.0)[:, None]
    z = gl.reshape(y, [ROWS, min(KEY // 64, 2), max(KEY // 128, 1), 2, 2, 2, 8])  # by bits, the high ones first
    z = gl.reshape(gl.permute(z, (0, 3, 2, 1, 6, 5, 4)), [ROWS * KEY])  # in the order of memory
    gl.store(pair + (token * KEY_HEADS + head) * (2 * KEY) + gl.arange(0, ROWS * KEY, z.type.layout), z)
    cross = _tree(gl.reduce(gl.reshape(y, [ROWS // 2, 2, KEY]), 1, _multiplied))
    own = head + gl.arange(0, ROWS // 2, cross.type.layout)
    found = scalars + token * (KEY_HEADS * SHARE * SCALARS) + own * (SHARE * SCALARS) + CROSS
    if SHARE > MANY:
        for each in range(SHARE):
            gl.store(found + each * SCALARS, cross)
    else:
        for each in gl.static_range(SHARE):
            gl.store(found + each * SCALARS, cross)


@gluon.jit
def _put(
    made, y, token, at, factor, PAIRS: gl.constexpr, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr,
    KEY: gl.constexpr, VALUES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """Store what a token's convolution ``y`` becomes: of the key heads from ``at`` on, or of the values."""
    if PAIRS:
        _put_pairs(made, y, token, at, factor, KEY_HEADS, SHARE, KEY, RULE)
    else:
        gl.store(made[1] + token * VALUES + at + gl.arange(0, y.shape[0], y.type.layout), y)


@gluon.jit
def _channels(
    given, made, channel, weights, tokens, at, stride, factor, PAIRS: gl.constexpr, KEY_HEADS: gl.constexpr,
    SHARE: gl.constexpr, KEY: gl.constexpr, VALUES: gl.constexpr, TAPS: gl.constexpr, OWNERS: gl.constexpr,
    TOKENS: gl.constexpr, TAPES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """Run steps 1 and 2 of the contract for ``channel`` [n] of ``TOKENS`` tokens."""
    CHANNELS: gl.constexpr = 2 * KEY_HEADS * KEY + VALUES
    token = gl.program_id(0).to(gl.int64) * TOKENS
    owner = _owner(given, token, tokens, OWNERS)
    end = token + TOKENS - 1
    last = gl.load(given[2] + OWNERS + 2 * end, mask=end < tokens, other=0)
    if (owner[0] > 0) & (last == owner[0]):  # all tokens are of one row
        own = given[:0]
        for each in gl.static_range(TOKENS):
            own += (gl.load(given[0] + (token + each) * stride + channel),)
        inputs = _before(given, token, owner, channel, stride, CHANNELS, TAPS)
        for each in gl.static_range(TOKENS):
            inputs += (own[each].to(gl.float32),)
            y = _convolved(inputs, weights)
            entry = _entry(given, token + each, None, TAPES)
            _put(made, y, entry, at, factor, PAIRS, KEY_HEADS, SHARE, KEY, VALUES, RULE)
            inputs = inputs[1:]
    elif TOKENS > 1:
        for each in range(TOKENS):
            here = token + each
            owner = _owner(given, here, tokens, OWNERS)
            if owner[0] > 0:
                own = gl.load(given[0] + here * stride + channel)
                inputs = _before(given, here, owner, channel, stride, CHANNELS, TAPS)
                inputs += (own.to(gl.float32),)
                y = _convolved(inputs, weights)
                entry = _entry(given, here, None, TAPES)
                _put(made, y, entry, at, factor, PAIRS, KEY_HEADS, SHARE, KEY, VALUES, RULE)


@gluon.jit
def _gates(
    given, scalars, rate, bias, skip, tokens, stride, GATES: gl.constexpr, HEADS: gl.constexpr,
    OWNERS: gl.constexpr, TOKENS: gl.constexpr, TAPES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """Run step 3 of the contract for all value heads of ``TOKENS`` tokens; gates begin at channel ``GATES``."""
    WIDE: gl.constexpr = 1 << log2(2 * HEADS - 1)
    x, _, table, _, _ = given
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    token = gl.program_id(0).to(gl.int64) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    own = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    real = own < HEADS
    owner = gl.load(table + OWNERS + 2 * token, mask=token < tokens, other=0)
    there = (owner > 0)[:, None] & real[None, :]
    at = x + token[:, None] * stride + GATES + own[None, :]
    b = gl.load(at, mask=there, other=0.0).to(gl.float32)
    a = gl.load(at + HEADS, mask=there, other=0.0).to(gl.float32) if RULE.betas else b
    a = a + gl.load(bias + own, mask=real, other=0.0)[None, :]
    small = gl.exp(gl.minimum(a, 20.0))
    more = 1.0 + small
    soft = gl.where(more == 1.0, small, gl.log(more) * small / gl.where(more == 1.0, 1.0, more - 1.0))
    soft = gl.where(a > 20.0, a, soft)
    if limited(RULE):
        soft = gl.minimum(gl.maximum(soft, RULE.limits[0]), RULE.limits[1])
    entry = _entry(given, token, owner > 0, TAPES)
    found = scalars + entry[:, None] * (HEADS * SCALARS) + own[None, :] * SCALARS
    gl.store(found + DECAY, gl.exp(soft * gl.load(rate + own, mask=real, other=0.0)[None, :]), mask=there)
    gl.store(found + BETA, 1.0 / (1.0 + gl.exp(-b)) if RULE.betas else soft, mask=there)
    if RULE.skip:
        none = gl.full([TOKENS, WIDE], 0.0, gl.float32, layout)
        gl.store(found + SKIP, none + gl.load(skip + own, mask=real, other=0.0)[None, :], mask=there)


@gluon.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "slots"])
def prepare_heads(
    x, positions, slots, table, window, taps, rate, bias, conv_bias, skip, pair, v, scalars, tokens, stride, factor,
    KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr, TAPS: gl.constexpr,
    OWNERS: gl.constexpr, TAPES: gl.constexpr, RULE: gl.constexpr, TOKENS: gl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run steps 1 to 3 of the contract for ``TOKENS`` tokens: keys and queries, then values, then gates."""
    WARPS: gl.constexpr = gl.num_warps()
    VALUES: gl.constexpr = KEY_HEADS * SHARE * VALUE
    UNIT: gl.constexpr = value_unit(VALUES, WARPS)
    PAIRS: gl.constexpr = _pairs_layout(KEY, WARPS)
    FLAT: gl.constexpr = _values_layout(UNIT, WARPS)
    unit = gl.program_id(1)
    given, made = (x, positions, table, window, slots), (pair, v, scalars)
    if unit < KEY_HEADS // WARPS:
        number = gl.arange(0, 2 * WARPS * KEY, PAIRS)
        row, head = number // KEY, unit * WARPS
        channel = ((1 - row % 2) * KEY_HEADS + head + row // 2) * KEY + number % KEY
        weights = _weights(taps, conv_bias, channel, TAPS, _pairs_layout(KEY, WARPS, (4,)))  # no kernel writes weights
        begin(overlap)
        _channels(
            given, made, channel, weights, tokens, head, stride, factor, True, KEY_HEADS, SHARE, KEY, VALUES,
            TAPS, OWNERS, TOKENS, TAPES, RULE,
        )  # fmt: skip
    elif unit < KEY_HEADS // WARPS + VALUES // UNIT:
        at = (unit - KEY_HEADS // WARPS) * UNIT
        channel = 2 * KEY_HEADS * KEY + at + gl.arange(0, UNIT, FLAT)
        weights = _weights(taps, conv_bias, channel, TAPS, _values_layout(UNIT, WARPS, (4,)))
        begin(overlap)
        _channels(
            given, made, channel, weights, tokens, at, stride, factor, False, KEY_HEADS, SHARE, KEY, VALUES,
            TAPS, OWNERS, TOKENS, TAPES, RULE,
        )  # fmt: skip
    else:
        begin(overlap)
        GATES: gl.constexpr = 2 * KEY_HEADS * KEY + 2 * VALUES
        _gates(given, scalars, rate, bias, skip, tokens, stride, GATES, KEY_HEADS * SHARE, OWNERS, TOKENS, TAPES, RULE)
