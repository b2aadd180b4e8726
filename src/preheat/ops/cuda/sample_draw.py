"""Drawing at random: Gumbel-max among the tokens that min_p, top_k and top_p leave.

No row is sorted. The winner among *all* tokens is found first, then it is judged: has it too much mass, or too many
tokens, before it? If so, all that come after it in order are out as well, and the best of the rest is the next to be
judged. What survives the judgement is the winner among the survivors, which is the token to draw. A row seldom needs
more than two tries, since a token is tried as often as it is likely.

Three kernels. ``enter`` lets the tokens of each chunk race, ``weigh`` judges the first winner, both with many programs
a row; ``settle`` does the rest with one program a row: it need only look again at chunks whose own winner was ruled
out while they may still hold the best. top_k has no use for the first two: its tokens come from a list of few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.ops.cuda.launch import begin
from preheat.ops.cuda.sample import (
    FURTHEST,
    ID_MASK,
    IMPOSSIBLE,
    LOWEST,
    SPREAD,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    deficit_of,
    id_of,
    mass_of,
    noise_of_groups,
    order,
    read,
    real,
    value_of,
    winner,
    word,
)  # fmt: skip
from preheat.ops.cuda.sample_best import best_of, emit
from preheat.ops.cuda.sample_source import kth_key, list_candidates, mass_above, race

STEP = tl.constexpr(2048)
"""Tokens that a single program weighs together."""


@triton.jit
def is_random(settings, row, peak):
    """Whether ``row`` exists and draws. Where nothing is possible there is nothing to draw from."""
    return (row < tl.load(settings)) & (real(settings, row, TEMPERATURE) > 0) & (peak > IMPOSSIBLE)


@triton.jit
def entrants(scores, winners, row, chunks, CHUNKS: tl.constexpr):
    """The score and the order key of every chunk's winner."""
    chunk = tl.arange(0, CHUNKS)
    score = tl.load(scores + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    key = tl.load(winners + row * chunks + chunk, mask=chunk < chunks, other=LOWEST)
    return score, key


@triton.jit
def leading(score, key, CHUNKS: tl.constexpr):
    """The chunk with the greatest score, the first of them, and its winner's order key."""
    chunk = tl.arange(0, CHUNKS)
    _, first = winner(score, chunk, chunk >= 0)
    return first, tl.max(tl.where(chunk == first, key, LOWEST))


@triton.jit
def enter(
    settings, logits, stride, leads, scores, winners, masses,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows), for rows that draw without top_k: score and order key of each chunk's winner, and the
    mass of its tokens; float32, int64 and int64 [rows, chunks].
    """
    begin(overlap)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    peak = value_of(best_of(leads, row, chunks, CHUNKS))
    if not is_random(settings, row, peak):
        return
    if word(settings, row, TOP_K) > 0:
        return
    group = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    ids = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = read(logits + row.to(tl.int64) * stride, ids, ids < VOCAB, raw)
    deficit = deficit_of(value, peak, real(settings, row, TEMPERATURE))
    kept = (ids < VOCAB) & (deficit <= real(settings, row, FURTHEST))
    tl.store(masses + row * chunks + chunk, tl.sum(tl.sum(tl.where(kept, mass_of(deficit), 0), axis=1)))
    kept &= deficit <= SPREAD
    score = tl.where(kept, noise_of_groups(settings, row, group) - deficit, float("-inf"))
    best, token = winner(score, ids, kept)
    key = tl.max(tl.where(kept & (ids == token), order(value, ids), LOWEST))
    tl.store(scores + row * chunks + chunk, best)
    tl.store(winners + row * chunks + chunk, key)


@triton.jit
def weigh(
    settings, logits, stride, leads, scores, winners, aheads,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows), for rows with top_p and without top_k: the mass of each chunk that comes before the row's
    winner, int64 [rows, chunks].
    """
    begin(overlap)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    peak = value_of(best_of(leads, row, chunks, CHUNKS))
    if not is_random(settings, row, peak):
        return
    if (word(settings, row, TOP_K) > 0) | (real(settings, row, TOP_P) >= 1):
        return
    score, key = entrants(scores, winners, row, chunks, CHUNKS)
    _, first = leading(score, key, CHUNKS)
    logits += row.to(tl.int64) * stride
    temperature, furthest = real(settings, row, TEMPERATURE), real(settings, row, FURTHEST)
    start = chunk * CHUNK
    ahead = mass_above(logits, settings, start, start + CHUNK, VOCAB, 1, first, peak, temperature, furthest, raw, CHUNK)
    tl.store(aheads + row * chunks + chunk, ahead)


@triton.jit
def chunk_sum(values, row, chunks, CHUNKS: tl.constexpr):
    """The sum of a row's values, one a chunk."""
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(values + row * chunks + chunk, mask=chunk < chunks, other=0))


@triton.jit
def settle(
    settings, logits, stride, tops, leads, scores, winners, masses, aheads, groups, listed,
    tokens, last_token, history, chunks,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    duplicates: tl.constexpr, raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Grid (rows): each row's token, its best one if it is greedy; rows that pad take token 0."""
    begin(overlap)
    row = tl.program_id(0)
    token = 0
    if row < tl.load(settings):
        lead = best_of(leads, row, chunks, CHUNKS)
        token = id_of(lead)
        if is_random(settings, row, value_of(lead)):
            key = survivor(
                settings, row, logits + row.to(tl.int64) * stride, lead, tops + row * GROUPS,
                scores, winners, masses, aheads, groups + row * GROUPS, listed + row * CHUNK, chunks,
                VOCAB, CHUNK, CHUNKS, GROUP, GROUPS, duplicates, raw,
            )  # fmt: skip
            token = id_of(key)
    emit(settings, row, token, tokens, last_token, history, VOCAB)


@triton.jit
def survivor(
    settings, row, logits, lead, tops, scores, winners, masses, aheads, groups, listed, chunks,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    duplicates: tl.constexpr, raw: tl.constexpr,
):  # fmt: skip
    """The order key of the token that ``row`` draws. A chunk whose winner is ruled out keeps its score as a bound on
    what else it holds, until it leads.
    """
    peak, temperature = value_of(lead), real(settings, row, TEMPERATURE)
    furthest, top_p, k = real(settings, row, FURTHEST), real(settings, row, TOP_P), word(settings, row, TOP_K)
    chunk = tl.arange(0, CHUNKS)
    floor, total = tl.full((), LOWEST, tl.int64), tl.full((), 0, tl.int64)
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
        score, key = entrants(scores, winners, row, chunks, CHUNKS)
        if top_p < 1:
            total = chunk_sum(masses, row, chunks, CHUNKS)
    limit = top_p.to(tl.float64) * total.to(tl.float64)
    judged = k > 0  # of the first winner without top_k, ``weigh`` has found what is before it
    first, best = leading(score, key, CHUNKS)
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
    """The order key of the last token that top_k keeps, with ``duplicates`` of the last that could equal it."""
    width = tl.full((), 16, tl.int64)
    while low + width <= lead:
        width *= 16
    cut = kth_key(logits, listed, count, whole, k, low, width, 1, raw)
    return cut - (cut & ID_MASK) if duplicates else cut
