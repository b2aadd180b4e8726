"""Paged attention over latent vectors (MLA) on CUDA, causal, for prompts and for decoding rows.

Contract. It is the contract of :mod:`preheat.backends.cuda.attention.paged`, with tiles of :func:`tile_keys` keys. All
heads read one entry of a token: its latent vector, then its turned numbers. A score is one sum: products with the
latent vector from (0, fp32) on, then products with the turned numbers, both through the matrix unit. The latent vector
is the value too. A cached latent vector is finite (:mod:`preheat.backends.cuda.attention.latent_rotary`), so an entry
that a query does not see never reaches its output.

A program has ``ROWS`` rows, a row for each token and head of its tile, one behind the other. Products of up to 32 rows
use one instruction on every card, and rows do not meet. So the bits of a row do not depend on the rows beside it, on
the tile, or on whether the tile is a prompt's or decodes. :mod:`preheat.backends.cuda.attention.latent_few` gives few
decoding rows the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.attention.paged import SPLITS, WHOLE, AttentionConfig, _merge_parts
from preheat.backends.cuda.attention.shape import TOKENS, query_tokens
from preheat.backends.cuda.attention.tile import blocks_of, claim, key_offsets, merge, nothing, weigh
from preheat.backends.cuda.attention.values import ANY_ROWS, LOG2_E, Latents, Pieces, Places, Rows, Workspace
from preheat.backends.cuda.device.card import Card
from preheat.backends.cuda.device.detect import card_at
from preheat.backends.cuda.device.launch import begin, options, processors
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2

DECODE, VERIFY, PROMPT = 0, 1, 2
ONE_TOKEN, DRAFTS, RUNS = tl.constexpr(DECODE), tl.constexpr(VERIFY), tl.constexpr(PROMPT)


def tile_keys(dtype: torch.dtype) -> int:
    """Return the keys of a tile. Part of the contract."""
    return 16 if dtype == torch.float32 else 32


WALKING = 64
"""The most rows of a multiprocessor's programs that walk whole contexts."""


def least_work(heads: int, device: torch.device) -> int:
    """Return the pieces of a workspace that has rows for every program that walks a whole context."""
    return -(-WALKING * processors(device) // heads)


TWO_STAGES = 114_000
"""Least room in shared memory for 32 rows of queries and two stages of entries."""


def latent_config(heads: int, queries: int, dtype: torch.dtype, card: Card) -> AttentionConfig:
    """Return the layout for tiles of ``queries`` tokens on ``card``.

    A program of 16 rows leaves registers and shared memory to another one, and so a decoding row of 20 heads is two
    units. Measured on an H100.
    """
    if dtype == torch.float32:
        return AttentionConfig(rows=16, warps=4 if heads * queries <= 16 else 8, stages=2, programs=2)
    few = heads * queries <= 16 or (queries == 1 and heads <= 32)
    stages = 3 if card.room >= TWO_STAGES else 2  # the compiler keeps one stage fewer in memory
    return AttentionConfig(rows=16 if few else 32, warps=4, stages=stages, programs=2)


@triton.jit
def _absorb(
    top, total, left, right, q_left, q_right, q_turned, seen_to, entries, blocks, start, end, scale, block_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add one tile of entries to the online softmax; ``left`` and ``right`` are halves of the output."""
    HALF: tl.constexpr = left.shape[1]
    at = start + tl.arange(0, TILE)
    dims, rest = tl.arange(0, HALF)[None, :], tl.arange(0, q_turned.shape[1])[None, :]
    lies = entries + key_offsets(blocks, start, block_stride, RANK + ROPE, BLOCK, TILE)[:, None]
    known = (at < end)[:, None]
    one = tl.load(lies + dims, mask=known & (dims < RANK), other=0.0)
    other = tl.load(lies + HALF + dims, mask=known & (dims < RANK - HALF), other=0.0)
    turned = tl.load(lies + RANK + rest, mask=known & (rest < ROPE), other=0.0)
    s = tl.dot(q_left, tl.trans(one), input_precision="ieee")
    s = tl.dot(q_right, tl.trans(other), s, input_precision="ieee")
    s = tl.dot(q_turned, tl.trans(turned), s, input_precision="ieee")
    new_top, p, fade = weigh(tl.where(at[None, :] < seen_to[:, None], s, -float("inf")), top, scale, q_left.dtype)
    ones = tl.full([TILE, 16], 1.0, tl.float32).to(q_left.dtype)
    total = tl.dot(p, ones, total * fade, input_precision="ieee")
    left = tl.dot(p, one, left * fade, input_precision="ieee")
    right = tl.dot(p, other, right * fade, input_precision="ieee")
    return new_top, total, left, right


@triton.jit
def _empty(ROWS: tl.constexpr, HALF: tl.constexpr):
    """Return the maximum, sums and halves of the output of an empty softmax."""
    top, total, left = nothing(ROWS, HALF)
    return top, total, left, tl.zeros([ROWS, HALF], tl.float32)


@triton.jit
def _with_earlier(parts, tops, totals, at, top, total, left, right, RANK: tl.constexpr):
    """Merge the next split of rows into their splits so far at ``at``."""
    HALF: tl.constexpr = left.shape[1]
    dims = tl.arange(0, HALF)[None, :]
    early_top, early_total = tl.load(tops + at), tl.load(totals + at)[:, None]
    rows = parts + at[:, None] * RANK + dims
    early = tl.load(rows, mask=dims < RANK, other=0.0)
    _, _, left = merge(early_top, early_total, early, top, total, left)
    early = tl.load(rows + HALF, mask=dims < RANK - HALF, other=0.0)
    top, total, right = merge(early_top, early_total, early, top, total, right)
    return top, total, left, right


@triton.jit
def _keep(parts, tops, totals, at, own, top, total, left, right, RANK: tl.constexpr):
    """Write splits of the rows in ``own`` to the places ``at``, int64 [rows]."""
    HALF: tl.constexpr = left.shape[1]
    dims = tl.arange(0, HALF)[None, :]
    rows = parts + at[:, None] * RANK + dims
    tl.store(tops + at, top, mask=own)
    tl.store(totals + at, tl.max(total, 1), mask=own)  # all columns are equal
    tl.store(rows, left, mask=own[:, None] & (dims < RANK))
    tl.store(rows + HALF, right, mask=own[:, None] & (dims < RANK - HALF))


@triton.jit(do_not_specialize=["max_blocks"])
def _attend(
    q, cache, table, slots, positions, work, num_work, out, parts, tops, totals, arrived, claims,
    scale, q_stride, head_stride, block_stride, max_blocks,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    MODE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Attend with tiles of up to ``QUERIES`` consecutive queries of a sequence, piece by piece.

    A unit is a piece with ``ROWS`` of the tile's rows. Pieces and merges are as in
    :func:`preheat.backends.cuda.attention.paged.decode_attention`; a prompt's tile is one piece. A program that walks
    a whole context keeps the splits so far in its own rows of ``parts``: registers hold one split.
    """
    CHUNKS: tl.constexpr = (QUERIES * HEADS + ROWS - 1) // ROWS
    dims, rest = tl.arange(0, HALF)[None, :], tl.arange(0, ROPE_WIDTH)[None, :]
    units, programs = tl.load(num_work) * CHUNKS, tl.num_programs(0)
    unit = tl.program_id(0)
    mine = tl.cast(unit, tl.int64) * ROWS + tl.arange(0, ROWS)
    while unit < units:
        piece, chunk = unit // CHUNKS, unit % CHUNKS
        token, split = tl.load(work + piece * 2), tl.load(work + piece * 2 + 1)
        beyond = 0
        if MODE == RUNS:
            beyond, split = split - 1, split * 0 + WHOLE
        elif MODE == DRAFTS:
            beyond, split = split // SPLITS, split % SPLITS
        row = chunk * ROWS + tl.arange(0, ROWS)
        nth, head = row // HEADS, row % HEADS
        own = nth <= beyond
        if chunk * ROWS < (beyond + 1) * HEADS:
            position = tl.load(positions + token)
            pages = table + tl.load(slots + token).to(tl.int64) * max_blocks
            seen_to = position + nth + 1
            start, count = split * SPLIT, (position + beyond) // SPLIT + 1
            end = tl.minimum(start + SPLIT, position + beyond + 1)
            if MODE != ONE_TOKEN:
                last = tl.minimum((chunk * ROWS + (ROWS - 1)) // HEADS, beyond)  # the last token of these rows
                start = tl.where(split == WHOLE, 0, start)
                end = tl.where(split == WHOLE, position + last + 1, end)
                count = tl.where(split == WHOLE, 1, count)
            begin(overlap)  # late, so that the host's copies are read while earlier kernels end
            token_row = tl.cast(token, tl.int64) + nth
            query = q + (token_row * q_stride + head * head_stride)[:, None]
            q_left = tl.load(query + dims, mask=own[:, None] & (dims < RANK), other=0.0)
            q_right = tl.load(query + HALF + dims, mask=own[:, None] & (dims < RANK - HALF), other=0.0)
            q_turned = tl.load(query + RANK + rest, mask=own[:, None] & (rest < ROPE), other=0.0)
            top, total, left, right = _empty(ROWS, HALF)
            for begins in range(start, end, SPLIT):
                ends = tl.minimum(begins + SPLIT, end)
                top, total, left, right = _empty(ROWS, HALF)
                blocks = blocks_of(pages, begins, ends, BLOCK, TILE)
                for at in range(begins, ends, TILE):
                    top, total, left, right = _absorb(
                        top, total, left, right, q_left, q_right, q_turned, seen_to, cache, blocks, at, ends, scale,
                        block_stride, RANK, ROPE, BLOCK, TILE,
                    )  # fmt: skip
                    blocks = blocks_of(pages, at + TILE, ends, BLOCK, TILE)
                if MODE != ONE_TOKEN:
                    if begins > start:
                        top, total, left, right = _with_earlier(
                            parts, tops, totals, mine, top, total, left, right, RANK
                        )  # fmt: skip
                        tl.debug_barrier()  # all warps have read before one of them writes
                    if ends < end:
                        _keep(parts, tops, totals, mine, own, top, total, left, right, RANK)
                        tl.debug_barrier()  # all warps have written
            result = out + ((token_row * HEADS + head) * (RANK + ROPE))[:, None] + dims
            real, real_right = own[:, None] & (dims < RANK), own[:, None] & (dims < RANK - HALF)
            if count == 1:
                sums = tl.max(total, 1)[:, None]
                tl.store(result, (left / sums).to(out.dtype.element_ty), mask=real)
                tl.store(result + HALF, (right / sums).to(out.dtype.element_ty), mask=real_right)
            else:
                place = (tl.cast(piece, tl.int64) * QUERIES + nth) * HEADS + head
                _keep(parts, tops, totals, place, own, top, total, left, right, RANK)
                tl.debug_barrier()  # all warps have written before one of them counts the piece
                counter = arrived + token * HEADS + chunk
                if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                    tl.debug_barrier()
                    place -= tl.cast(split, tl.int64) * (QUERIES * HEADS)
                    _, sums, outs = _merge_parts(
                        parts, tops, totals, place, QUERIES * HEADS, count, own, RANK, HALF, 1
                    )  # fmt: skip
                    tl.store(result, (outs / sums).to(out.dtype.element_ty), mask=real)
                    _, sums, outs = _merge_parts(
                        parts, tops, totals, place, QUERIES * HEADS, count, own, RANK, HALF, 1, HALF
                    )  # fmt: skip
                    tl.store(result + HALF, (outs / sums).to(out.dtype.element_ty), mask=real_right)
                    tl.store(counter, 0)
        unit = claim(claims, units, programs)
    begin(overlap)  # programs without work must wait too, lest the next kernel start too early


def latent_attention(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    places: Places,
    pieces: Pieces,
    workspace: Workspace,
    latents: Latents,
    rows: Rows = ANY_ROWS,
    *,
    mode: int,
    config: AttentionConfig | None = None,
) -> None:
    """Attention over latent vectors; the result goes to the tokens' rows of ``out``.

    ``q`` [tokens, heads, entry] (any strides but the last), ``cache`` [blocks, 1, 1, block size, entry] (any stride of
    blocks), ``out`` [tokens, heads * entry]; the turned numbers of ``out`` are not written. ``pieces`` are as in
    :func:`preheat.backends.cuda.attention.paged.decode_attention`: of one token each in the mode ``DECODE``, of tiles
    of :func:`query_tokens` tokens for ``rows`` in ``VERIFY``. In ``PROMPT`` they are tiles of up to ``TOKENS`` tokens,
    from :func:`preheat.backends.cuda.attention.work.prefill_tiles`.
    """
    heads, entry, block = q.shape[1], q.shape[2], cache.shape[3]
    work, rank, table = pieces.work, latents.rank, places.table
    queries = TOKENS if mode == PROMPT else query_tokens(rows.width)
    config = config or latent_config(heads, queries, q.dtype, card_at(q.device))
    chunks = cdiv(queries * heads, config.rows)
    tiles = rows.most * -(-rows.width // queries)
    programs = min(len(work) * chunks, max(config.programs * processors(q.device), tiles * chunks))
    if mode != DECODE:
        programs = min(programs, workspace.tops.numel() // config.rows)  # each may keep splits
    _attend[(programs,)](
        q, cache, table, places.slots, places.positions, work, pieces.used, out,
        workspace.parts, workspace.tops, workspace.totals, workspace.arrived, workspace.claims,
        latents.scale * LOG2_E, *q.stride()[:2], cache.stride(0), table.stride(0),
        HEADS=heads, RANK=rank, ROPE=entry - rank, HALF=max(next_power_of_2(rank) // 2, 16),
        ROPE_WIDTH=max(next_power_of_2(entry - rank), 16), ROWS=config.rows, QUERIES=queries,
        BLOCK=block, SPLIT=latents.split, TILE=tile_keys(q.dtype), MODE=mode,
        enable_fp_fusion=False, **options(num_warps=config.warps, num_stages=config.stages),
    )  # fmt: skip
