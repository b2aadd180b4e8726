"""Rows on CUDA: token embedding, the selection of rows, and the sums of rows.

Contract. Copies; embeddings of tokens may be scaled, and rows for their type and position be added, as
:mod:`preheat.ops.embedding` says. Sums are those of :mod:`preheat.ops.pooling`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.device.launch import begin, options
from preheat.backends.cuda.device.sizes import cdiv
from preheat.ops.embedding import rounded

COLUMNS = 1024
"""Numbers copied by a program."""

SUMMED = 128
"""Numbers of each row that are summed by a program."""


@triton.jit
def _copy_row(source, out, row, size, stride, COLUMNS: tl.constexpr):
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    copied = tl.load(source + row.to(tl.int64) * stride + at, mask=inside)
    tl.store(out + tl.program_id(0).to(tl.int64) * size + at, copied, mask=inside)


@triton.jit
def _embed(
    tokens, slots, last_token, table, out, size, scale, learned, positions, images, types, vocab,
    COLUMNS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    begin(overlap)
    token = tl.load(tokens + tl.program_id(0))
    if images is None:
        _embed_token(
            token, slots, last_token, table, out, size, scale, learned, positions, types, vocab, COLUMNS
        )  # fmt: skip
    else:
        if token < -1:
            _copy_row(images, out, -2 - token, size, size, COLUMNS)
        else:
            _embed_token(
                token, slots, last_token, table, out, size, scale, learned, positions, types, vocab, COLUMNS
            )  # fmt: skip


@triton.jit
def _embed_token(
    token, slots, last_token, table, out, size, scale, learned, positions, types, vocab, COLUMNS: tl.constexpr
):
    if token < 0:
        token = tl.load(last_token + tl.load(slots + tl.program_id(0)))
    if types is not None:
        kind, token = token // vocab, token % vocab
    if scale is None and learned is None and types is None:
        _copy_row(table, out, token, size, size, COLUMNS)
    else:
        at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = at < size
        row = tl.load(table + token.to(tl.int64) * size + at, mask=inside, other=0.0)
        if scale is not None:
            row = (row.to(tl.float32) * scale).to(row.dtype)
        if types is not None:
            more = tl.load(types + kind.to(tl.int64) * size + at, mask=inside, other=0.0)
            row = (row.to(tl.float32) + more.to(tl.float32)).to(row.dtype)
        if learned is not None:
            position = tl.load(positions + tl.program_id(0)).to(tl.int64)
            more = tl.load(learned + position * size + at, mask=inside, other=0.0)
            row = (row.to(tl.float32) + more.to(tl.float32)).to(row.dtype)
        tl.store(out + tl.program_id(0).to(tl.int64) * size + at, row, mask=inside)


@triton.jit
def _take_rows(hidden, index, out, size, stride, COLUMNS: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    _copy_row(hidden, out, tl.load(index + tl.program_id(0)), size, stride, COLUMNS)


@triton.jit
def _sum_rows(x, bounds, out, size, stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr, overlap: tl.constexpr):
    begin(overlap)
    text, at = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.load(bounds + text), tl.load(bounds + text + 1)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(first, end, ROWS):
        for place in tl.static_range(ROWS):  # rows behind the end are +0, which changes no sum that began at +0
            row = start + place
            inside = (at < size) & (row < end)
            total += tl.load(x + row.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + text.to(tl.int64) * size + at, total, mask=at < size)


def embed(
    tokens: Tensor,
    slots: Tensor,
    last_token: Tensor,
    table: Tensor,
    out: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    at: Tensor | None = None,
    images: Tensor | None = None,
    types: Tensor | None = None,
) -> None:
    """Fill ``out`` [tokens, hidden] with embeddings of ``tokens`` int32 [tokens].

    An id names a row of ``table`` [vocab, hidden]; -1 stands for ``last_token[slot]``. With ``images`` [rows, hidden],
    -2 - row stands for that row of ``images``. Rows of ``table`` are multiplied by ``scale``. With ``types``
    [types, hidden] an id is id + type * vocab, and the row of the type is added. Then the rows of ``positions``
    [positions, hidden] named by ``at`` int32 [tokens] are added. Rows of ``images`` stay as they are.

    ``slots`` int32 [tokens], ``last_token`` int32 [slots]. Ids must be inside the table: nothing here checks them.
    """
    size = table.shape[1]
    programs = (len(tokens), cdiv(size, COLUMNS))
    if scale is not None:
        scale = rounded(scale, table.dtype)
    _embed[programs](
        tokens, slots, last_token, table, out, size, scale, positions, None if positions is None else at, images,
        types, None if types is None else table.shape[0], COLUMNS=COLUMNS, **options(num_warps=4, num_stages=1),
    )  # fmt: skip


def take_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` int32 [rows] of ``hidden`` [tokens, size], of any stride: a new tensor [rows, size]."""
    size = hidden.shape[1]
    out = hidden.new_empty(len(index), size)
    programs = (len(index), cdiv(size, COLUMNS))
    _take_rows[programs](
        hidden, index, out, size, hidden.stride(0), COLUMNS=COLUMNS, **options(num_warps=4, num_stages=1)
    )
    return out


def sum_rows(x: Tensor, bounds: Tensor, out: Tensor) -> None:
    """Fill ``out`` fp32 [texts, size] with the sums of rows of ``x`` [rows, size], see :mod:`preheat.ops.pooling`."""
    size = x.shape[1]
    programs = (len(out), cdiv(size, SUMMED))
    _sum_rows[programs](x, bounds, out, size, x.stride(0), COLUMNS=SUMMED, ROWS=8, **options(num_warps=1, num_stages=1))
