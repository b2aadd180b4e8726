"""Paged causal attention.

Contract. Keys are cut into splits at fixed absolute positions (:data:`preheat.ops.tiles.SPLIT`). Inside a split:
scores = q . k * scale, accumulated in fp32 and rounded to the model's dtype; softmax over the visible keys in fp32,
rounded; output = p . v, accumulated in fp32 and rounded; and the split's log-sum-exp in fp32. Across the splits of a
query, in rising order: w_i = exp(lse_i - max lse), out = (sum w_i * out_i) / (sum w_i), in fp32, rounded once. A query
with one split is that split's output.

Every query row therefore has the same bits whatever tile, batch, chunk or cache state it was computed in. On CPU the
products are torch's batched matrix products, which are row-invariant from ``_rows_multiple`` rows on and where they
read a power of two of keys; the tiles are padded to that.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from preheat.ops.tiles import MIN_SPAN, SPLIT, Call, Tiles

WORKSPACE_BYTES = 2 << 20
"""Keys and values gathered for one kernel call: about what a core's cache holds. Changes no bits."""

_SMALLEST_PRODUCT = 4096  # multiply-adds up to which torch takes another kernel


def max_keys(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Keys that one call gathers at most."""
    return WORKSPACE_BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize)


class PagedAttention:
    """Attention of one group of tiles of a step, prepared once and run by every layer with the same window."""

    def __init__(self, tiles: Tiles, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.kv_heads, self.group, self.dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        self.num_tiles, self.width = tiles.queries.shape
        self.rows = self.group * self.width
        self.pad_rows = -self.rows % _rows_multiple(head_dim, dtype)
        self.queries = torch.from_numpy(tiles.queries.reshape(-1))
        self.valid = None if tiles.valid.all() else torch.from_numpy(np.flatnonzero(tiles.valid))
        self.targets = self.queries if self.valid is None else self.queries[self.valid]
        self.calls = [
            (torch.from_numpy(call.tile), self._cache_rows(call), call.span, self._mask(call, dtype))
            for call in tiles.calls
        ]
        self.direct = len(tiles.calls) == 1 and tiles.num_pairs == self.num_tiles  # one pair a tile, in tile order
        self.single_split = tiles.pair_of.shape[1] == 1
        self.pair_of = torch.from_numpy(tiles.pair_of)
        self.unseen = torch.from_numpy(~tiles.seen)[:, :, None, None, :]  # [tiles, splits, 1, 1, width]

    def __call__(self, q: Tensor, cache: Tensor, scale: float, out: Tensor) -> None:
        """Attend with ``q`` [tokens, heads, dim] over ``cache`` [blocks, 2, kv heads, slots, dim].

        Fills the rows of ``out`` [tokens, heads, dim] that the tiles' queries name.
        """
        tiled = q.index_select(0, self.queries)
        tiled = tiled.view(self.num_tiles, self.width, self.kv_heads, self.group, self.dim).permute(0, 2, 3, 1, 4)
        tiled = tiled.reshape(self.num_tiles, self.kv_heads, self.rows, self.dim)
        if self.pad_rows:
            tiled = torch.nn.functional.pad(tiled, (0, 0, 0, self.pad_rows))
        parts, lses = zip(*(self._pairs(call, tiled, cache, scale) for call in self.calls), strict=True)
        part = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.direct:
            merged = part
        elif self.single_split:
            merged = part.index_select(0, self.pair_of[:, 0])
        else:
            merged = self._merge(part, torch.cat(lses))
        merged = merged[:, :, : self.rows].reshape(self.num_tiles, self.kv_heads, self.group, self.width, self.dim)
        flat = merged.permute(0, 3, 1, 2, 4).reshape(self.num_tiles * self.width, -1, self.dim)
        out.index_copy_(0, self.targets, flat if self.valid is None else flat.index_select(0, self.valid))

    def _pairs(
        self, call: tuple[Tensor, Tensor, int, Tensor | None], tiled: Tensor, cache: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The partial output [pairs, kv heads, rows, dim] and log-sum-exp [pairs, kv heads, rows] of a call's pairs."""
        tile, cache_rows, span, mask = call
        block = cache.view(-1, cache.shape[-2] * self.dim)
        key, value = block.index_select(0, cache_rows).view(2, -1, span, self.dim)
        query = (tiled if self.direct else tiled.index_select(0, tile)).view(len(key), -1, self.dim)
        bias = query.new_zeros(()) if mask is None else mask.expand(len(key), query.shape[1], span)
        score = torch.baddbmm(bias, query, key.transpose(1, 2), beta=0 if mask is None else 1, alpha=scale)
        weight = torch.softmax(score, -1, dtype=torch.float32)
        part = torch.bmm(weight.to(query.dtype), value).view(len(tile), self.kv_heads, -1, self.dim)
        if self.single_split:
            return part, part
        lse = score.amax(-1).float() - weight.amax(-1).log()  # the largest weight is exp(0) over the sum
        return part, lse.view(len(tile), self.kv_heads, -1)

    def _merge(self, part: Tensor, lse: Tensor) -> Tensor:
        """Add up each tile's splits in rising order; see the module's contract."""
        shape = (self.num_tiles, -1, self.kv_heads, self.group, self.width)
        dtype = part.dtype
        part = torch.cat([part, part.new_zeros(1, *part.shape[1:])])[self.pair_of][:, :, :, : self.rows].float()
        lse = torch.cat([lse, lse.new_zeros(1, *lse.shape[1:])])[self.pair_of][:, :, :, : self.rows].reshape(shape)
        lse = lse.masked_fill(self.unseen, -torch.inf)
        weight = torch.exp(lse - lse.amax(dim=1, keepdim=True).clamp(min=-1e30)).flatten(3).unsqueeze(-1)
        unseen = self.unseen.expand(-1, -1, 1, self.group, -1).flatten(3).unsqueeze(-1)
        part = part.masked_fill(unseen, 0.0)  # a query that sees nothing of a split has no output there
        total, norm = part[:, 0] * weight[:, 0], weight[:, 0]
        for i in range(1, part.shape[1]):
            total = total + part[:, i] * weight[:, i]
            norm = norm + weight[:, i]
        return (total / norm).to(dtype)

    def _cache_rows(self, call: Call) -> Tensor:
        """Which (block, key or value, head) rows of the cache hold the call's keys, then its values, head by head."""
        block = torch.from_numpy(call.blocks)[None, :, None, :]
        kind = torch.arange(2)[:, None, None, None]
        head = torch.arange(self.kv_heads)[None, None, :, None]
        return ((block * 2 + kind) * self.kv_heads + head).view(-1)

    def _mask(self, call: Call, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [pairs * kv heads, rows or 1, span]: 0 where the query sees the key, -inf elsewhere."""
        if not call.masked:
            return None
        before, after = _bounds(dtype)
        mask = after[:, : call.span].index_select(0, torch.from_numpy(call.end.reshape(-1)))
        if call.begin is not None:
            mask += before[:, : call.span].index_select(0, torch.from_numpy(call.begin.reshape(-1)))
        mask = mask.view(len(call.tile), self.width, call.span)
        if self.width > 1:
            mask = torch.nn.functional.pad(mask.repeat(1, self.group, 1), (0, 0, 0, self.pad_rows))
        return mask.repeat_interleave(self.kv_heads, 0)


def _rows_multiple(head_dim: int, dtype: torch.dtype) -> int:
    """Query rows are padded to a multiple of this: enough for one kernel at every size, and for fp32's row blocks."""
    if dtype == torch.float32:
        return 16
    return max(2, 1 << (_SMALLEST_PRODUCT // (head_dim * MIN_SPAN)).bit_length())


@functools.cache
def _bounds(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Row n of the first hides the keys before the n-th, row n of the second those from the n-th on."""
    hidden = torch.arange(SPLIT) < torch.arange(SPLIT + 1)[:, None]
    zero, hide = torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype)
    return torch.where(hidden, hide, zero), torch.where(hidden, zero, hide)
