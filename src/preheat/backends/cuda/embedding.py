"""Copies of rows on CUDA: token embedding, and the choice of rows to go on with.

Contract. Copies; no arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.launch import begin, options

COLUMNS = 1024
"""Numbers that a program copies."""


@triton.jit
def _copy_row(source, out, row, size, COLUMNS: tl.constexpr):
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    copied = tl.load(source + row.to(tl.int64) * size + at, mask=inside)
    tl.store(out + tl.program_id(0).to(tl.int64) * size + at, copied, mask=inside)


@triton.jit
def _embed(tokens, slots, last_token, table, out, size, COLUMNS: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    token = tl.load(tokens + tl.program_id(0))
    if token < 0:
        token = tl.load(last_token + tl.load(slots + tl.program_id(0)))
    _copy_row(table, out, token, size, COLUMNS)


@triton.jit
def _take_rows(hidden, index, out, size, COLUMNS: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    _copy_row(hidden, out, tl.load(index + tl.program_id(0)), size, COLUMNS)


def embed(tokens: Tensor, slots: Tensor, last_token: Tensor, table: Tensor, out: Tensor) -> None:
    """Fill ``out`` [tokens, hidden] with the rows of ``table`` [vocab, hidden] that ``tokens`` int32 [tokens] name; -1
    stands for ``last_token[slot]``.

    ``slots`` int32 [tokens], ``last_token`` int32 [slots]. Ids must be inside the table: nothing here checks them.
    """
    size = table.shape[1]
    programs = (len(tokens), triton.cdiv(size, COLUMNS))
    _embed[programs](tokens, slots, last_token, table, out, size, COLUMNS=COLUMNS, **options(num_warps=4, num_stages=1))


def take_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """The rows of ``hidden`` [tokens, size] that ``index`` int32 [rows] names, a new tensor [rows, size]."""
    size = hidden.shape[1]
    out = hidden.new_empty(len(index), size)
    programs = (len(index), triton.cdiv(size, COLUMNS))
    _take_rows[programs](hidden, index, out, size, COLUMNS=COLUMNS, **options(num_warps=4, num_stages=1))
    return out
