"""Paged attention over latent vectors (MLA) on CUDA, causal, for prompts and for decoding rows.

Contract. It is the contract of :mod:`preheat.backends.cuda.paged_attention`, with tiles of :func:`tile_keys` keys. All
heads read one entry of a token: its latent vector, then its turned numbers. A score is one sum: products with the
latent vector from (0, fp32) on, then products with the turned numbers, both through the matrix unit. The latent vector
is the value too. A cached latent vector is finite (:mod:`preheat.backends.cuda.latent_rotary`), so an entry that a
query does not see never reaches its output.

A program has ``ROWS`` rows, a row for each token and head of its tile, one behind the other. Products of up to 32 rows
use one instruction on every card, and rows do not meet. So the bits of a row do not depend on the rows beside it, on
the tile, or on whether the tile is a prompt's or decodes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.attention_tile import blocks_of, key_offsets, merge, nothing
from preheat.backends.cuda.attention_values import ANY_ROWS, LOG2_E, Latents, Pieces, Places, Rows
from preheat.backends.cuda.card import PORTABLE, Card
from preheat.backends.cuda.device import card_at
from preheat.backends.cuda.launch import begin, options, processors
from preheat.backends.cuda.paged_attention import (
    SPLITS,
    WHOLE,
    AttentionConfig,
    Workspace,
    _claim,
    _keep_part,
    _merge_parts,
)

TOKENS = 8
"""The most tokens of a tile. Eight times the heads of most models fill whole programs."""

ROOMY = 150_000
"""Room in shared memory for three stages of a single token."""

DECODE, VERIFY, PROMPT = 0, 1, 2
ONE_TOKEN, DRAFTS, RUNS = tl.constexpr(DECODE), tl.constexpr(VERIFY), tl.constexpr(PROMPT)


def tile_keys(dtype: torch.dtype) -> int:
    """Return the keys of a tile. Part of the contract."""
    return 16 if dtype == torch.float32 else 32


def query_tokens(width: int) -> int:
    """Return the tokens of a tile of rows of up to ``width`` tokens."""
    return min(width, TOKENS)


def latent_config(rows: int, dtype: torch.dtype, *, single: bool = False, card: Card = PORTABLE) -> AttentionConfig:
    """Return the layout for tiles of ``rows`` rows; two stages fit small cards, and need less memory than one.

    A ``single`` token's steps follow each other: programs of 16 rows take them in half of the time, on an H100.
    """
    if single and dtype != torch.float32 and card.room >= ROOMY:
        return AttentionConfig(rows=16, warps=4, stages=3, programs=2)
    few = rows <= 16 or dtype == torch.float32
    return AttentionConfig(rows=16 if few else 32, warps=4 if rows <= 16 else 8, stages=2, programs=2)


@triton.jit
def _absorb(
    top, total, acc, q, turned, seen_to, entries, blocks, start, end, scale, block_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, ROPE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add one tile of entries to the online softmax."""
    at = start + tl.arange(0, TILE)
    dims, rest = tl.arange(0, acc.shape[1]), tl.arange(0, ROPE_WIDTH)
    lies = key_offsets(blocks, start, block_stride, RANK + ROPE, BLOCK, TILE)[:, None]
    known = (at < end)[:, None]
    latent = tl.load(entries + lies + dims[None, :], mask=known & (dims < RANK)[None, :], other=0.0)
    others = tl.load(entries + RANK + lies + rest[None, :], mask=known & (rest < ROPE)[None, :], other=0.0)
    s = tl.dot(q, tl.trans(latent), input_precision="ieee")
    s = tl.dot(turned, tl.trans(others), s, input_precision="ieee")
    s = tl.where(at[None, :] < seen_to[:, None], s, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(tl.fma(s, scale, -base[:, None])).to(q.dtype)
    fade = tl.exp2(top - base)[:, None]
    ones = tl.full([TILE, 16], 1.0, tl.float32).to(q.dtype)
    total = tl.dot(p, ones, total * fade, input_precision="ieee")
    acc = tl.dot(p, latent, acc * fade, input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize=["max_blocks"])
def _attend(
    q, cache, table, slots, positions, work, num_work, out, parts, tops, totals, arrived, claims,
    scale, q_stride, head_stride, block_stride, max_blocks,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    MODE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Attend with tiles of up to ``QUERIES`` consecutive queries of a sequence, piece by piece.

    A unit is a piece with ``ROWS`` of the tile's rows. Pieces and merges are as in
    :func:`preheat.backends.cuda.paged_attention.decode_attention`; a prompt's tile is one piece.
    """
    CHUNKS: tl.constexpr = (QUERIES * HEADS + ROWS - 1) // ROWS
    dims, rest = tl.arange(0, WIDTH), tl.arange(0, ROPE_WIDTH)
    units, programs = tl.load(num_work) * CHUNKS, tl.num_programs(0)
    unit = tl.program_id(0)
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
            queries = tl.load(query + dims[None, :], mask=own[:, None] & (dims < RANK)[None, :], other=0.0)
            turned = tl.load(query + RANK + rest[None, :], mask=own[:, None] & (rest < ROPE)[None, :], other=0.0)
            top, total, acc = nothing(ROWS, WIDTH)
            if MODE != ONE_TOKEN:
                all_top, all_total, all_acc = nothing(ROWS, WIDTH)
            blocks = blocks_of(pages, start, end, BLOCK, TILE)
            for at in range(start, end, TILE):
                top, total, acc = _absorb(
                    top, total, acc, queries, turned, seen_to, cache, blocks, at, end, scale, block_stride,
                    RANK, ROPE, ROPE_WIDTH, BLOCK, TILE,
                )  # fmt: skip
                blocks = blocks_of(pages, at + TILE, end, BLOCK, TILE)
                if MODE != ONE_TOKEN:  # noqa: SIM102  (known when the kernel is compiled, the other when it runs)
                    if ((at + TILE) % SPLIT == 0) & (at + TILE < end):
                        all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, total, acc)
                        top, total, acc = nothing(ROWS, WIDTH)
            result = out + ((token_row * HEADS + head) * (RANK + ROPE))[:, None] + dims[None, :]
            real = own[:, None] & (dims < RANK)[None, :]
            if count == 1:
                if MODE != ONE_TOKEN:
                    all_top, total, acc = merge(all_top, all_total, all_acc, top, total, acc)
                tl.store(result, (acc / tl.max(total, 1)[:, None]).to(out.dtype.element_ty), mask=real)
            else:
                place = (tl.cast(piece, tl.int64) * QUERIES + nth) * HEADS + head
                _keep_part(parts, tops, totals, place, top, total, acc, own, RANK)
                tl.debug_barrier()  # all warps have written before one of them counts the piece
                counter = arrived + token * HEADS + chunk
                if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                    tl.debug_barrier()
                    place -= tl.cast(split, tl.int64) * (QUERIES * HEADS)
                    _, sums, outs = _merge_parts(
                        parts, tops, totals, place, QUERIES * HEADS, count, own, RANK, WIDTH, 1
                    )  # fmt: skip
                    tl.store(result, (outs / sums).to(out.dtype.element_ty), mask=real)
                    tl.store(counter, 0)
        unit = _claim(claims, units, programs)
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
    mode: int = DECODE,
    config: AttentionConfig | None = None,
) -> None:
    """Attention over latent vectors; the result goes to the tokens' rows of ``out``.

    ``q`` [tokens, heads, entry] (any strides but the last), ``cache`` [blocks, 1, 1, block size, entry] (any stride of
    blocks), ``out`` [tokens, heads * entry]; the turned numbers of ``out`` are not written. ``pieces`` are as in
    :func:`preheat.backends.cuda.paged_attention.decode_attention`: of one token each in the mode ``DECODE``, of tiles
    of :func:`query_tokens` tokens for ``rows`` in ``VERIFY``. In ``PROMPT`` they are tiles of up to ``TOKENS`` tokens,
    from :func:`preheat.backends.cuda.work.prefill_tiles`.
    """
    heads, entry, block = q.shape[1], q.shape[2], cache.shape[3]
    work, rank, table = pieces.work, latents.rank, places.table
    queries = TOKENS if mode == PROMPT else query_tokens(rows.width)
    config = config or latent_config(queries * heads, q.dtype, single=mode == DECODE, card=card_at(q.device))
    chunks = triton.cdiv(queries * heads, config.rows)
    units = len(work) * chunks
    programs = units
    if mode != PROMPT and config.programs:
        tiles = rows.most * -(-rows.width // queries)
        programs = min(units, max(config.programs * processors(q.device), tiles * chunks))
    _attend[(programs,)](
        q, cache, table, places.slots, places.positions, work, pieces.used, out,
        workspace.parts, workspace.tops, workspace.totals, workspace.arrived, workspace.claims,
        latents.scale * LOG2_E, *q.stride()[:2], cache.stride(0), table.stride(0),
        HEADS=heads, RANK=rank, ROPE=entry - rank, WIDTH=max(triton.next_power_of_2(rank), 16),
        ROPE_WIDTH=max(triton.next_power_of_2(entry - rank), 16), ROWS=config.rows, QUERIES=queries,
        BLOCK=block, SPLIT=latents.split, TILE=tile_keys(q.dtype), MODE=mode,
        enable_fp_fusion=False, **options(num_warps=config.warps, num_stages=config.stages),
    )  # fmt: skip
