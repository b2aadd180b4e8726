"""Log-probabilities, ranks and the most likely tokens, of raw logits.

A row's answer depends on that row alone. Probability is summed in integers (of 2**-40 of the best token's), so the sum
has no order. A rank is 1 + the number of tokens before the token, ties to the lowest id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.sampling.best import best_of, token_of
from preheat.backends.cuda.sampling.draw import chunk_sum
from preheat.backends.cuda.sampling.shared import IMPOSSIBLE, LOWEST, id_of, ln, order, read, value_of
from preheat.backends.cuda.sampling.source import TILE, list_candidates, look

UNIT = tl.constexpr(float(2**40))


@triton.jit
def tally(
    settings, logits, stride, leads, chosen, sums, befores,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write each chunk's probability, and the number of its tokens before the row's ``chosen`` token.

    Grid (chunks, rows). ``sums`` int64 and ``befores`` int32, both [rows, chunks].
    """
    begin(overlap)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if row >= tl.load(settings):
        return
    logits += row.to(tl.int64) * stride
    peak = value_of(best_of(leads, row, chunks, CHUNKS))
    token = token_of(chosen, row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    value = read(logits, ids, ids < VOCAB, True)
    own = tl.max(read(logits, token + tl.zeros_like(ids), ids >= 0, True))
    mass = tl.where(value > IMPOSSIBLE, tl.exp(value - peak) * UNIT, 0.0).to(tl.int64)
    before = (ids < VOCAB) & (order(value, ids) > order(own, token))
    tl.store(sums + row * chunks + chunk, tl.sum(mass))
    tl.store(befores + row * chunks + chunk, tl.sum(before.to(tl.int32)))


@triton.jit
def peak_and_total(leads, sums, row, chunks, CHUNKS: tl.constexpr):
    """Return the greatest logit of a row, and the logarithm of its sum."""
    peak = value_of(best_of(leads, row, chunks, CHUNKS))
    total = ln((chunk_sum(sums, row, chunks, CHUNKS) + tl.zeros([1], tl.int64)).to(tl.float32) * (1.0 / UNIT))
    return peak, total


@triton.jit
def report(
    settings, logits, stride, tops, leads, chosen, sums, befores, groups, listed, ids_out, values_out, most, chunks,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Write rank and log-probability of the chosen token, and the most likely tokens.

    Grid (rows). ``ids_out`` int32 and ``values_out`` float32, both [rows, 1 + most]: first the rank and the
    log-probability of the chosen token, then the ``most`` most likely tokens and their log-probabilities (-1 beyond the
    vocabulary).
    """
    begin(overlap)
    row = tl.program_id(0)
    if row >= tl.load(settings):
        return
    logits += row.to(tl.int64) * stride
    peak, total = peak_and_total(leads, sums, row, chunks, CHUNKS)
    ids_out += row * (most + 1)
    values_out += row * (most + 1)
    own = read(logits, token_of(chosen, row) + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), True)
    one = tl.arange(0, 1)
    tl.store(ids_out + one, 1 + chunk_sum(befores, row, chunks, CHUNKS))
    tl.store(values_out + one, log_probability(own, peak, total))
    count, _ = list_candidates(
        logits, tops + row * GROUPS, listed + row * CHUNK, groups + row * GROUPS, most,
        VOCAB, GROUP, GROUPS, CHUNK, True,
    )  # fmt: skip
    whole = (count > CHUNK).to(tl.int32)
    count = tl.where(whole != 0, VOCAB, count)
    last = tl.full((), 2**62, tl.int64)
    for place in range(1, most + 1):
        best = tl.full((), LOWEST, tl.int64)
        for start in range(0, count, TILE):
            token, value, there = look(logits, listed + row * CHUNK, start + tl.arange(0, TILE), count, whole, True)
            key = order(value, token)
            best = tl.maximum(best, tl.max(tl.where(there & (key < last), key, LOWEST)))
        found = best > LOWEST
        tl.store(ids_out + place, tl.where(found, id_of(best), -1))
        value = tl.where(found, value_of(best), IMPOSSIBLE)
        tl.store(values_out + place + one, log_probability(value + tl.zeros([1], tl.float32), peak, total))
        last = best


@triton.jit
def report_told(
    settings, logits, stride, leads, sums, told, values_out, chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write the log-probabilities of the tokens ``told`` int32 [rows, MOST].

    Grid (rows). ``values_out`` float32 [rows, MOST] gets the same bits as from `report`; minus infinity for -1.
    ``leads`` and ``sums`` are the inputs of `report`.
    """
    begin(overlap)
    row = tl.program_id(0)
    if row >= tl.load(settings):
        return
    logits += row.to(tl.int64) * stride
    peak, total = peak_and_total(leads, sums, row, chunks, CHUNKS)
    place = row * MOST + tl.arange(0, MOST)
    token = tl.load(told + place)
    value = read(logits, token, (token >= 0) & (token < VOCAB), True)
    tl.store(values_out + place, log_probability(value, peak, total))


@triton.jit
def log_probability(value, peak, total):
    """Return the log-probability of a token with logit ``value``; ``total`` is the logarithm of the sum."""
    return tl.where(value > IMPOSSIBLE, value - peak - total, float("-inf"))
