"""The digest of rows on the device; :mod:`preheat.ops.digest` defines it. Integers only, so any layout is right.

A logit costs two multiplications. A word times the low and the high half of its key, added up apart, need no product of
64 bits. Of bf16 the word is 16 bits, and the whole sum is shifted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.ops.digest import FIRST, GOLDEN, SECOND, check_logits

BLOCK, WARPS = 1024, 4
MANY, TOGETHER = 8, 8
"""From ``MANY`` rows on a program takes ``TOGETHER`` rows: the keys of its columns are most of the work of one row."""

_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def _key(column):
    """SplitMix64's output for ``column`` + 1, made odd."""
    mixed = (column + 1).to(tl.uint64) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return (mixed ^ (mixed >> 31)) | 1


@triton.jit(do_not_specialize=["rows", "most"])
def _add_digests(
    logits, digests, spent, stride, rows, most, size: tl.constexpr, block: tl.constexpr, together: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Add to ``digests[row]`` the digest of a block of the ``size`` logits of a row, as fp32.

    A program has one block of ``together`` rows, and asks for all of them before it adds up any. One program sets the
    ``most`` numbers of ``spent`` to zero.
    """
    begin(overlap)
    part, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * together
    column, row = part * block + tl.arange(0, block), first + tl.arange(0, together)
    place = row[:, None] * stride + column[None, :]
    logit = tl.load(logits + place, (row < rows)[:, None] & (column < size)[None, :], other=0.0)
    key = _key(column)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    unread: tl.constexpr = 16 if logit.dtype == tl.bfloat16 else 0  # the low bits of bf16 as fp32 are zero
    if unread:
        word = logit.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        word = logit.to(tl.float32).to(tl.uint32, bitcast=True)
    lows = tl.sum(word.to(tl.uint64) * low.to(tl.uint64)[None, :], 1)
    highs = tl.sum(word * high[None, :], 1).to(tl.uint64)
    digest = (lows + (highs << 32)) << unread
    tl.atomic_add(digests + row, digest.to(tl.int64, bitcast=True), row < rows, sem="relaxed")
    if (part == 0) & (first == 0):
        for start in range(0, most, block):
            number = start + tl.arange(0, block)
            tl.store(spent + number, tl.zeros((block,), tl.int64), number < most)


def add_digests(logits: Tensor, digests: Tensor, spent: Tensor) -> None:
    """Add the digests of the rows of ``logits``, fp32 or what fp32 holds, to ``digests``, and set ``spent`` to zero.

    Rows must be contiguous. ``digests`` and ``spent`` are int64 of one length. Never waits for the device.
    """
    rows, vocab = logits.shape
    if rows:
        together = TOGETHER if rows >= MANY else 1
        grid = -(-vocab // BLOCK), -(-rows // together)
        _add_digests[grid](
            logits, digests, spent, logits.stride(0), rows, len(spent), vocab, BLOCK, together,
            **options(num_warps=WARPS),
        )  # fmt: skip


def digest_rows(logits: Tensor) -> Tensor:
    """Return the digests, int64 [rows], of fp32 ``logits`` [rows, vocab] with contiguous rows.

    Never waits for the device.
    """
    check_logits(logits)
    digests = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    add_digests(logits, digests, torch.empty_like(digests))
    return digests
