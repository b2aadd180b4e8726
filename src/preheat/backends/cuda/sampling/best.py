"""The best token of each row: the whole sampler of greedy rows, and the first step of others."""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.sampling.shared import (
    FINAL,
    FINITE,
    FREQUENCY,
    NO_TOKEN,
    PRESENCE,
    REPETITION,
    SLOT,
    id_of,
    kind_of_greatest,
    mend,
    order,
    real,
    word,
)


@triton.jit
def peaks(
    settings, logits, stride, tops, leads, kinds,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    raw: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write the greatest logit of each group and the best token of each chunk.

    Grid (chunks, rows). ``tops`` float32 [rows, groups] gets the greatest logit of each group of a row. ``leads`` int64
    [rows, chunks] gets the order key of each chunk's best token, ``kinds`` int32 [rows, chunks] the kind of each chunk
    of ``raw`` logits.
    """
    begin(overlap)
    chunk, row = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(settings):
        return
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits += row.to(tl.int64) * stride
    value = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    if raw:
        top = tl.reduce(value, 1, _greater_or_nan)
        best = tl.reduce(top, 0, _greater_or_nan)
        tl.store(kinds + row * tl.num_programs(0) + chunk, kind_of_greatest(best))
        if not (best < float("inf")):  # NaN or +inf: logits beside them count, too
            top = tl.max(tl.where(ids < VOCAB, mend(value), value), axis=1)
        top = tl.where(group * GROUP < VOCAB, mend(top), top)
    else:
        top = tl.max(value, axis=1)
    tl.store(tops + row * GROUPS + group, top)
    best, token = _winner_of_groups(logits, top, group, VOCAB, GROUP, raw)
    tl.store(leads + row * tl.num_programs(0) + chunk, order(best, token))


@triton.jit
def _greater_or_nan(one, other):
    """Return the greater number, or NaN if one of them is NaN."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _winner_of_groups(logits, top, group, VOCAB: tl.constexpr, GROUP: tl.constexpr, raw: tl.constexpr):
    """Return the greatest of the groups' greatest logits and the lowest id with it.

    Only the first group that has it is read again: to compare all logits costs more than to read them.
    """
    best = tl.max(top)
    first = tl.min(tl.where(top == best, group, NO_TOKEN))
    ids = first * GROUP + tl.arange(0, GROUP)
    value = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    if raw:
        value = tl.where(ids < VOCAB, mend(value), value)
    return best, tl.min(tl.where((value == best) & (ids < VOCAB), ids, NO_TOKEN))


@triton.jit
def best_of(leads, row, chunks, CHUNKS: tl.constexpr):
    """Return the order key of the best token of ``row``.

    ``CHUNKS`` is a power of two and at least ``chunks``.
    """
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(leads + row * chunks + chunk, mask=chunk < chunks, other=-(2**62)))


@triton.jit
def is_finite(kinds, row, chunks, CHUNKS: tl.constexpr):
    """Return whether the logits of ``row`` are finite."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(kinds + row * chunks + chunk, mask=chunk < chunks, other=0)) == FINITE


@triton.jit
def token_of(tokens, row):
    """Return the token of ``row``; ``tokens`` holds its complement if the row's logits are not finite."""
    token = tl.load(tokens + row)
    return tl.where(token < 0, ~token, token)


@triton.jit
def emit(settings, row, token, finite, tokens, last_token, history, VOCAB: tl.constexpr):
    """Give ``token`` to ``row`` and to its slot.

    ``tokens`` gets the complement unless the row's logits are ``finite``. The token is counted if the row has
    penalties, the token is final and there is a ``history``.
    """
    slot = word(settings, row, SLOT)
    tl.store(tokens + row, tl.where(finite, token, ~token))
    tl.store(last_token + slot, token)
    if history is not None:  # noqa: SIM102  (known when the kernel is compiled, the other when it runs)
        if is_penalised(settings, row) & (word(settings, row, FINAL) != 0):
            at = history + slot.to(tl.int64) * VOCAB + token
            tl.store(at, tl.load(at) + 2)


@triton.jit
def is_penalised(settings, row):
    """Return whether ``row`` has any penalty."""
    repeated = real(settings, row, REPETITION) != 1
    return repeated | (real(settings, row, FREQUENCY) != 0) | (real(settings, row, PRESENCE) != 0)


@triton.jit
def pick(
    settings, leads, kinds, tokens, last_token, chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Pick the best token of each row; padding rows get token 0.

    Grid (rows).
    """
    begin(overlap)
    row = tl.program_id(0)
    token, finite = 0, tl.full((), 1, tl.int1)
    if row < tl.load(settings):
        token = id_of(best_of(leads, row, chunks, CHUNKS))
        finite = is_finite(kinds, row, chunks, CHUNKS)
    emit(settings, row, token, finite, tokens, last_token, None, VOCAB)
