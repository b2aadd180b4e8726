"""The race of all tokens of a row, in two laps: bounds for every token, scores for a few.

A token's score is its noise less its deficit. The first lap bounds the scores of each group of four tokens with noise
from one Philox block. It needs no logarithm, exponential or division, and keeps each chunk's two groups of the highest
bounds. The second lap scores the better of these two groups. If no other group can reach its score, then it holds the
chunk's winner. Otherwise the other group's bound stands for the chunk until the chunk is looked at again. Bounds are
real bounds, rounding included, so no token depends on them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.sampling.best import best_of
from preheat.backends.cuda.sampling.shared import (
    FURTHEST,
    IMPOSSIBLE,
    LOWEST,
    NO_TOKEN,
    SPREAD,
    TEMPERATURE,
    TOP_K,
    bits_of_groups,
    deficit_of,
    noise_of_groups,
    order,
    read,
    real,
    value_of,
    word,
)

LAPPED = tl.constexpr(2)
"""Groups of a chunk reported by the first lap.

The first is scored; the second bounds the rest.
"""

INFINITE = tl.constexpr(0x7F800000)
"""The bits of float32's infinity."""

LN_2 = tl.constexpr(math.log(2))
OCTAVES = tl.constexpr(float(2**23))
"""Step of a positive float32's bits for one power of two."""

STEEPEST = tl.constexpr(1e30)


@triton.jit
def is_random(settings, row):
    """Return whether ``row`` exists and draws at random; a row without possible tokens is not excluded."""
    return (row < tl.load(settings)) & (real(settings, row, TEMPERATURE) > 0)


@triton.jit
def reach(settings, row):
    """Return the greatest distance in logits from the best token at which a token may still win."""
    limit = tl.minimum(real(settings, row, FURTHEST), SPREAD)
    return limit * real(settings, row, TEMPERATURE) * (1 + 2.0**-20) + 2.0**-120


@triton.jit
def lags(bits, behind, temperature, furthest):
    """Return the least lag of each group behind the best token: float32 [groups].

    The unit is 2**-23 of a power of two. ``bits`` [groups, 4] are the tokens' random bits, ``behind`` is the distance
    of their logits from the best token's. Tokens beyond ``furthest`` are out. A token with the uniform u = 1 - (n +
    1/2) / 2**23 has at most the noise -log(1 - u), and the bits of n as a float32, taken as an integer, are at most its
    logarithm.
    """
    slope = tl.minimum(tl.div_rn(OCTAVES / LN_2, temperature), STEEPEST)
    n = ((bits ^ 0xFFFFFFFF) >> 9).to(tl.float32)
    lag = tl.fma(behind, tl.zeros_like(behind) + slope, n.to(tl.int32, bitcast=True).to(tl.float32))
    return tl.min(tl.where(behind <= furthest, lag, float("inf")), axis=1)


@triton.jit
def score_at_most(lag):
    """Return a bound on the score of tokens with at least this lag.

    2**-12 is more than all rounding on either side.
    """
    return lag * (-LN_2 / OCTAVES) + (150 * LN_2 + 2.0**-12)


@triton.jit
def enter(
    settings, logits, stride, leads, nearest,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Run the first lap, for rows that draw without top_k.

    Grid (chunks, rows). ``nearest`` int32 [rows, chunks, LAPPED] gets the bits of the least lags of a chunk's groups,
    the group's place in their lowest bits.
    """
    begin(overlap)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if not is_random(settings, row):
        return
    if word(settings, row, TOP_K) > 0:
        return
    peak = value_of(best_of(leads, row, chunks, CHUNKS))
    if peak <= IMPOSSIBLE:
        return
    nearest += (row * chunks + chunk) * LAPPED
    furthest = reach(settings, row)
    if peak - value_of(tl.load(leads + row * chunks + chunk)) > furthest:  # no token of this chunk may win
        for i in tl.static_range(LAPPED):
            tl.store(nearest + i, INFINITE)
        return
    GROUPS: tl.constexpr = CHUNK // 4
    place = tl.arange(0, GROUPS)
    group = chunk * GROUPS + place
    ids = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    lag = lags(bits_of_groups(settings, row, group), peak - value, real(settings, row, TEMPERATURE), furthest)
    keys = lag.to(tl.int32, bitcast=True) & -GROUPS | place
    for i in tl.static_range(LAPPED):
        least = tl.min(keys)
        tl.store(nearest + i, least)
        keys = tl.where(keys > least, keys, INFINITE)


@triton.jit
def entrants(
    settings, row, logits, nearest, chunks, peak,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, raw: tl.constexpr,
):  # fmt: skip
    """Run the second lap; return score and order key of every chunk's winner.

    A chunk without a sure winner gets a bound on its score, and LOWEST.
    """
    GROUPS: tl.constexpr = CHUNK // 4
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    nearest += (row * chunks + chunk) * LAPPED
    group = chunk * GROUPS + (tl.load(nearest, mask=there, other=0) & (GROUPS - 1))
    ids = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = read(logits, ids, there[:, None] & (ids < VOCAB), raw)
    deficit = deficit_of(value, peak, real(settings, row, TEMPERATURE))
    kept = there[:, None] & (ids < VOCAB) & (deficit <= tl.minimum(real(settings, row, FURTHEST), SPREAD))
    score = tl.where(kept, noise_of_groups(settings, row, group) - deficit, float("-inf"))
    best = tl.max(score, axis=1)
    token = tl.min(tl.where(kept & (score == best[:, None]), ids, NO_TOKEN), axis=1)
    key = tl.max(tl.where(kept & (ids == token[:, None]), order(value, ids), LOWEST), axis=1)
    lag = tl.load(nearest + 1, mask=there, other=INFINITE) & -GROUPS
    bound = score_at_most(lag.to(tl.float32, bitcast=True))
    return tl.maximum(best, bound), tl.where(best > bound, key, LOWEST)
