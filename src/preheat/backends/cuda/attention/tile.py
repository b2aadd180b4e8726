"""Steps of paged attention shared by all plain Triton kernels.

:func:`absorb` adds one tile of keys to an online softmax, and :func:`merge` adds one split to the splits so far.
:mod:`preheat.backends.cuda.attention.paged` states the contract.
"""

from __future__ import annotations

import triton
import triton.language as tl

from preheat.backends.cuda.device.launch import widened


@triton.jit
def blocks_of(table, start, end, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Load the blocks of the tile of keys from ``start`` on.

    A tile inside one block gets one number, else each key gets one. From ``end`` on it is block 0.
    """
    at = start if BLOCK >= TILE else start + tl.arange(0, TILE)
    return tl.load(table + at // BLOCK, mask=at < end, other=0)


@triton.jit
def key_offsets(blocks, start, block_stride, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the cache offset of each key of a tile, within its head: int64 [TILE]."""
    inside = start % BLOCK + tl.arange(0, TILE) if BLOCK >= TILE else tl.arange(0, TILE) % BLOCK
    return tl.cast(blocks, tl.int64) * block_stride + inside * DIM


@triton.jit
def absorb(
    top, total, acc, q, seen_from, seen_to, keys, values, blocks, start, end, scale, slopes, block_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the online softmax.

    Keys and values of another dtype are widened to the queries' dtype without loss. ``FULL``: every query sees the
    whole tile; this changes no bits. ``slopes`` holds the ALiBi slope of each query row, times log2(e), or is None.
    """
    WIDTH: tl.constexpr = acc.shape[1]
    at = start + tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    offsets = key_offsets(blocks, start, block_stride, DIM, BLOCK, TILE)[:, None] + dims[None, :]
    if FULL and WIDTH == DIM:
        k = tl.load(keys + offsets)
        v = tl.load(values + offsets)
    else:
        real = (at < end)[:, None] & (dims < DIM)[None, :]
        k = tl.load(keys + offsets, mask=real, other=0.0)
        v = tl.load(values + offsets, mask=real, other=0.0)
    if k.dtype != q.dtype:
        k = widened(k, q.dtype)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if slopes is not None:
        distance = at[None, :] + 1 - seen_to[:, None]  # seen_to is the query's position + 1
        s = tl.fma(s, scale, slopes[:, None] * distance.to(tl.float32))
    if not FULL:
        s = tl.where((at[None, :] < seen_to[:, None]) & (at[None, :] >= seen_from[:, None]), s, -float("inf"))
    if slopes is not None:
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None]).to(q.dtype)
    else:
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(tl.fma(s, scale, -base[:, None])).to(q.dtype)
    fade = tl.exp2(top - base)[:, None]
    ones = tl.full([TILE, 16], 1.0, tl.float32).to(q.dtype)
    total = tl.dot(p, ones, total * fade, input_precision="ieee")
    if v.dtype != q.dtype:  # widened late, so that keys and values take turns in the same shared memory
        v = widened(v, q.dtype)
    acc = tl.dot(p, v, acc * fade, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def weigh(s, top, scale, dtype: tl.constexpr):
    """Return the greatest score so far, the weights of a tile of scores, and the fade of earlier tiles."""
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(tl.fma(s, scale, -base[:, None])).to(dtype)
    return new_top, p, tl.exp2(top - base)[:, None]


@triton.jit
def merge(tops, totals, accs, top, total, acc):
    """Merge the next split into the splits so far.

    ``total`` is [rows, 1] or, with equal columns, [rows, 16].
    """
    new_top = tl.maximum(tops, top)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    x, y = tl.exp2(tops - base)[:, None], tl.exp2(top - base)[:, None]
    return new_top, tl.fma(totals, x, total * y), tl.fma(accs, x, acc * y)


@triton.jit
def add_sink(tops, totals, accs, sinks):
    """Return sums and outputs with the ``sinks`` of the rows, fp32 times log2(e), behind the last split."""
    new_top = tl.maximum(tops, sinks)
    x, y = tl.exp2(tops - new_top)[:, None], tl.exp2(sinks - new_top)[:, None]
    return tl.fma(totals, x, tl.zeros_like(totals) + y), accs * x


@triton.jit
def nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the maximum, sums and outputs of an empty softmax."""
    return (
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS, 16], tl.float32),
        tl.zeros([ROWS, WIDTH], tl.float32),
    )


@triton.jit
def claim(claims, units, programs):
    """Return the number of this program's next unit.

    The first ``programs`` units belong to the programs with the same numbers. The others go to the first program that
    asks. Each program asks once in vain, so the last number to be drawn is known: the program that draws it sets
    ``claims`` to zero.
    """
    unit = units
    if units > programs:
        drawn = tl.atomic_add(claims, 1, sem="relaxed")
        unit = programs + drawn
        if unit == units + programs - 1:
            tl.store(claims, 0)
    return unit
