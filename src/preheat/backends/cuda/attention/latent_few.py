"""Attention over latent vectors for few decoding rows on CUDA: all scores first, then outputs.

Contract. It is the contract of :mod:`preheat.backends.cuda.attention.latent`, with the same products and sums. Where a
program of :func:`preheat.backends.cuda.attention.latent.latent_attention` computes a whole split, here many programs
share one: each scores a few keys, and then each computes a few numbers of the output. So few rows use more of the
device, and read entries twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from preheat.backends.cuda.attention.latent import tile_keys
from preheat.backends.cuda.attention.paged import _merge_parts
from preheat.backends.cuda.attention.tile import blocks_of, key_offsets, nothing, weigh
from preheat.backends.cuda.attention.values import LOG2_E, Latents, Pieces, Places, Workspace
from preheat.backends.cuda.device.launch import begin, options, processors
from preheat.backends.cuda.device.sizes import cdiv, next_power_of_2

FEW = 2
"""The most rows of a step for these kernels."""


@dataclass(frozen=True)
class FewConfig:
    """Layout of the two kernels; no field changes bits.

    A program scores ``keys`` keys of a split, and computes ``numbers`` numbers of the outputs, for ``rows`` heads.
    ``stages`` tiles are loaded ahead. ``programs`` is the most programs of a grid for each multiprocessor.
    Measured on an H200.
    """

    rows: int = 16
    keys: int = 32
    numbers: int = 32
    score_warps: int = 4
    value_warps: int = 4
    stages: int = 3
    programs: int = 4


def few_config(dtype: torch.dtype) -> FewConfig:
    """Return the layout for entries of ``dtype``: 32 keys of 576 numbers of float32 exceed a card of 99 KB."""
    return FewConfig(keys=16) if dtype == torch.float32 else FewConfig()


@triton.jit
def _piece(work, piece, positions, slots, table, max_blocks, SPLIT: tl.constexpr):
    """Return the token, split and first key of a piece, the end of the token's keys, and its block numbers."""
    token, split = tl.load(work + piece * 2), tl.load(work + piece * 2 + 1)
    pages = table + tl.load(slots + token).to(tl.int64) * max_blocks
    return token, split, split * SPLIT, tl.load(positions + token) + 1, pages


@triton.jit(do_not_specialize=["max_blocks"])
def _score(
    q, cache, table, slots, positions, work, num_work, scores, q_stride, head_stride, block_stride, max_blocks,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write scores, not yet scaled, of ``KEYS`` keys and ``ROWS`` heads a unit."""
    CHUNKS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    SHARES: tl.constexpr = SPLIT // KEYS
    dims, rest = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROPE_WIDTH)[None, :]
    units = tl.load(num_work) * (CHUNKS * SHARES)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        piece, chunk, share = unit // (CHUNKS * SHARES), unit // SHARES % CHUNKS, unit % SHARES
        token, _, start, end, pages = _piece(work, piece, positions, slots, table, max_blocks, SPLIT)
        start += share * KEYS
        if start < end:
            blocks = blocks_of(pages, start, end, BLOCK, KEYS)
            head = chunk * ROWS + tl.arange(0, ROWS)
            own, at = (head < HEADS)[:, None], start + tl.arange(0, KEYS)
            begin(overlap)
            query = q + (tl.cast(token, tl.int64) * q_stride + head * head_stride)[:, None]
            lies = cache + key_offsets(blocks, start, block_stride, RANK + ROPE, BLOCK, KEYS)[:, None]
            known = (at < end)[:, None]
            latent = tl.load(lies + dims, mask=known & (dims < RANK), other=0.0)
            turned = tl.load(lies + RANK + rest, mask=known & (rest < ROPE), other=0.0)
            q_latent = tl.load(query + dims, mask=own & (dims < RANK), other=0.0)
            q_turned = tl.load(query + RANK + rest, mask=own & (rest < ROPE), other=0.0)
            s = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            s = tl.dot(q_turned, tl.trans(turned), s, input_precision="ieee")
            place = (tl.cast(piece, tl.int64) * HEADS + head) * SPLIT
            to = scores + place[:, None] + (share * KEYS + tl.arange(0, KEYS))[None, :]
            tl.store(to, s, mask=own)
    begin(overlap)  # programs without work must wait too, lest the next kernel start too early


@triton.jit(do_not_specialize=["max_blocks"])
def _output(
    cache, table, slots, positions, work, num_work, scores, out, parts, tops, totals, arrived,
    scale, block_stride, max_blocks,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, NUMBERS: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Compute ``NUMBERS`` numbers of the outputs of a split for ``ROWS`` heads a unit.

    The last unit of a query to arrive merges its splits. Units of other numbers write the same maxima and sums.
    """
    CHUNKS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    units = tl.load(num_work) * (CHUNKS * SLICES)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        piece, part = unit // (CHUNKS * SLICES), unit % (CHUNKS * SLICES)
        chunk, first = part // SLICES, part % SLICES * NUMBERS
        token, split, start, keys, pages = _piece(work, piece, positions, slots, table, max_blocks, SPLIT)
        end, count = tl.minimum(start + SPLIT, keys), (keys - 1) // SPLIT + 1
        blocks = blocks_of(pages, start, end, BLOCK, TILE)
        head, dims = chunk * ROWS + tl.arange(0, ROWS), first + tl.arange(0, NUMBERS)[None, :]
        own = head < HEADS
        place = tl.cast(piece, tl.int64) * HEADS + head
        begin(overlap)
        top, total, acc = nothing(ROWS, NUMBERS)
        for at in tl.range(start, end, TILE):
            key = at + tl.arange(0, TILE)
            known = key[None, :] < end
            s = tl.load(scores + place[:, None] * SPLIT + (key - start)[None, :], mask=own[:, None] & known, other=0.0)
            lies = cache + key_offsets(blocks, at, block_stride, RANK + ROPE, BLOCK, TILE)[:, None]
            latent = tl.load(lies + dims, mask=(key < end)[:, None] & (dims < RANK), other=0.0)
            blocks = blocks_of(pages, at + TILE, end, BLOCK, TILE)
            top, p, fade = weigh(tl.where(known, s, -float("inf")), top, scale, latent.dtype)
            ones = tl.full([TILE, 16], 1.0, tl.float32).to(latent.dtype)
            total = tl.dot(p, ones, total * fade, input_precision="ieee")
            acc = tl.dot(p, latent, acc * fade, input_precision="ieee")
        result = out + ((tl.cast(token, tl.int64) * HEADS + head) * (RANK + ROPE))[:, None] + dims
        real = own[:, None] & (dims < RANK)
        if count == 1:
            tl.store(result, (acc / tl.max(total, 1)[:, None]).to(out.dtype.element_ty), mask=real)
        else:
            tl.store(tops + place, top, mask=own)
            tl.store(totals + place, tl.max(total, 1), mask=own)  # all columns are equal
            tl.store(parts + place[:, None] * RANK + dims, acc, mask=real)
            tl.debug_barrier()  # all warps have written before one of them counts the piece
            counter = arrived + token * (CHUNKS * SLICES) + part
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.debug_barrier()
                place -= tl.cast(split, tl.int64) * HEADS
                _, sums, outs = _merge_parts(
                    parts, tops, totals, place, HEADS, count, own, RANK, NUMBERS, first=first
                )  # fmt: skip
                tl.store(result, (outs / sums).to(out.dtype.element_ty), mask=real)
                tl.store(counter, 0)
    begin(overlap)  # programs without work must wait too, lest the next kernel start too early


def few_rows_attention(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    places: Places,
    pieces: Pieces,
    workspace: Workspace,
    latents: Latents,
    *,
    config: FewConfig | None = None,
) -> None:
    """Attention of rows of one token; see :func:`preheat.backends.cuda.attention.latent.latent_attention`.

    ``workspace`` has room for the scores of all pieces.
    """
    heads, entry, block = q.shape[1], q.shape[2], cache.shape[3]
    work, rank, table, split = pieces.work, latents.rank, places.table, latents.split
    config = config or few_config(q.dtype)
    chunks, most = cdiv(heads, config.rows), config.programs * processors(q.device)
    keys, numbers = min(config.keys, split), min(config.numbers, max(next_power_of_2(rank), 16))
    slices = cdiv(rank, numbers)
    assert workspace.scores.numel() >= len(work) * heads * split
    assert workspace.arrived.numel() >= len(q) * chunks * slices
    _score[(min(len(work) * chunks * (split // keys), most),)](
        q, cache, table, places.slots, places.positions, work, pieces.used, workspace.scores,
        *q.stride()[:2], cache.stride(0), table.stride(0),
        HEADS=heads, RANK=rank, ROPE=entry - rank, WIDTH=max(next_power_of_2(rank), 16),
        ROPE_WIDTH=max(next_power_of_2(entry - rank), 16), ROWS=config.rows, BLOCK=block, SPLIT=split, KEYS=keys,
        enable_fp_fusion=False, **options(num_warps=config.score_warps, num_stages=1),
    )  # fmt: skip
    _output[(min(len(work) * chunks * slices, most),)](
        cache, table, places.slots, places.positions, work, pieces.used, workspace.scores, out,
        workspace.parts, workspace.tops, workspace.totals, workspace.arrived,
        latents.scale * LOG2_E, cache.stride(0), table.stride(0),
        HEADS=heads, RANK=rank, ROPE=entry - rank, NUMBERS=numbers, SLICES=slices, ROWS=config.rows,
        BLOCK=block, SPLIT=split, TILE=tile_keys(q.dtype),
        enable_fp_fusion=False, **options(num_warps=config.value_warps, num_stages=config.stages),
    )  # fmt: skip
