"""Random draws: Gumbel-max among the tokens left by min_p, top_k and top_p.

No row is sorted. The winner among *all* tokens is found first, then it is judged: is there too much mass, or are there
too many tokens, before it? If so, all tokens after it in order are out as well, and the best of the rest is judged
next. The winner that survives judgement is the winner among the survivors, and so the token to draw. A row seldom needs
more than two tries, since a token is tried as often as it is likely.

Three kernels. ``enter`` (:mod:`preheat.backends.cuda.sampling.gumbel`) lets the tokens of each chunk race, ``weigh``
judges the first winner, both with many programs a row. ``settle`` does the rest with one program a row. It looks again
only at chunks that may still hold the best token, if their own winner is not known or was ruled out. top_k has no use
for ``enter`` and ``weigh``: its tokens come from a list of few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.sampling.best import best_of, emit, is_finite
from preheat.backends.cuda.sampling.gumbel import entrants, is_random
from preheat.backends.cuda.sampling.shared import (
    FURTHEST,
    ID_MASK,
    IMPOSSIBLE,
    LOWEST,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    deficit_of,
    id_of,
    mass_of,
    order,
    read,
    real,
    value_of,
    winner,
    word,
)
from preheat.backends.cuda.sampling.source import kth_key, list_candidates, mass_above, race

STEP = tl.constexpr(2048)
"""Tokens weighed together by a single program."""


@triton.jit
def leading(score, key, CHUNKS: tl.constexpr):
    """Return the first chunk with the greatest score, and its winner's order key."""
    chunk = tl.arange(0, CHUNKS)
    _, first = winner(score, chunk, chunk >= 0)
    return first, tl.max(tl.where(chunk == first, key, LOWEST))


@triton.jit
def weigh(
    settings, logits, stride, leads, nearest, masses, aheads,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Weigh each chunk of rows with top_p and without top_k.

    Grid (chunks, rows). ``masses`` gets a chunk's mass after min_p, ``aheads`` the mass before the row's winner; both
    int64 [rows, chunks].
    """
    begin(overlap)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if not is_random(settings, row):
        return
    if (word(settings, row, TOP_K) > 0) | (real(settings, row, TOP_P) >= 1):
        return
    peak = value_of(best_of(leads, row, chunks, CHUNKS))
    if peak <= IMPOSSIBLE:
        return
    logits += row.to(tl.int64) * stride
    score, key = entrants(settings, row, logits, nearest, chunks, peak, VOCAB, CHUNK, CHUNKS, raw)
    _, first = leading(score, key, CHUNKS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    value = read(logits, ids, ids < VOCAB, raw)
    deficit = deficit_of(value, peak, real(settings, row, TEMPERATURE))
    mass = tl.where((ids < VOCAB) & (deficit <= real(settings, row, FURTHEST)), mass_of(deficit), 0)
    tl.store(masses + row * chunks + chunk, tl.sum(mass))
    tl.store(aheads + row * chunks + chunk, tl.sum(tl.where(order(value, ids) > first, mass, 0)))


@triton.jit
def chunk_sum(values, row, chunks, CHUNKS: tl.constexpr):
    """Return the sum of a row's values, one a chunk."""
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(values + row * chunks + chunk, mask=chunk < chunks, other=0))


@triton.jit
def settle(
    settings, logits, stride, tops, leads, kinds, nearest, masses, aheads, groups, listed,
    tokens, last_token, history, chunks,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    duplicates: tl.constexpr, raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Choose each row's token, its best one if it is greedy; padding rows get token 0.

    Grid (rows).
    """
    begin(overlap)
    row = tl.program_id(0)
    token, finite = 0, tl.full((), 1, tl.int1)
    if row < tl.load(settings):
        finite = is_finite(kinds, row, chunks, CHUNKS)
        lead = best_of(leads, row, chunks, CHUNKS)
        token = id_of(lead)
        if is_random(settings, row) & (value_of(lead) > IMPOSSIBLE):
            key = survivor(
                settings, row, logits + row.to(tl.int64) * stride, lead, tops + row * GROUPS,
                nearest, masses, aheads, groups + row * GROUPS, listed + row * CHUNK, chunks,
                VOCAB, CHUNK, CHUNKS, GROUP, GROUPS, duplicates, raw,
            )  # fmt: skip
            token = id_of(key)
    emit(settings, row, token, finite, tokens, last_token, history, VOCAB)


@triton.jit
def survivor(
    settings, row, logits, lead, tops, nearest, masses, aheads, groups, listed, chunks,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    duplicates: tl.constexpr, raw: tl.constexpr,
):  # fmt: skip
    """Return the order key of the token drawn by ``row``.

    A chunk with a winner that is ruled out keeps the winner's score as a bound on its other tokens, until the chunk
    leads.
    """
    peak, temperature = value_of(lead), real(settings, row, TEMPERATURE)
    furthest, top_p, k = real(settings, row, FURTHEST), real(settings, row, TOP_P), word(settings, row, TOP_K)
    chunk = tl.arange(0, CHUNKS)
    floor, total = tl.full((), LOWEST + 1, tl.int64), tl.full((), 0, tl.int64)
    count, whole = tl.full((), VOCAB, tl.int32), tl.full((), 1, tl.int32)
    if k > 0:
        count, low = list_candidates(logits, tops, listed, groups, k, VOCAB, GROUP, GROUPS, CHUNK, raw)
        whole = (count > CHUNK).to(tl.int32)
        count = tl.where(whole != 0, VOCAB, count)
        floor = cut_by_k(logits, listed, count, whole, k, low, lead, duplicates, raw)
        score = tl.where(chunk * CHUNK < count, float("inf"), float("-inf"))
        key = tl.full([CHUNKS], LOWEST, tl.int64)
        if top_p < 1:
            total = mass_above(
                logits, listed, 0, count, count, whole, floor - 1, peak, temperature, furthest, raw, STEP
            )
    else:
        score, key = entrants(settings, row, logits, nearest, chunks, peak, VOCAB, CHUNK, CHUNKS, raw)
        if top_p < 1:
            total = chunk_sum(masses, row, chunks, CHUNKS)
    limit = top_p.to(tl.float64) * total.to(tl.float64)
    first, best = leading(score, key, CHUNKS)
    judged = best < floor  # ``weigh`` has weighed the mass before a winner of the second lap
    pending = tl.full((), 1, tl.int1)
    while pending:
        if best < floor:
            start = first * CHUNK
            again, again_key = race(
                settings, row, logits, listed, start, tl.minimum(start + CHUNK, count), count, whole, floor,
                peak, temperature, furthest, raw,
            )  # fmt: skip
            score = tl.where(chunk == first, again, score)
            key = tl.where(chunk == first, again_key, key)
            first, best = leading(score, key, CHUNKS)
        elif (top_p >= 1) | (best == lead):
            pending = tl.full((), 0, tl.int1)
        else:
            if judged:
                ahead = mass_above(logits, listed, 0, count, count, whole, best, peak, temperature, furthest, raw, STEP)
            else:
                ahead = chunk_sum(aheads, row, chunks, CHUNKS)
            judged = tl.full((), 1, tl.int1)
            pending = (ahead.to(tl.float64) >= limit) & (ahead > 0)
            floor = best + 1
    return best


@triton.jit
def cut_by_k(logits, listed, count, whole, k, low, lead, duplicates: tl.constexpr, raw: tl.constexpr):
    """Return the order key of the last token kept by top_k.

    With ``duplicates``, return the lowest key with the same logit.
    """
    width = tl.full((), 16, tl.int64)
    while low + width <= lead:
        width *= 16
    cut = kth_key(logits, listed, count, whole, k, low, width, 1, raw)
    return cut - (cut & ID_MASK) if duplicates else cut
