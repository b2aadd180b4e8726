"""Paged causal attention on CUDA.

Contract. Keys are cut into splits at absolute multiples of :data:`preheat.backends.cuda.work.SPLIT`, splits into tiles
of ``TILE`` keys. Inside a split, one online softmax over its tiles in rising order, from (maximum, sum, output) =
(-inf, 0, 0), all fp32: s = q . k; top = max(maximum, max(s) * scale); p = exp2(fma(s, scale, -top)), rounded to the
dtype; fade = exp2(maximum - top); sum = sum * fade + p . 1 and output = output * fade + p . v, both through the matrix
unit. Across the splits of a query, in rising order and from (-inf, 0, 0) again: both sides are scaled to the greater
maximum, then added with one fma. At the end output / sum, rounded once. ``scale`` includes log2(e).

A cache of eight bits is widened to the dtype of the queries, exactly, as tiles are loaded. ``scale`` then includes the
scale of the keys, and output / sum is multiplied by that of the values before it is rounded.

With ALiBi, s = fma(q . k, scale, slope * log2(e) * (key - query)), the bias in fp32, takes the place of s * scale in
both the maximum and the exponent.

A tile in which a query sees no key leaves its three numbers as they are, and so does a split. Hence the bits of a
query depend on its position and on what it attends to, never on the kernel, its tiles, its warps, its neighbours, the
blocks or how the sequence was cut into steps. Sums of a row go through the matrix unit because the order of an ordinary
reduction follows the layout of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda import attention_hopper as hopper
from preheat.backends.cuda.attention_tile import absorb, blocks_of, merge, nothing
from preheat.backends.cuda.launch import begin, options, processors
from preheat.backends.cuda.work import SPLIT

TILE = 64
"""Keys of a tile. Part of the contract."""

LOG2_E = 1.4426950408889634
LOG2E: tl.constexpr = tl.constexpr(LOG2_E)


@dataclass(frozen=True)
class AttentionConfig:
    """The layout of a kernel, none of which changes bits: query rows of a program, its warps, the tiles of keys that
    are loaded ahead, and the least programs of a persistent grid for each multiprocessor; 0: one for each piece.
    """

    rows: int
    warps: int
    stages: int
    programs: int = 0


MANY = 64
"""Rows from which on there is enough to do everywhere: thin programs then do it best."""


def decode_config(rows: int, dim: int, dtype: torch.dtype) -> AttentionConfig:
    """For steps of ``rows`` and heads of ``dim`` numbers; measured on an H200 (benchmarks/attention.py)."""
    if dim * dtype.itemsize > 256:
        return AttentionConfig(rows=16, warps=4, stages=2, programs=6)
    return (
        AttentionConfig(rows=16, warps=2, stages=2, programs=6)
        if rows >= MANY
        else AttentionConfig(rows=16, warps=4, stages=3, programs=6)
    )


def prefill_config(dim: int, dtype: torch.dtype) -> AttentionConfig:
    """For heads of ``dim`` numbers. Two outputs of all rows must fit into registers."""
    if dtype == torch.float32:
        return AttentionConfig(rows=16, warps=4, stages=2)
    return AttentionConfig(rows=128, warps=8, stages=3) if dim <= 128 else AttentionConfig(rows=64, warps=8, stages=2)


@triton.jit
def _keep_part(parts, tops, totals, piece, head, top, total, acc, own, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Write one split of the ``own`` heads from ``head`` on."""
    dims = tl.arange(0, acc.shape[1])
    at = tl.cast(piece, tl.int64) * HEADS + head + tl.arange(0, acc.shape[0])
    tl.store(tops + at, top, mask=own)
    tl.store(totals + at, tl.max(total, 1), mask=own)  # all columns are equal
    tl.store(parts + at[:, None] * DIM + dims[None, :], acc, mask=own[:, None] & (dims < DIM)[None, :])


@triton.jit
def _merge_parts(
    parts, tops, totals, piece, count, head, own, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Merge the ``count`` splits from ``piece`` on, of the ``own`` heads from ``head`` on: their sums and outputs."""
    ROWS: tl.constexpr = own.shape[0]
    dims = tl.arange(0, WIDTH)
    real = own[:, None] & (dims < DIM)[None, :]
    top, acc = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    at = tl.cast(piece, tl.int64) * HEADS + head + tl.arange(0, ROWS)
    for _ in tl.range(0, count, num_stages=4):
        one_top = tl.load(tops + at, mask=own, other=0.0, cache_modifier=".cg")
        one_total = tl.load(totals + at, mask=own, other=1.0, cache_modifier=".cg")
        one = tl.load(parts + at[:, None] * DIM + dims[None, :], mask=real, other=0.0, cache_modifier=".cg")
        top, total, acc = merge(top, total, acc, one_top, one_total[:, None], one)
        at += HEADS
    return total, acc


@triton.jit
def _claim(claims, units, programs):
    """The next unit of work: the first ``programs`` are their programs', the rest go to whoever asks first.

    Each program asks once in vain, so the last number to be drawn is known: who draws it leaves ``claims`` at zero.
    """
    unit = units
    if units > programs:
        drawn = tl.atomic_add(claims, 1, sem="relaxed")
        unit = programs + drawn
        if unit == units + programs - 1:
            tl.store(claims, 0)
    return unit


@triton.jit(do_not_specialize=["max_blocks"])
def _decode(
    q, cache, table, slots, positions, work, num_work, out, parts, tops, totals, arrived, claims, alibi,
    scale, value_scale, q_stride, head_stride, block_stride, value_stride, kv_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, MERGE: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Pieces of single queries, each with one kv head and the heads of its group. A program that is done claims the
    next free piece. ``MERGE``: who finishes a query's last piece merges them.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    own = row < GROUP
    real = own[:, None] & (dims < DIM)[None, :]
    units, programs = tl.load(num_work) * KV_HEADS, tl.num_programs(0)
    unit = tl.program_id(0)
    while unit < units:
        piece, kv_head = unit // KV_HEADS, unit % KV_HEADS
        token, split = tl.load(work + piece * 2), tl.load(work + piece * 2 + 1)
        position = tl.load(positions + token)
        pages = table + tl.load(slots + token).to(tl.int64) * max_blocks
        seen_to = tl.full([ROWS], 1, tl.int32) + position
        seen_from = tl.zeros([ROWS], tl.int32)
        start, first = split * SPLIT, 0
        if WINDOW > 0:
            oldest = tl.maximum(position - (WINDOW - 1), 0)
            seen_from += oldest
            first = oldest // SPLIT
            start = tl.maximum(start, oldest // TILE * TILE)
        end = tl.minimum(split * SPLIT + SPLIT, position + 1)
        slopes = None
        if alibi is not None:
            slopes = tl.load(alibi + kv_head * GROUP + row, mask=own, other=0.0) * LOG2E
        begin(overlap)  # this late, so that what the host copied is read while earlier kernels end
        token_q = q + token.to(tl.int64) * q_stride + kv_head * GROUP * head_stride
        queries = tl.load(token_q + row[:, None] * head_stride + dims[None, :], mask=real, other=0.0)
        keys = cache + kv_head * kv_stride
        top, total, acc = nothing(ROWS, WIDTH)
        blocks = blocks_of(pages, start, end, BLOCK, TILE)
        for at in range(start, end, TILE):
            top, total, acc = absorb(
                top, total, acc, queries, seen_from, seen_to, keys, keys + value_stride, blocks, at, end, scale,
                slopes, block_stride, DIM, BLOCK, TILE, False,
            )  # fmt: skip
            blocks = blocks_of(pages, at + TILE, end, BLOCK, TILE)
        head, count = kv_head * GROUP, position // SPLIT - first + 1
        result = out + (token.to(tl.int64) * HEADS + head) * DIM + row[:, None] * DIM + dims[None, :]
        if count == 1:
            done = acc / tl.max(total, 1)[:, None]
            if value_scale is not None:
                done = done * value_scale
            tl.store(result, done.to(out.dtype.element_ty), mask=real)
        else:
            _keep_part(parts, tops, totals, piece, head, top, total, acc, own, HEADS, DIM)
            if MERGE:
                tl.debug_barrier()  # all warps have written before one of them says so
                counter = arrived + token * KV_HEADS + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                    tl.debug_barrier()
                    sums, outs = _merge_parts(
                        parts, tops, totals, piece - (split - first), count, head, own, HEADS, DIM, WIDTH
                    )
                    done = outs / sums
                    if value_scale is not None:
                        done = done * value_scale
                    tl.store(result, done.to(out.dtype.element_ty), mask=real)
                    tl.store(counter, 0)
        unit = _claim(claims, units, programs)
    begin(overlap)  # programs without work must wait too, lest the next kernel start too early


@triton.jit(do_not_specialize=["max_blocks"])
def _prefill(
    q, cache, table, slots, positions, tiles, num_tiles, out, alibi,
    scale, value_scale, q_stride, head_stride, block_stride, value_stride, kv_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One tile of queries with one kv head a program: ``GROUP_ROWS`` rows a token, some of which may be unused."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    unit = tl.program_id(0)
    tile, kv_head = unit // KV_HEADS, unit % KV_HEADS
    live = tile < tl.load(num_tiles)
    if live:
        token, count = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
        position = tl.load(positions + token)
        pages = table + tl.load(slots + token).to(tl.int64) * max_blocks
        begin(overlap)
        row, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        nth, of_group = row // GROUP_ROWS, row % GROUP_ROWS
        head = kv_head * GROUP + of_group
        real = ((nth < count) & (of_group < GROUP))[:, None] & (dims < DIM)[None, :]
        token_row = token.to(tl.int64) + nth
        queries = tl.load(
            q + (token_row * q_stride + head * head_stride)[:, None] + dims[None, :], mask=real, other=0.0
        )

        end = position + count
        seen_to = position + nth + 1
        seen_from = tl.zeros([ROWS], tl.int32)
        start, full_from = 0, 0
        full_to = (position + 1) // TILE * TILE
        if WINDOW > 0:
            seen_from = tl.maximum(seen_to - WINDOW, 0)
            start = tl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
            full_from = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, end)
            full_to = tl.maximum(full_to, full_from)
        slopes = None
        if alibi is not None:
            slopes = tl.load(alibi + head, mask=of_group < GROUP, other=0.0) * LOG2E
        keys = cache + kv_head * kv_stride
        tops, totals, accs = nothing(ROWS, WIDTH)
        top, total, acc = nothing(ROWS, WIDTH)
        if WINDOW > 0:
            tops, totals, accs, top, total, acc = _walk(
                tops, totals, accs, top, total, acc, queries, seen_from, seen_to, keys, keys + value_stride, pages,
                start, full_from, end, scale, slopes, block_stride, DIM, BLOCK, SPLIT, TILE, False,
            )  # fmt: skip
        tops, totals, accs, top, total, acc = _walk(
            tops, totals, accs, top, total, acc, queries, seen_from, seen_to, keys, keys + value_stride, pages,
            full_from, full_to, end, scale, slopes, block_stride, DIM, BLOCK, SPLIT, TILE, True,
        )  # fmt: skip
        tops, totals, accs, top, total, acc = _walk(
            tops, totals, accs, top, total, acc, queries, seen_from, seen_to, keys, keys + value_stride, pages,
            full_to, end, end, scale, slopes, block_stride, DIM, BLOCK, SPLIT, TILE, False,
        )  # fmt: skip
        tops, totals, accs = merge(tops, totals, accs, top, total, acc)
        result = out + ((token_row * HEADS + head) * DIM)[:, None] + dims[None, :]
        done = accs / tl.max(totals, 1)[:, None]
        if value_scale is not None:
            done = done * value_scale
        tl.store(result, done.to(out.dtype.element_ty), mask=real)
    begin(overlap)


@triton.jit
def _walk(
    tops, totals, accs, top, total, acc, queries, seen_from, seen_to, keys, values, pages, start, stop, end, scale,
    slopes, block_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Absorb the tiles from ``start`` to ``stop`` and merge every split that ends among them."""
    blocks = blocks_of(pages, start, end, BLOCK, TILE)
    for at in range(start, stop, TILE):
        top, total, acc = absorb(
            top, total, acc, queries, seen_from, seen_to, keys, values, blocks, at, end, scale, slopes, block_stride,
            DIM, BLOCK, TILE, FULL,
        )  # fmt: skip
        blocks = blocks_of(pages, at + TILE, end, BLOCK, TILE)
        if (at + TILE) % SPLIT == 0:
            tops, totals, accs = merge(tops, totals, accs, top, total, acc)
            top, total, acc = nothing(acc.shape[0], acc.shape[1])
    return tops, totals, accs, top, total, acc


class Workspace:
    """What queries of several splits keep between their pieces: room for ``max_work`` pieces of ``heads`` heads of
    ``dim`` numbers, a count of the pieces done for each of ``max_tokens`` tokens and kv heads, and one of the pieces
    claimed; the counts are zero between calls.
    """

    def __init__(self, max_work: int, max_tokens: int, heads: int, dim: int, device: torch.device) -> None:
        self.parts = torch.empty(max_work, heads, dim, dtype=torch.float32, device=device)
        self.tops = torch.empty(max_work, heads, dtype=torch.float32, device=device)
        self.totals = torch.empty(max_work, heads, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_tokens, heads, dtype=torch.int32, device=device)
        self.claims = torch.zeros(1, dtype=torch.int32, device=device)


def query_tile(heads: int, kv_heads: int, config: AttentionConfig) -> int:
    """Tokens of a tile for :func:`prefill_attention`."""
    group_rows: int = triton.next_power_of_2(heads // kv_heads)
    return max(1, config.rows // group_rows)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    work: Tensor,
    num_work: Tensor,
    out: Tensor,
    workspace: Workspace,
    scale: float,
    window: int | None,
    *,
    split: int = SPLIT,
    config: AttentionConfig | None = None,
    rows: int = 0,
    alibi: Tensor | None = None,
    value_scale: float | None = None,
) -> None:
    """Attention of tokens that are the only one of their sequence in the step, written to their rows of ``out``.

    ``q`` [tokens, heads, dim] (any strides but the last), ``cache`` [blocks, 2, kv heads, block size, dim] (any strides
    but the last two), ``table`` int32 [slots, max blocks], ``slots`` and ``positions`` int32 [tokens], ``out`` [tokens,
    heads * dim]. ``work`` int32 [most pieces, 2], of which ``num_work`` [1] count, is what
    :func:`preheat.backends.cuda.work.decode_work` gives for the same ``split`` and ``window``. What the host copies for
    a step (``work``, ``num_work``, ``slots``, ``positions``) is read before earlier kernels end: no kernel may write
    it. The grid is persistent, of a program for every kv head of ``rows`` at least: a grid for all the work that there
    can be would mostly start programs that have nothing to do. ``alibi`` fp32 [heads] are slopes. ``cache`` may be of
    eight bits: ``scale`` then includes its keys' scale, and ``value_scale`` multiplies what comes out.
    """
    heads, dim = q.shape[1:]
    kv_heads, block = cache.shape[2:4]
    units = len(work) * kv_heads
    config = config or decode_config(rows, dim, q.dtype)
    group_rows = triton.next_power_of_2(heads // kv_heads)
    programs = min(units, max(config.programs * processors(q.device), rows * kv_heads)) if config.programs else units
    _decode[(programs,)](
        q, cache, table, slots, positions, work, num_work, out,
        workspace.parts, workspace.tops, workspace.totals, workspace.arrived, workspace.claims, alibi,
        scale * LOG2_E, value_scale, *q.stride()[:2], *cache.stride()[:3], table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=triton.next_power_of_2(dim),
        ROWS=max(config.rows, group_rows),
        BLOCK=block, SPLIT=split, TILE=TILE, WINDOW=window or 0, MERGE=True,
        **options(num_warps=max(config.warps, group_rows // 16), num_stages=config.stages),
    )  # fmt: skip


def prefill_attention(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
    *,
    split: int = SPLIT,
    config: AttentionConfig | None = None,
    alibi: Tensor | None = None,
    value_scale: float | None = None,
) -> None:
    """Attention of runs of tokens, whose keys are in the cache, written to their rows of ``out``.

    ``tiles`` int32 [most tiles, 2], of which ``num_tiles`` [1] count, is what
    :func:`preheat.backends.cuda.work.prefill_tiles` gives for tiles of :func:`query_tile` tokens; the rest as in
    :func:`decode_attention`. Where Hopper's kernel fits, it runs unless ``config`` is given, and gives the same bits.
    """
    if config is None and alibi is None and hopper.fits(q, cache):
        hopper.prefill_attention(
            q, cache, table, slots, positions, tiles, num_tiles, out, scale * LOG2_E, window, split
        )  # fmt: skip
        return
    heads, dim = q.shape[1:]
    kv_heads, block = cache.shape[2:4]
    config = config or prefill_config(dim, q.dtype)
    group_rows = triton.next_power_of_2(heads // kv_heads)
    _prefill[(len(tiles) * kv_heads,)](
        q, cache, table, slots, positions, tiles, num_tiles, out, alibi,
        scale * LOG2_E, value_scale, *q.stride()[:2], *cache.stride()[:3], table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=triton.next_power_of_2(dim),
        ROWS=max(config.rows, group_rows), GROUP_ROWS=group_rows,
        BLOCK=block, SPLIT=split, TILE=TILE, WINDOW=window or 0,
        **options(num_warps=config.warps, num_stages=config.stages),
    )  # fmt: skip
