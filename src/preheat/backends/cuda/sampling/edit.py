"""Changes of logits before sampling, and the counts they need.

The changes are penalties, masks, logit_bias and banned stop ids. ``history`` int32 [slots, vocab] holds for each token
twice its number in the output of the slot's sequence, plus one if the prompt has the token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import begin
from preheat.backends.cuda.sampling.best import is_penalised
from preheat.backends.cuda.sampling.shared import (
    DRAFTED,
    DRAFTS,
    EDIT,
    FREQUENCY,
    HEADER_WORDS,
    MASKED,
    PRESENCE,
    REPETITION,
    ROW_WORDS,
    SLOT,
    kind,
    mend,
    real,
    word,
)

EDIT_WORDS = tl.constexpr(EDIT)

PART = 4
"""Words that describe a stretch of a sequence to be counted."""

PART_WORDS = tl.constexpr(PART)


@triton.jit
def penalise(
    settings, logits, stride, history, masks, edited, kinds,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WORDS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write penalised and masked logits.

    Grid (chunks, rows). ``edited`` float32 [rows, vocab] gets mended logits after repetition_penalty on every token
    seen, then frequency and presence penalties on tokens of the output, the drafts before the row included. Tokens
    without a bit in the row's mask get minus infinity. ``masks`` int32 [rows, WORDS]: bit i % 32 of word i // 32 allows
    token i; None where no row ever has a mask. ``kinds`` int32 [rows, chunks] gets the kind of each chunk of the raw
    logits.
    """
    begin(overlap)
    chunk, row = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(settings):
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < VOCAB, other=0.0).to(tl.float32)
    tl.store(kinds + row * tl.num_programs(0) + chunk, kind(value, ids < VOCAB))
    if is_penalised(settings, row):
        past = tl.load(history + word(settings, row, SLOT).to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=0)
        drafts = settings + word(settings, row, DRAFTS)
        for place in range(word(settings, row, DRAFTED)):
            past += tl.where(ids == tl.load(drafts + place), 2, 0)
        count = past >> 1
        repetition = real(settings, row, REPETITION) + tl.zeros_like(value)
        repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where(past != 0, repeated, value)
        value = tl.where(count > 0, value - real(settings, row, FREQUENCY) * count.to(tl.float32), value)
        value = tl.where(count > 0, value - real(settings, row, PRESENCE), value)
    value = mend(value)
    if masks is not None:  # noqa: SIM102  (known when the kernel is compiled, the other when it runs)
        if word(settings, row, MASKED) != 0:
            place = masks + row.to(tl.int64) * WORDS + (ids >> 5)
            bits = tl.load(place, mask=ids < VOCAB, other=0) >> (ids & 31)
            value = tl.where((bits & 1) != 0, value, float("-inf"))
    tl.store(edited + row.to(tl.int64) * VOCAB + ids, value, mask=ids < VOCAB)


@triton.jit
def edit(settings, edited, MAX_ROWS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, overlap: tl.constexpr):
    """Add each edit's value to its row's logit; minus infinity replaces the logit.

    Grid (any). Two edits of the same logit must have the same value; ids outside of the vocabulary are passed over.
    """
    begin(overlap)
    count = tl.load(settings + 1)
    edits = settings + HEADER_WORDS + MAX_ROWS * ROW_WORDS
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < count
        row = tl.load(edits + at * EDIT_WORDS, mask=there, other=0)
        token = tl.load(edits + at * EDIT_WORDS + 1, mask=there, other=0)
        change = tl.load(edits + at * EDIT_WORDS + 2, mask=there, other=0).to(tl.float32, bitcast=True)
        there &= (token >= 0) & (token < VOCAB)
        place = edited + row.to(tl.int64) * VOCAB + token
        value = tl.load(place, mask=there, other=0.0)
        banned = (change == float("-inf")) | (value == float("-inf"))  # only a mask leaves minus infinity
        tl.store(place, tl.where(banned, float("-inf"), mend(value + change)), mask=there)


@triton.jit
def recount(history, parts, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Count stretches of sequences in ``history``.

    Grid (parts). ``parts`` int32 begins with PART words for each stretch: the slot, the place of its tokens in
    ``parts``, their number (at most BLOCK), and how many of them belong to the prompt.
    """
    part = parts + tl.program_id(0) * PART_WORDS
    slot, begin, length, prompt = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
    at = tl.arange(0, BLOCK)
    there = at < length
    place = history + slot.to(tl.int64) * VOCAB + tl.load(parts + begin + at, mask=there, other=0)
    tl.atomic_or(place, 1, mask=there & (at < prompt))
    tl.atomic_add(place, 2, mask=there & (at >= prompt))
