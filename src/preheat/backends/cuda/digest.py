"""The digest of rows on the device; :mod:`preheat.ops.digest` defines it. Integers only, so any layout is right."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import begin, options
from preheat.ops.digest import FIRST, GOLDEN, SECOND, check_logits

BLOCK, WARPS = 4096, 8

_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def _key(column):
    """SplitMix64's output for ``column`` + 1, made odd."""
    mixed = (column + 1).to(tl.uint64) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return (mixed ^ (mixed >> 31)) | 1


@triton.jit(do_not_specialize=["stride"])
def _digest_rows(words, digests, stride, size: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr):
    """Write ``digests[row]`` of ``size`` int32 ``words``, one row a program."""
    begin(overlap)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([block], tl.uint64)
    for start in range(0, size, block):
        column = start + tl.arange(0, block)
        word = tl.load(words + row * stride + column, column < size, other=0)
        total += word.to(tl.uint32, bitcast=True).to(tl.uint64) * _key(column)
    tl.store(digests + row, tl.sum(total, 0).to(tl.int64, bitcast=True))


def digest_rows(logits: Tensor) -> Tensor:
    """Return the digests, int64 [rows], of fp32 ``logits`` [rows, vocab] with contiguous rows.

    Never waits for the device.
    """
    check_logits(logits)
    rows, vocab = logits.shape
    digests = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        words = logits.view(torch.int32)
        _digest_rows[(rows,)](words, digests, words.stride(0), vocab, BLOCK, **options(num_warps=WARPS))
    return digests
