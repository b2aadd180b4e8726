"""The best token of each row: the whole sampler of greedy rows, and what all others begin with."""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.launch import begin
from preheat.backends.cuda.sample import (
    FINAL,
    FREQUENCY,
    PRESENCE,
    REPETITION,
    SLOT,
    id_of,
    order,
    read,
    real,
    winner,
    word,
)


@triton.jit
def peaks(
    settings, logits, stride, tops, leads,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows): ``tops`` float32 [rows, groups] gets the greatest logit of each group of a row, ``leads``
    int64 [rows, chunks] the order key of each chunk's best token.
    """
    begin(overlap)
    chunk, row = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(settings):
        return
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = read(logits + row.to(tl.int64) * stride, ids, ids < VOCAB, raw)
    tl.store(tops + row * GROUPS + group, tl.max(value, axis=1))
    best, token = winner(value, ids, ids < VOCAB)
    tl.store(leads + row * tl.num_programs(0) + chunk, order(best, token))


@triton.jit
def best_of(leads, row, chunks, CHUNKS: tl.constexpr):
    """The order key of the best token of ``row``; ``CHUNKS`` is a power of two and at least ``chunks``."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(leads + row * chunks + chunk, mask=chunk < chunks, other=-(2**62)))


@triton.jit
def emit(settings, row, token, tokens, last_token, history, VOCAB: tl.constexpr):
    """Give ``token`` to ``row`` and to its slot, and count it if the row has penalties, the token is final and there is
    a ``history``.
    """
    slot = word(settings, row, SLOT)
    tl.store(tokens + row, token)
    tl.store(last_token + slot, token)
    if history is not None:  # noqa: SIM102  (known when the kernel is compiled, the other when it runs)
        if is_penalised(settings, row) & (word(settings, row, FINAL) != 0):
            at = history + slot.to(tl.int64) * VOCAB + token
            tl.store(at, tl.load(at) + 2)


@triton.jit
def is_penalised(settings, row):
    """Whether ``row`` has any penalty."""
    repeated = real(settings, row, REPETITION) != 1
    return repeated | (real(settings, row, FREQUENCY) != 0) | (real(settings, row, PRESENCE) != 0)


@triton.jit
def pick(
    settings, leads, tokens, last_token, chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Grid (rows): each row takes its best token, rows that pad take token 0."""
    begin(overlap)
    row = tl.program_id(0)
    token = 0
    if row < tl.load(settings):
        token = id_of(best_of(leads, row, chunks, CHUNKS))
    emit(settings, row, token, tokens, last_token, None, VOCAB)
