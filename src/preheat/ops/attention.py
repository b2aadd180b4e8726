"""Paged causal attention.

Contract. Keys are cut into splits at fixed absolute positions (:data:`preheat.ops.tiles.SPLIT`). Inside a split:
scores = q . k * scale in fp32, softmax over the visible keys in fp32, output = p . v, rounded to the model's dtype,
together with the split's log-sum-exp in fp32. Across the splits of a query, in rising order: w_i = exp(lse_i - max lse),
out = (sum w_i * out_i) / (sum w_i), in fp32, rounded once. A query with one split is that split's output.

Every query row therefore has the same bits whatever tile, batch, chunk or cache state it was computed in. The CPU
kernel is torch's flash attention; it is row-invariant where a call has a multiple of four query rows a head (fewer
take another matrix product), which the tiles are padded to, and where it reads a power of two of keys.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from preheat.ops.tiles import SPLIT, Call, Tiles

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

ROWS_MULTIPLE = 4

WORKSPACE_BYTES = 2 << 20
"""Keys and values gathered for one kernel call: about what a core's cache holds. Changes no bits."""


def max_keys(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Keys that one call gathers at most."""
    return WORKSPACE_BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize)


class PagedAttention:
    """Attention of one group of tiles of a step, prepared once and run by every layer with the same window."""

    def __init__(self, tiles: Tiles, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
        self.kv_heads, self.group = num_kv_heads, num_heads // num_kv_heads
        self.num_tiles, self.width = tiles.queries.shape
        self.rows = self.group * self.width
        self.pad_rows = -self.rows % ROWS_MULTIPLE
        self.queries = torch.from_numpy(tiles.queries.reshape(-1))
        self.valid = None if tiles.valid.all() else torch.from_numpy(np.flatnonzero(tiles.valid))
        self.targets = self.queries if self.valid is None else self.queries[self.valid]
        self.calls = [
            (
                torch.from_numpy(call.tile),
                torch.from_numpy(call.blocks.reshape(-1)),
                call.span,
                self._mask(call, dtype) if call.masked else None,
            )
            for call in tiles.calls
        ]
        self.direct = len(tiles.calls) == 1 and tiles.num_pairs == self.num_tiles  # one pair a tile, in tile order
        self.single_split = tiles.pair_of.shape[1] == 1
        self.pair_of = torch.from_numpy(tiles.pair_of)
        self.unseen = torch.from_numpy(~tiles.seen)[:, :, None, None, :]  # [tiles, splits, 1, 1, width]

    def __call__(self, q: Tensor, cache: Tensor, scale: float, out: Tensor) -> None:
        """Attend with ``q`` [tokens, heads, dim] over ``cache`` [blocks, slots, 2, kv heads, dim].

        Fills the rows of ``out`` [tokens, heads, dim] that the tiles' queries name.
        """
        dim = q.shape[-1]
        tiled = q.index_select(0, self.queries)
        tiled = tiled.view(self.num_tiles, self.width, self.kv_heads, self.group, dim).permute(0, 2, 3, 1, 4)
        tiled = tiled.reshape(self.num_tiles, self.kv_heads, self.rows, dim)
        if self.pad_rows:
            tiled = torch.nn.functional.pad(tiled, (0, 0, 0, self.pad_rows))
        part, lse = self._pairs(tiled, cache, scale)
        if self.direct:
            merged = part
        elif self.single_split:
            merged = part.index_select(0, self.pair_of[:, 0])
        else:
            merged = self._merge(part, lse, q.dtype)
        merged = merged[:, :, : self.rows].reshape(self.num_tiles, self.kv_heads, self.group, self.width, dim)
        flat = merged.permute(0, 3, 1, 2, 4).reshape(self.num_tiles * self.width, -1, dim)
        out.index_copy_(0, self.targets, flat if self.valid is None else flat.index_select(0, self.valid))

    def _pairs(self, tiled: Tensor, cache: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The partial output [pairs, kv heads, rows, dim] and log-sum-exp [pairs, kv heads, rows] of every pair."""
        parts = []
        for tile, blocks, span, mask in self.calls:
            kv = cache.index_select(0, blocks).view(len(tile), span, 2, self.kv_heads, tiled.shape[-1])
            query = tiled if self.direct else tiled.index_select(0, tile)
            key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
            mask = None if mask is None else mask.expand(len(tile), 1, query.shape[2], span)
            parts.append(_flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])

    def _merge(self, part: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up each tile's splits in rising order; see the module's contract."""
        shape = (self.num_tiles, -1, self.kv_heads, self.group, self.width)
        part = torch.cat([part, part.new_zeros(1, *part.shape[1:])])[self.pair_of][:, :, :, : self.rows].float()
        lse = torch.cat([lse, lse.new_zeros(1, *lse.shape[1:])])[self.pair_of][:, :, :, : self.rows].reshape(shape)
        lse = lse.masked_fill(self.unseen, -torch.inf)
        weight = torch.exp(lse - lse.amax(dim=1, keepdim=True).clamp(min=-1e30)).flatten(3).unsqueeze(-1)
        total, norm = part[:, 0] * weight[:, 0], weight[:, 0]
        for i in range(1, part.shape[1]):
            total = total + part[:, i] * weight[:, i]
            norm = norm + weight[:, i]
        return (total / norm).to(dtype)

    def _mask(self, call: Call, dtype: torch.dtype) -> Tensor:
        """Additive mask [pairs, 1, rows or 1, span]: 0 where the query sees the key, -inf elsewhere."""
        before, after = _bounds(dtype)
        mask = after[:, : call.span].index_select(0, torch.from_numpy(call.end.reshape(-1)))
        if call.begin is not None:
            mask += before[:, : call.span].index_select(0, torch.from_numpy(call.begin.reshape(-1)))
        mask = mask.view(len(call.tile), 1, self.width, call.span)
        if self.width == 1:
            return mask
        return torch.nn.functional.pad(mask.repeat(1, 1, self.group, 1), (0, 0, 0, self.pad_rows))


@functools.cache
def _bounds(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Row n of the first hides the keys before the n-th, row n of the second those from the n-th on."""
    hidden = torch.arange(SPLIT) < torch.arange(SPLIT + 1)[:, None]
    zero, hide = torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype)
    return torch.where(hidden, hide, zero), torch.where(hidden, zero, hide)
