"""Shared parts of the sampler's kernels: row settings, order of tokens, integer mass, noise.

Contract, as on the host (:mod:`preheat.ops.order`, :mod:`preheat.ops.top_k_top_p`, :mod:`preheat.ops.philox`): a row's
answer depends on that row alone. Only element-wise operations round, and each is the same instructions wherever it
occurs (launches forbid fusing, see :func:`sampling`). Sums are of integers and ties have an order. So neither the
number of rows nor the cutting of a row can be seen in its token. Order keys, deficits and random integers are the
host's, bit for bit; exp and log may differ from the host's in their last bits.

A row of logits is cut into chunks, one program each. A chunk is cut into groups, and only the maximum of a group is
kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import INTERPRETED, options

ROW = np.dtype(
    [
        ("slot", np.int32),
        ("temperature", np.float32),  # 0: the best token
        ("seed", np.uint64),
        ("position", np.int32),
        ("choice", np.int32),
        ("top_p", np.float32),  # 1: off
        ("top_k", np.int32),  # 0: off
        ("furthest", np.float32),  # the deficit beyond which min_p drops a token
        ("repetition", np.float32),  # 1: off
        ("frequency", np.float32),
        ("presence", np.float32),
        ("masked", np.int32),  # 1: the row has a mask
        ("drafts", np.int32),  # place of the row's drafts in the settings, and their number, for penalties
        ("drafted", np.int32),
        ("final", np.int32),  # 1: the drawn token is counted for the row's penalties
    ]
)
"""Sampling settings of a row for the kernels: a record of 32-bit words."""

HEADER = 4
"""Words before the first record: the number of rows, the number of edits, two for alignment."""

EDIT = 3
"""Words of an edit: row, token, and the float32 added to its logit; minus infinity bans the token."""


def _word(name: str) -> tl.constexpr:
    return tl.constexpr(ROW.fields[name][1] // 4)  # type: ignore[index]


HEADER_WORDS = tl.constexpr(HEADER)
ROW_WORDS = tl.constexpr(ROW.itemsize // 4)
SLOT, TEMPERATURE, SEED, POSITION, CHOICE = map(_word, ("slot", "temperature", "seed", "position", "choice"))
TOP_P, TOP_K, FURTHEST = map(_word, ("top_p", "top_k", "furthest"))
REPETITION, FREQUENCY, PRESENCE, MASKED = map(_word, ("repetition", "frequency", "presence", "masked"))
DRAFTS, DRAFTED, FINAL = map(_word, ("drafts", "drafted", "final"))

IMPOSSIBLE = tl.constexpr(-float(np.finfo(np.float32).max))
"""The logit of tokens ruled out by the model.

A banned token is worse still: its logit is minus infinity.
"""

ID_BITS = tl.constexpr(20)
ID_MASK = tl.constexpr(2**20 - 1)
LOWEST = tl.constexpr(-(2**52))
"""Below every order key."""

MAX_VOCAB = 2**18
"""Largest vocabulary; up to here the mass of a row fits the 53 bits of a float64."""

SPREAD = tl.constexpr(19.5)
"""A token this far behind the best one never wins, see :data:`preheat.ops.philox.MAX_SPREAD`."""

MASS = tl.constexpr(float(2**34))

WIDE = tl.constexpr(not INTERPRETED)
"""Whether kernels may hold instructions of the device, unknown to the interpreter."""

FINITE = tl.constexpr(1)
"""The kind of a row with finite logits, see :func:`kind`."""

NO_TOKEN = tl.constexpr(2**31 - 1)


def sampling(num_warps: int, **more: Any) -> dict[str, Any]:
    """Return keywords of a launch of the sampler's kernels; products are never fused with sums, as on the host."""
    return options(num_warps=num_warps, enable_fp_fusion=False, **more)


@triton.jit
def word(settings, row, name: tl.constexpr):
    """Return an integer of the record of ``row``."""
    return tl.load(settings + HEADER_WORDS + row * ROW_WORDS + name)


@triton.jit
def real(settings, row, name: tl.constexpr):
    """Return a float32 of the record of ``row``."""
    return word(settings, row, name).to(tl.float32, bitcast=True)


@triton.jit
def read(logits, ids, mask, raw: tl.constexpr):
    """Return logits as float32, minus infinity outside of ``mask``.

    ``raw`` logits are mended: NaN and -inf count as impossible, +inf as the greatest finite number.
    """
    value = tl.load(logits + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(mask, mend(value), value) if raw else value


@triton.jit
def mend(value):
    """NaN and -inf become IMPOSSIBLE, +inf the greatest finite number."""
    return tl.minimum(tl.maximum(tl.where(value == value, value, IMPOSSIBLE), IMPOSSIBLE), -IMPOSSIBLE)


@triton.jit
def kind(value, mask):
    """Return the kind of raw logits ``value`` where ``mask``.

    2 if a logit is NaN or +inf, else 1 if a token is possible, else 0. A row is finite if the greatest of its kinds is
    FINITE.
    """
    return tl.max(tl.where(mask, kind_of_greatest(value), 0))


@triton.jit
def kind_of_greatest(value):
    """Return the kind of raw logits whose greatest is ``value``, NaN if one of them is NaN; see :func:`kind`."""
    return tl.where(value < float("inf"), (value > float("-inf")).to(tl.int32), 2)


@triton.jit
def order(value, ids):
    """Return int64 keys that fall from a row's best token to its worst.

    The logit's order fills the upper bits, the id the lower bits.
    """
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << ID_BITS) + (ids ^ ID_MASK)


@triton.jit
def id_of(key):
    """Return the token of an order key, int32."""
    return ((key & ID_MASK) ^ ID_MASK).to(tl.int32)


@triton.jit
def value_of(key):
    """Return the logit of an order key, float32."""
    rising = (key >> ID_BITS).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def deficit_of(value, peak, temperature):
    """Return how far ``value`` is behind ``peak``, divided by ``temperature``."""
    return tl.div_rn(peak - value, temperature + tl.zeros_like(value))


@triton.jit
def mass_of(deficit):
    """Return exp(-deficit) in integers of 2**-34, rounded down; int64."""
    return (tl.exp(-deficit) * MASS).to(tl.int64)


@triton.jit
def ln(x):
    """Return the natural logarithm of normal float32 above 0.

    It is right to about one unit in the last place, near 1 too. x = 2**e * m with m in [0.7, 1.4); then the polynomial
    and the split of log(2) of Cephes' ``logf``.
    """
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    e = e.to(tl.float32)
    square = f * f
    y = tl.fma(f, 7.0376836292e-2, tl.full(f.shape, -1.1514610310e-1, tl.float32))
    y = tl.fma(y, f, 1.1676998740e-1)
    y = tl.fma(y, f, -1.2420140846e-1)
    y = tl.fma(y, f, 1.4249322787e-1)
    y = tl.fma(y, f, -1.6668057665e-1)
    y = tl.fma(y, f, 2.0000714765e-1)
    y = tl.fma(y, f, -2.4999993993e-1)
    y = tl.fma(y, f, 3.3333331174e-1)
    y = y * f * square
    y = tl.fma(e, -2.12194440e-4, y)
    y = tl.fma(square, -0.5, y)
    return tl.fma(e, 0.693359375, f + y)


@triton.jit
def gumbel(bits):
    """Return the Gumbel variate of 32 random bits, float32."""
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -ln(-ln(uniform))


@triton.jit
def product(word, factor):
    """Return the high and the low half of the product of uint32 and a constant.

    On a device one instruction makes both halves. A compiler that sees two halves taken from a product makes each half
    by its own instruction.
    """
    if WIDE:
        assembly: tl.constexpr = "mul.wide.u32 $0, $1, $2;"
        factor = tl.full((), factor, tl.uint32)
        whole = tl.inline_asm_elementwise(assembly, "=l,r,r", [word, factor], tl.uint64, is_pure=True, pack=1)
    else:
        whole = word.to(tl.uint64) * factor
    return (whole >> 32).to(tl.uint32), whole.to(tl.uint32)


@triton.jit
def random_words(settings, row, group):
    """Return the random bits of tokens 4 * group to 4 * group + 3 under the key of ``row``.

    Four uint32 of group's shape. Counters equal in the whole row stay scalars, so that half of the first two rounds is
    computed once.
    """
    c0, c1 = group.to(tl.uint32), word(settings, row, POSITION).to(tl.uint32)
    c2, c3 = word(settings, row, CHOICE).to(tl.uint32), tl.full((), 0, tl.uint32)
    k0, k1 = word(settings, row, SEED).to(tl.uint32), word(settings, row, SEED + 1).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = product(c0, 0xD2511F53)
        high1, low1 = product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def bits_of_groups(settings, row, group):
    """Return the random bits uint32 [groups, 4] of the tokens of each of ``group`` [groups]."""
    w0, w1, w2, w3 = random_words(settings, row, group)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (group.shape[0], 4))


@triton.jit
def noise_of_groups(settings, row, group):
    """Return noise float32 [groups, 4] of the tokens of each of ``group`` [groups]."""
    return gumbel(bits_of_groups(settings, row, group))


@triton.jit
def noise_of_tokens(settings, row, ids):
    """Return noise float32 of each of ``ids``, the same as in a whole group."""
    w0, w1, w2, w3 = random_words(settings, row, ids >> 2)
    which = ids & 3
    return gumbel(tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3)))


@triton.jit
def winner(score, ids, mask):
    """Return the greatest score and the lowest id with this score."""
    best = tl.max(score)
    return best, tl.min(tl.where((score == best) & mask, ids, NO_TOKEN))
