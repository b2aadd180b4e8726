"""Sources of a row's tokens for a single program: all tokens, or a list of few.

A *source* is ``logits`` (one row), ``ids``, ``count`` and ``whole``: entry i is token i if ``whole``, else token
``ids[i]``, ascending; there are ``count`` entries. All sources with the tokens that matter give the same answers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.sampling.shared import (
    LOWEST,
    SPREAD,
    deficit_of,
    mass_of,
    noise_of_tokens,
    order,
    read,
    winner,
)

TILE = tl.constexpr(1024)
"""Entries looked at together where each takes much work."""

WAYS = tl.constexpr(16)
"""Parts of the remaining range in each step of the search for the k-th key."""


@triton.jit
def look(logits, ids, at, count, whole, raw: tl.constexpr):
    """Return token, logit and presence of the entries ``at``."""
    there = at < count
    listed = tl.load(ids + at, mask=there & (whole == 0), other=0)
    token = tl.where(whole != 0, at, listed)
    return token, read(logits, token, there, raw), there


@triton.jit
def kth_key(logits, ids, count, whole, k, low, width, exact, raw: tl.constexpr):
    """Return the k-th greatest order key of a source, in [low, low + width).

    The key is rounded down to a multiple of ``exact`` above ``low``. Width and exact are powers of two.
    """
    way = tl.arange(0, WAYS)
    while width > exact:
        width = tl.maximum(width // WAYS, exact)
        pivots = low + way * width
        reached = tl.zeros([WAYS], tl.int32)
        for start in range(0, count, TILE):
            token, value, there = look(logits, ids, start + tl.arange(0, TILE), count, whole, raw)
            keys = tl.where(there, order(value, token), LOWEST)
            reached += tl.sum((keys[None, :] >= pivots[:, None]).to(tl.int32), axis=1)
        low += width * tl.max(tl.where(reached >= k, way, 0))
    return low


@triton.jit
def mass_above(
    logits, ids, first, last, count, whole, key, peak, temperature, furthest, raw: tl.constexpr, STEP: tl.constexpr
):
    """Return the mass, int64, after min_p of entries first to last with order keys above ``key``."""
    mass = tl.zeros([STEP], tl.int64)
    for start in range(first, last, STEP):
        token, value, there = look(logits, ids, start + tl.arange(0, STEP), count, whole, raw)
        deficit = deficit_of(value, peak, temperature)
        kept = there & (deficit <= furthest) & (order(value, token) > key)
        mass += tl.where(kept, mass_of(deficit), 0)
    return tl.sum(mass)


@triton.jit
def race(settings, row, logits, ids, first, last, count, whole, floor, peak, temperature, furthest, raw: tl.constexpr):
    """Return score and order key of the winner among the entries first to last.

    Only keys of at least ``floor`` race. Without any such key, returns (-inf, LOWEST).
    """
    best, best_key = tl.full((), float("-inf"), tl.float32), tl.full((), LOWEST, tl.int64)
    for start in range(first, last, TILE):
        token, value, there = look(logits, ids, start + tl.arange(0, TILE), count, whole, raw)
        deficit, keys = deficit_of(value, peak, temperature), order(value, token)
        kept = there & (deficit <= tl.minimum(furthest, SPREAD)) & (keys >= floor)
        score = tl.where(kept, noise_of_tokens(settings, row, token) - deficit, float("-inf"))
        top, leader = winner(score, token, kept)
        if top > best:  # of equal scores the lowest id wins, and entries ascend
            best, best_key = top, tl.max(tl.where(kept & (token == leader), keys, LOWEST))
    return best, best_key


@triton.jit
def list_candidates(
    logits, tops, listed, groups, k,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr, raw: tl.constexpr,
):  # fmt: skip
    """List every token that can be among the k best of a row, in ``listed`` [ROOM].

    A token is listed unless it is below the k-th greatest of the groups' maxima; the last bits of the maxima do not
    count. Returns the number of such tokens and an order key at most as great as any of theirs. The list is complete if
    the number is at most ``ROOM``; otherwise counting stops early.

    ``tops`` [GROUPS] are the maxima, -inf for groups that do not exist. ``groups`` [GROUPS] is scratch.
    """
    COARSE: tl.constexpr = 2 ** (12 + 20)
    least, width = tl.full((), -(2**51), tl.int64), tl.full((), 2**52, tl.int64)
    low = kth_key(tops, groups, GROUPS, 1, k, least, width, COARSE, False)
    group = tl.arange(0, GROUPS)
    wanted = order(tl.load(tops + group), group) >= low
    tl.store(groups + tl.cumsum(wanted.to(tl.int32), 0) - 1, group, mask=wanted)
    tl.debug_barrier()
    number = tl.sum(wanted.to(tl.int32))
    start, count = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    SPAN: tl.constexpr = TILE // GROUP
    while (start < number) & (count <= ROOM):
        at = start + tl.arange(0, SPAN)
        first = tl.load(groups + at, mask=at < number, other=VOCAB) * GROUP
        ids = tl.reshape(first[:, None] + tl.arange(0, GROUP)[None, :], (TILE,))
        there = ids < VOCAB
        able = there & (order(read(logits, ids, there, raw), ids) >= low)
        place = count + tl.cumsum(able.to(tl.int32), 0) - 1
        tl.store(listed + place, ids, mask=able & (place < ROOM))
        count += tl.sum(able.to(tl.int32))
        start += SPAN
    tl.debug_barrier()
    return count, low
