"""Paged attention on CUDA, causal or of both sides.

Contract. Keys are cut into splits at absolute multiples of :data:`preheat.backends.cuda.attention.work.SPLIT`, splits
into tiles of ``TILE`` keys. Inside a split, one online softmax over its tiles in rising order, from (maximum, sum,
output) = (-inf, 0, 0), all fp32: s = q . k; top = max(maximum, max(s) * scale); p = exp2(fma(s, scale, -top)), rounded
to the dtype; fade = exp2(maximum - top); sum = sum * fade + p . 1 and output = output * fade + p . v, both through the
matrix unit. Across the splits of a query, in rising order and from (-inf, 0, 0) again: both sides are scaled to the
greater maximum, then added with one fma. At the end output / sum, rounded once. ``scale`` includes log2(e).

A cache of eight bits is widened to the queries' dtype, exactly, as tiles are loaded. ``scale`` then includes the scale
of the keys, and output / sum is multiplied by the scale of the values before it is rounded.

With ALiBi, s = fma(q . k, scale, slope * log2(e) * (key - query)), the bias in fp32, takes the place of s * scale in
both the maximum and the exponent.

With a sink, a score without a key, one step follows the last split. The maximum becomes the greater of the maximum and
sink * log2(e), sum and output are scaled to it, and exp2(sink * log2(e) - maximum) is added to the sum with one fma.

Products and sums are rounded one by one where no fma is named. Kernels are compiled without the compiler's own fusion
(`enable_fp_fusion`), since it fuses within a block of code, and kernels have other blocks.

If queries see both sides, a query sees the keys of its whole run, also behind it, in the same splits and tiles.

A tile without a key seen by the query leaves the query's three numbers as they are, and so does such a split. Hence the
bits of a query depend on its position and its keys and values alone. They never depend on the kernel, tiles, warps,
other rows of the batch, the blocks or the sequence's steps. Sums of a row go through the matrix unit because the order
of an ordinary reduction follows the layout of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.attention import hopper, hopper_decode
from preheat.backends.cuda.attention.tile import absorb, add_sink, blocks_of, claim, merge, nothing
from preheat.backends.cuda.attention.values import ANY_ROWS, LOG2_E, Pieces, Places, Rows, Scores, Workspace
from preheat.backends.cuda.attention.work import BEHIND, MOST_SPLITS, WHOLE_CONTEXT
from preheat.backends.cuda.device.card import PORTABLE, Card
from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.device.launch import begin, options, processors
from preheat.backends.cuda.device.sizes import next_power_of_2

TILE = 64
"""Keys of a tile. Part of the contract."""

LOG2E: tl.constexpr = tl.constexpr(LOG2_E)
SPLITS, WHOLE = tl.constexpr(MOST_SPLITS), tl.constexpr(WHOLE_CONTEXT)
OTHERS = tl.constexpr(BEHIND)


@dataclass(frozen=True)
class AttentionConfig:
    """Layout of a kernel; no field changes bits.

    ``rows`` are the query rows of a program, ``warps`` its warps, and ``stages`` the tiles of keys loaded ahead.
    ``programs`` is the least number of programs of a persistent grid for each multiprocessor; 0: one for each piece.
    """

    rows: int
    warps: int
    stages: int
    programs: int = 0


WIDE_HEADS = 100_000
"""Least room in shared memory for two stages of heads of 256."""


MANY = 64
"""Least rows of a step for programs of two warps; rows then give all of the device enough work."""


NARROW_BYTES = 128
"""Most bytes of a head whose tiles have work for one warp only: twice as many programs then fit."""


MANY_NARROW = 16
"""As ``MANY``, with a cache of eight bits."""


WIDEST_HEADS = 150_000
"""As ``WIDE_HEADS``, for two stages of heads of 512, or three of 256."""


FEW = 16
"""Below so many rows there is room for more stages of wide heads."""


def decode_config(
    rows: int, dim: int, dtype: torch.dtype, stored: torch.dtype, card: Card = PORTABLE
) -> AttentionConfig:
    """Return the layout for decoding ``rows`` rows with heads of ``dim`` numbers on ``card``.

    The cache has the dtype ``stored``. Measured on an H200 (benchmarks/attention.py), heads above 128 on an H100.
    """
    large = card.room >= WIDEST_HEADS and dtype.itemsize == 2
    if dim * dtype.itemsize > 512:
        return AttentionConfig(rows=16, warps=8, stages=2 if large and dim <= 512 else 1, programs=2)
    if dim * dtype.itemsize > 256:
        return AttentionConfig(rows=16, warps=4, stages=3 if large and rows < FEW else 2, programs=6)
    if stored.itemsize == 1:
        return AttentionConfig(rows=16, warps=2 if rows >= MANY_NARROW else 4, stages=3, programs=6)
    if rows < MANY:
        return AttentionConfig(rows=16, warps=4, stages=3, programs=6)
    if dim * dtype.itemsize <= NARROW_BYTES:
        return AttentionConfig(rows=16, warps=1, stages=2, programs=12)
    return AttentionConfig(rows=16, warps=2, stages=2, programs=6)


def verify_rows(heads: int, kv_heads: int, width: int, dim: int, dtype: torch.dtype) -> int:
    """Return the query rows of a :func:`decode_attention` program for rows of ``width`` tokens.

    The number covers all tokens of a row, up to the limit set by registers.
    """
    group_rows = next_power_of_2(heads // kv_heads)
    most = 16 if dtype == torch.float32 or dim > 256 else 64 if dim <= 128 else 32
    wanted = next_power_of_2(width * group_rows)
    return max(min(wanted, most), 16, group_rows)


def verify_queries(heads: int, kv_heads: int, width: int, dim: int, dtype: torch.dtype) -> int:
    """Return the tokens of a :func:`decode_attention` tile for rows of ``width`` tokens."""
    group_rows = next_power_of_2(heads // kv_heads)
    queries: int = verify_rows(heads, kv_heads, width, dim, dtype) // group_rows
    return queries


def prefill_config(dim: int, dtype: torch.dtype, card: Card = PORTABLE) -> AttentionConfig:
    """Return the layout of prefill for heads of ``dim`` numbers on ``card``.

    Two outputs of all rows must fit into registers. Two stages of keys and values of wide heads need more shared memory
    than small cards have.
    """
    if dtype == torch.float32:
        return AttentionConfig(rows=16, warps=4, stages=2)
    if dim <= 128:
        return AttentionConfig(rows=128, warps=8, stages=3)
    if dim > 256:
        return AttentionConfig(rows=16, warps=8, stages=1)
    return AttentionConfig(rows=64, warps=8, stages=2 if card.room >= WIDE_HEADS else 1)


@triton.jit
def _keep_part(parts, tops, totals, at, top, total, acc, own, DIM: tl.constexpr):
    """Write one split of the rows in ``own`` to the places ``at``, int64 [rows]."""
    dims = tl.arange(0, acc.shape[1])
    tl.store(tops + at, top, mask=own)
    tl.store(totals + at, tl.max(total, 1), mask=own)  # all columns are equal
    tl.store(parts + at[:, None] * DIM + dims[None, :], acc, mask=own[:, None] & (dims < DIM)[None, :])


@triton.jit
def _merge_parts(
    parts, tops, totals, at, step, count, own, DIM: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr = 4,
    first=0,
):  # fmt: skip
    """Merge ``count`` splits of the rows in ``own``; return their maxima, sums and outputs.

    The splits begin at the places ``at`` and lie ``step`` apart. ``WIDTH`` outputs are merged, from ``first`` on.
    """
    ROWS: tl.constexpr = own.shape[0]
    dims = first + tl.arange(0, WIDTH)
    real = own[:, None] & (dims < DIM)[None, :]
    top, acc = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    for _ in tl.range(0, count, num_stages=STAGES):
        one_top = tl.load(tops + at, mask=own, other=0.0, cache_modifier=".cg")
        one_total = tl.load(totals + at, mask=own, other=1.0, cache_modifier=".cg")
        one = tl.load(parts + at[:, None] * DIM + dims[None, :], mask=real, other=0.0, cache_modifier=".cg")
        top, total, acc = merge(top, total, acc, one_top, one_total[:, None], one)
        at += step
    return top, total, acc


@triton.jit(do_not_specialize=["max_blocks"])
def _decode(
    q, cache, table, slots, positions, work, num_work, out, parts, tops, totals, arrived, claims, alibi, sinks,
    scale, value_scale, q_stride, head_stride, block_stride, value_stride, kv_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    VERIFY: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Attend with tiles of up to ``QUERIES`` consecutive queries of a sequence, piece by piece.

    A unit is a piece with one kv head and the heads of its group. A program that is done claims the next free unit; the
    program that finishes a tile's last piece merges the tile. Without ``VERIFY`` a tile is one query. With ``VERIFY``,
    a piece may be the whole context of a tile.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    GROUP_ROWS: tl.constexpr = ROWS // QUERIES
    row, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    nth, of_group = row // GROUP_ROWS, row % GROUP_ROWS
    units, programs = tl.load(num_work) * KV_HEADS, tl.num_programs(0)
    unit = tl.program_id(0)
    while unit < units:
        piece, kv_head = unit // KV_HEADS, unit % KV_HEADS
        token, split = tl.load(work + piece * 2), tl.load(work + piece * 2 + 1)
        own, beyond = of_group < GROUP, 0
        if VERIFY:
            beyond, split = split // SPLITS, split % SPLITS
            own &= nth <= beyond
        real = own[:, None] & (dims < DIM)[None, :]
        position = tl.load(positions + token)
        pages = table + tl.load(slots + token).to(tl.int64) * max_blocks
        seen_to = tl.full([ROWS], 1, tl.int32) + position
        if VERIFY:
            seen_to += nth
        seen_from = tl.zeros([ROWS], tl.int32)
        start, first, last = split * SPLIT, 0, position + beyond
        end = tl.minimum(start + SPLIT, last + 1)
        if VERIFY:
            start, end = tl.where(split == WHOLE, 0, start), tl.where(split == WHOLE, last + 1, end)
        if WINDOW > 0:
            oldest = tl.maximum(position - (WINDOW - 1), 0)
            seen_from = tl.maximum(seen_to - WINDOW, 0)
            first = oldest // SPLIT
            start = tl.maximum(start, oldest // TILE * TILE)
        slopes = None
        if alibi is not None:
            slopes = tl.load(alibi + kv_head * GROUP + of_group, mask=own, other=0.0) * LOG2E
        if sinks is not None:
            lasts = tl.load(sinks + kv_head * GROUP + of_group, mask=own, other=0.0) * LOG2E
        begin(overlap)  # late, so that the host's copies are read while earlier kernels end
        head = kv_head * GROUP + of_group
        token_row = tl.full([ROWS], 0, tl.int64) + token
        if VERIFY:
            token_row += nth
        queries = tl.load(
            q + (token_row * q_stride + head * head_stride)[:, None] + dims[None, :], mask=real, other=0.0
        )
        keys = cache + kv_head * kv_stride
        top, total, acc = nothing(ROWS, WIDTH)
        if VERIFY:
            all_top, all_total, all_acc = nothing(ROWS, WIDTH)
        blocks = blocks_of(pages, start, end, BLOCK, TILE)
        for at in range(start, end, TILE):
            top, total, acc = absorb(
                top, total, acc, queries, seen_from, seen_to, keys, keys + value_stride, blocks, at, end, scale,
                slopes, block_stride, DIM, BLOCK, TILE, False,
            )  # fmt: skip
            blocks = blocks_of(pages, at + TILE, end, BLOCK, TILE)
            if VERIFY:  # noqa: SIM102  (known when the kernel is compiled, the other when it runs)
                if ((at + TILE) % SPLIT == 0) & (at + TILE < end):
                    all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, total, acc)
                    top, total, acc = nothing(ROWS, WIDTH)
        count = last // SPLIT - first + 1
        if VERIFY:
            count = tl.where(split == WHOLE, 1, count)
        result = out + ((token_row * HEADS + head) * DIM)[:, None] + dims[None, :]
        if count == 1:
            if VERIFY:
                all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, total, acc)
                if sinks is not None:
                    all_total, all_acc = add_sink(all_top, all_total, all_acc, lasts)
                done = all_acc / tl.max(all_total, 1)[:, None]
            else:
                if sinks is not None:
                    total, acc = add_sink(top, total, acc, lasts)
                done = acc / tl.max(total, 1)[:, None]
            if value_scale is not None:
                done = done * value_scale
            tl.store(result, done.to(out.dtype.element_ty), mask=real)
        else:
            place = (tl.cast(piece, tl.int64) * QUERIES + nth) * HEADS + head
            _keep_part(parts, tops, totals, place, top, total, acc, own, DIM)
            tl.debug_barrier()  # all warps have written before one of them counts the piece
            counter = arrived + token * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.debug_barrier()
                place -= tl.cast(split - first, tl.int64) * (QUERIES * HEADS)
                peaks, sums, outs = _merge_parts(parts, tops, totals, place, QUERIES * HEADS, count, own, DIM, WIDTH)
                if sinks is not None:
                    sums, outs = add_sink(peaks, sums, outs, lasts)
                done = outs / sums
                if value_scale is not None:
                    done = done * value_scale
                tl.store(result, done.to(out.dtype.element_ty), mask=real)
                tl.store(counter, 0)
        unit = claim(claims, units, programs)
    begin(overlap)  # programs without work must wait too, lest the next kernel start too early


@triton.jit(do_not_specialize=["max_blocks"])
def _prefill(
    q, cache, table, slots, positions, tiles, num_tiles, out, alibi, sinks,
    scale, value_scale, q_stride, head_stride, block_stride, value_stride, kv_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SIDES: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries and one kv head a program.

    A token has ``GROUP_ROWS`` rows, and some of them may be unused. With ``SIDES`` a query sees its whole run.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    unit = tl.program_id(0)
    tile, kv_head = unit // KV_HEADS, unit % KV_HEADS
    live = tile < tl.load(num_tiles)
    if live:
        token, count = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
        behind = 0
        if SIDES:
            behind, count = count // OTHERS, count % OTHERS
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

        own = position + count
        end = own + behind
        seen_to = position + nth + 1
        seen_from = tl.zeros([ROWS], tl.int32)
        start, full_from = 0, 0
        full_to = (position + 1) // TILE * TILE
        if WINDOW > 0:
            seen_from = tl.maximum(seen_to - WINDOW, 0)
            start = tl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
        if SIDES:
            ahead = end
            if WINDOW > 0:
                ahead = tl.minimum(position + WINDOW, end)
                seen_to = tl.minimum(seen_to + (WINDOW - 1), end)
                end = tl.minimum(own + (WINDOW - 1), end)
            else:
                seen_to = tl.zeros([ROWS], tl.int32) + end
            full_to = ahead // TILE * TILE  # behind all keys that the first query sees
        if WINDOW > 0:
            full_from = tl.minimum(tl.cdiv(tl.maximum(own - WINDOW, 0), TILE) * TILE, end)
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
        if sinks is not None:
            lasts = tl.load(sinks + head, mask=of_group < GROUP, other=0.0) * LOG2E
            totals, accs = add_sink(tops, totals, accs, lasts)
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


def query_tile(heads: int, kv_heads: int, config: AttentionConfig) -> int:
    """Return the tokens of a tile for :func:`prefill_attention`."""
    group_rows = next_power_of_2(heads // kv_heads)
    return max(1, config.rows // group_rows)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    places: Places,
    pieces: Pieces,
    workspace: Workspace,
    scores: Scores,
    rows: Rows = ANY_ROWS,
    *,
    config: AttentionConfig | None = None,
) -> None:
    """Attention of decoding rows: one token each, or up to ``rows.width`` consecutive tokens.

    The result goes to the tokens' rows of ``out``. ``q`` [tokens, heads, dim] (any strides but the last), ``cache``
    [blocks, 2, kv heads, block size, dim] (any strides but the last two), ``out`` [tokens, heads * dim].

    ``pieces`` come from :func:`preheat.backends.cuda.attention.work.decode_work` for the split and the window of
    ``scores``. Where rows are longer than one token, its tiles have :func:`verify_queries` tokens.

    The grid is persistent and has at least one program for each kv head of ``rows.most`` rows. A grid for the largest
    possible work would mostly start programs without any.

    Where Hopper's kernel fits, it runs unless ``config`` is given, and gives the same bits.
    """
    if config is None and hopper_decode.fits(q, cache, rows, scores):
        hopper_decode.decode_attention(q, cache, out, places, pieces, workspace, scores)
        return
    heads, dim = q.shape[1:]
    kv_heads, block = cache.shape[2:4]
    work, width, window = pieces.work, rows.width, scores.window
    units = len(work) * kv_heads
    config = config or decode_config(rows.most, dim, q.dtype, cache.dtype, card_at(q.device))
    query_rows, queries, warps = max(config.rows, next_power_of_2(heads // kv_heads)), 1, config.warps
    if width > 1:
        query_rows, warps = verify_rows(heads, kv_heads, width, dim, q.dtype), max(warps, 4)
        queries = verify_queries(heads, kv_heads, width, dim, q.dtype)
    tiles = rows.most * -(-width // queries)
    programs = min(units, max(config.programs * processors(q.device), tiles * kv_heads)) if config.programs else units
    _decode[(programs,)](
        q, cache, places.table, places.slots, places.positions, work, pieces.used, out,
        workspace.parts, workspace.tops, workspace.totals, workspace.arrived, workspace.claims,
        scores.alibi, scores.sinks, scores.scale * LOG2_E, scores.value_scale,
        *q.stride()[:2], *cache.stride()[:3], places.table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=next_power_of_2(dim), ROWS=query_rows, QUERIES=queries,
        BLOCK=block, SPLIT=scores.split, TILE=TILE, WINDOW=window or 0, VERIFY=width > 1,
        enable_fp_fusion=False, **options(num_warps=max(warps, query_rows // 16), num_stages=config.stages),
    )  # fmt: skip


def prefill_attention(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    places: Places,
    pieces: Pieces,
    scores: Scores,
    *,
    config: AttentionConfig | None = None,
    sides: bool = False,
) -> None:
    """Attention of runs of tokens with their keys already in the cache.

    The result goes to the tokens' rows of ``out``. ``pieces`` are tiles of :func:`query_tile` tokens from
    :func:`preheat.backends.cuda.attention.work.prefill_tiles`, for the same ``sides``: whether a token sees the whole
    run, without ALiBi. :func:`decode_attention` describes the other arguments. Where Hopper's kernel fits, it runs
    unless ``config`` is given, and gives the same bits.
    """
    assert not sides or scores.alibi is None, "slopes count distances backwards alone"
    if config is None and scores.alibi is None and not sides and hopper.fits(q, cache):
        hopper.prefill_attention(q, cache, out, places, pieces, scores)
        return
    heads, dim = q.shape[1:]
    kv_heads, block = cache.shape[2:4]
    config = config or prefill_config(dim, q.dtype, card_at(q.device))
    group_rows = next_power_of_2(heads // kv_heads)
    _prefill[(len(pieces.work) * kv_heads,)](
        q, cache, places.table, places.slots, places.positions, pieces.work, pieces.used, out,
        scores.alibi, scores.sinks, scores.scale * LOG2_E, scores.value_scale,
        *q.stride()[:2], *cache.stride()[:3], places.table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=next_power_of_2(dim),
        ROWS=max(config.rows, group_rows), GROUP_ROWS=group_rows,
        BLOCK=block, SPLIT=scores.split, TILE=TILE, WINDOW=scores.window or 0, SIDES=sides,
        enable_fp_fusion=False, **options(num_warps=config.warps, num_stages=config.stages),
    )  # fmt: skip
