"""The race of all tokens of a row, in two laps: bounds on scores for every token, scores for the few that may win.

A token's score is its noise less its deficit. The first lap bounds the scores of each group of four tokens, whose
noise comes from one Philox block, without a logarithm, an exponential or a division, and keeps each chunk's two groups
of the highest bounds. The second lap scores the better one of them: if no other group can reach what it scores, then
it holds the chunk's winner, or else the other one's bound stands for the chunk until somebody looks again. Bounds are
real bounds, rounding included, so that nothing of this can be seen in a token.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from preheat.backends.cuda.launch import begin
from preheat.backends.cuda.sample import (
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
from preheat.backends.cuda.sample_best import best_of

LAPPED = tl.constexpr(2)
"""Groups of a chunk that the first lap reports: the one that is to be scored, and the next one, a bound on the rest."""

INFINITE = tl.constexpr(0x7F800000)
"""The bits of float32's infinity."""

LN_2 = tl.constexpr(math.log(2))
OCTAVES = tl.constexpr(float(2**23))
"""What one power of two adds to a positive float32's bits."""

STEEPEST = tl.constexpr(1e30)


@triton.jit
def is_random(settings, row):
    """Whether ``row`` exists and draws; if nothing in it is possible, there is nothing to draw from all the same."""
    return (row < tl.load(settings)) & (real(settings, row, TEMPERATURE) > 0)


@triton.jit
def reach(settings, row):
    """A token that is farther behind the best one than this, in logits, has a deficit with which it is out."""
    limit = tl.minimum(real(settings, row, FURTHEST), SPREAD)
    return limit * real(settings, row, TEMPERATURE) * (1 + 2.0**-20) + 2.0**-120


@triton.jit
def lags(bits, behind, temperature, furthest):
    """AttentionConfig far the best of each group is behind at least, in powers of two times 2**23: float32 [groups].

    ``bits`` [groups, 4] are the tokens' random ones, ``behind`` how much less their logits are than the best one; those
    beyond ``furthest`` are out. A token whose uniform u is 1 - (n + 1/2) / 2**23 has at most the noise -log(1 - u), and
    the bits of n as a float32, taken as an integer, are at most its logarithm.
    """
    slope = tl.minimum(tl.div_rn(OCTAVES / LN_2, temperature), STEEPEST)
    n = ((bits ^ 0xFFFFFFFF) >> 9).to(tl.float32)
    lag = tl.fma(behind, tl.zeros_like(behind) + slope, n.to(tl.int32, bitcast=True).to(tl.float32))
    return tl.min(tl.where(behind <= furthest, lag, float("inf")), axis=1)


@triton.jit
def score_at_most(lag):
    """No token that lags so far has a higher score; 2**-12 is more than all that is rounded on either side."""
    return lag * (-LN_2 / OCTAVES) + (150 * LN_2 + 2.0**-12)


@triton.jit
def enter(
    settings, logits, stride, leads, nearest,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """The first lap. Grid (chunks, rows), for rows that draw without top_k: ``nearest`` int32 [rows, chunks, LAPPED]
    gets the bits of the least lags of a chunk's groups, the group's place in their lowest bits.
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
    if peak - value_of(tl.load(leads + row * chunks + chunk)) > furthest:  # there is nothing to look at
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
    """The second lap: the score and the order key of every chunk's winner, or a bound on its score and LOWEST."""
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
