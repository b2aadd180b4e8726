"""Paged causal attention.

Contract. Keys are cut into splits at fixed absolute positions (:data:`preheat.backends.cpu.tiles.SPLIT`). Inside a
split: scores = q . k * scale in fp32, softmax over the visible keys in fp32, output = p . v, rounded to the model's
dtype, together with the split's log-sum-exp in fp32. Across the splits of a query, in rising order: w_i = exp(lse_i -
max), out = (sum w_i * out_i) / (sum w_i), in fp32, rounded once. A query with one split is that split's output.

Every query row therefore has the same bits whatever tile, batch, chunk or cache state it was computed in. The CPU
kernel is torch's flash attention. Its products take other kernels for few rows, where depends on the processor: so
what it gives for ``REFERENCE_ROWS`` query rows a head is the contract, tiles are padded to a number of rows that was
proven, on this machine, to give the same bits, and calls read a power of two of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cpu.tiles import MAX_TILE, SPLIT, KernelCall, Tiles
from preheat.errors import ModelError
from preheat.ops.proof import noise, signed_pairs

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

REFERENCE_ROWS = 64
SPANS = (64, 128, 256)

Reader = Callable[[Tensor], Sequence[Tensor]]
"""Cache [blocks, 2, kv heads, slots, dim] -> keys and values of a call, each [pairs, kv heads, span, dim]."""

WORKSPACE_BYTES = 8 << 20
"""Keys and values gathered for one kernel call: about what a core's cache holds. Changes no bits."""


def max_keys(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Keys that one call gathers at most."""
    return WORKSPACE_BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize)


class PagedAttention:
    """Attention of one group of tiles of a step, prepared once and run by every layer with the same window."""

    def __init__(self, tiles: Tiles, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.kv_heads, self.group, self.dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        self.num_tiles, self.width = tiles.queries.shape
        self.rows = self.group * self.width
        self.pad_rows = _padded_rows(self.rows, head_dim, dtype) - self.rows
        self.queries = torch.from_numpy(tiles.queries.reshape(-1))
        self.valid = None if tiles.valid.all() else torch.from_numpy(np.flatnonzero(tiles.valid))
        self.targets = self.queries if self.valid is None else self.queries[self.valid]
        self.calls = [
            (torch.from_numpy(call.tile), self._reader(call), call.span, self._mask(call, dtype))
            for call in tiles.calls
        ]
        pairs = sum(len(call.tile) for call in tiles.calls)
        self.direct = (
            len(tiles.calls) == 1 and pairs == self.num_tiles and bool((np.diff(tiles.calls[0].tile) > 0).all())
        )
        self.num_splits = tiles.pair_of.shape[1]
        self.pair_of = torch.from_numpy(tiles.pair_of.reshape(-1))
        unseen = torch.from_numpy(~tiles.seen)[:, :, None, None, :]
        self.unseen = unseen.expand(-1, -1, self.kv_heads, self.group, -1).flatten(3)

    def __call__(self, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Attend with ``q`` [tokens, heads, dim] over ``cache`` [blocks, 2, kv heads, slots, dim].

        Returns [queries, heads, dim] for the tokens in ``targets``.
        """
        if self.width == 1:
            tiled = q.index_select(0, self.queries).view(self.num_tiles, self.kv_heads, self.rows, self.dim)
        else:
            tiled = q.index_select(0, self.queries).view(self.num_tiles, self.width, self.kv_heads, -1, self.dim)
            tiled = tiled.permute(0, 2, 3, 1, 4).reshape(self.num_tiles, self.kv_heads, self.rows, self.dim)
        if self.pad_rows:
            tiled = torch.nn.functional.pad(tiled, (0, 0, 0, self.pad_rows))
        done = [self._pairs(call, tiled, cache, scale) for call in self.calls]
        merged = done[0][0] if len(done) == 1 else torch.cat([part for part, _ in done])
        if self.num_splits > 1:
            merged = self._merge(merged, torch.cat([lse for _, lse in done]))
        elif not self.direct:
            merged = merged.index_select(0, self.pair_of)
        if self.pad_rows:
            merged = merged[:, :, : self.rows]
        if self.width == 1:
            return merged.reshape(self.num_tiles, -1, self.dim)
        merged = merged.reshape(self.num_tiles, self.kv_heads, self.group, self.width, self.dim)
        flat = merged.permute(0, 3, 1, 2, 4).reshape(self.num_tiles * self.width, -1, self.dim)
        return flat if self.valid is None else flat.index_select(0, self.valid)

    def _pairs(
        self, call: tuple[Tensor, Reader, int, Tensor | None], tiled: Tensor, cache: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The partial output [pairs, kv heads, rows, dim] and log-sum-exp [pairs, kv heads, rows] of a call's pairs."""
        tile, read, span, mask = call
        key, value = read(cache)
        query = tiled if self.direct else tiled.index_select(0, tile)
        if mask is not None:
            mask = mask.expand(len(tile), 1, query.shape[2], span)
        part, lse = _flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return part, lse

    def _merge(self, part: Tensor, lse: Tensor) -> Tensor:
        """Add up each tile's splits in rising order; see the module's contract."""
        part = part.index_select(0, self.pair_of).view(self.num_tiles, self.num_splits, *part.shape[1:])
        lse = lse.index_select(0, self.pair_of).view(self.num_tiles, self.num_splits, *lse.shape[1:])
        lse[..., : self.rows].masked_fill_(self.unseen, -torch.inf)
        weight = torch.exp(lse - lse.amax(dim=1, keepdim=True)).unsqueeze(-1)
        total, norm = part[:, 0] * weight[:, 0], weight[:, 0]
        for i in range(1, self.num_splits):
            total = total + part[:, i] * weight[:, i]
            norm = norm + weight[:, i]
        return (total / norm).to(part.dtype)

    def _reader(self, call: KernelCall) -> Reader:
        """Gathers the call's keys and its values, head by head, or looks at them where they lie."""
        if call.in_place:
            return lambda cache: cache[: len(call.tile)].unbind(1)
        places = np.arange(2 * self.kv_heads).reshape(2, 1, self.kv_heads, 1)  # within a block: all keys, all values
        rows = torch.from_numpy((call.blocks[:, None] * (2 * self.kv_heads) + places).reshape(-1))
        shape = (2, len(call.tile), self.kv_heads, call.span, self.dim)
        return lambda cache: cache.view(-1, cache.shape[-2] * self.dim).index_select(0, rows).view(shape).unbind()

    def _mask(self, call: KernelCall, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [pairs, 1, rows or 1, span]: 0 where the query sees the key, -inf elsewhere."""
        if not call.masked:
            return None
        before, after = _bounds(dtype)
        mask = after[:, : call.span].index_select(0, torch.from_numpy(call.end.reshape(-1)))
        if call.begin is not None:
            mask += before[:, : call.span].index_select(0, torch.from_numpy(call.begin.reshape(-1)))
        mask = mask.view(len(call.tile), 1, self.width, call.span)
        if self.width == 1:
            return mask
        return torch.nn.functional.pad(mask.repeat(1, 1, self.group, 1), (0, 0, 0, self.pad_rows))


def widest_tile(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Queries of a tile at most, where ``group`` heads share each key: a power of two up to which all are proven."""
    width = 1
    while width < MAX_TILE and _proven_rows(2 * width * group, head_dim, dtype, torch.get_num_threads()):
        width *= 2
    return width


def _padded_rows(rows: int, head_dim: int, dtype: torch.dtype) -> int:
    size = _proven_rows(rows, head_dim, dtype, torch.get_num_threads())
    if not size:
        raise ModelError(
            f"attention with {rows} query rows for each key, {head_dim} wide, has no kernel on this machine"
        )
    return size


@functools.cache
def _proven_rows(rows: int, head_dim: int, dtype: torch.dtype, threads: int) -> int:
    """The least number of rows, not below ``rows``, that have the reference's bits on ``threads`` threads; 0: none."""
    for size in sorted({-(-rows // step) * step for step in (4, 8, 16, 32, REFERENCE_ROWS)}):
        if all(_is_reference(size, head_dim, span, dtype) for span in SPANS):
            return size
    return 0


def _is_reference(size: int, head_dim: int, span: int, dtype: torch.dtype) -> bool:
    """Whether ``size`` rows and the same rows in parts of ``REFERENCE_ROWS`` add in one order, in both products."""
    rows = -(-size // REFERENCE_ROWS) * REFERENCE_ROWS
    query, key, value = (noise(1, 1, n, head_dim, seed=n) for n in (rows, span, span + 1))
    zero_scores = signed_pairs(query.clone(), -1.0), signed_pairs(key.clone(), 1.0), value[:, :, 1:], 1e6
    equal, opposite = (signed_pairs(x.mT.clone(), sign).mT for x, sign in ((key, 1.0), (value[:, :, 1:], -1.0)))
    for q, k, v, scale in (zero_scores, (query, equal, opposite, head_dim**-0.5)):
        run = functools.partial(_attend, key=k.to(dtype), value=v.to(dtype), scale=scale)
        parts = torch.cat([run(part) for part in torch.split(q.to(dtype), REFERENCE_ROWS, 2)], 2)
        if not torch.equal(run(q[:, :, :size].to(dtype)), parts[:, :, :size]):
            return False
    return True


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[1, 1, rows, dim]."""
    part: Tensor = _flash(query.contiguous(), key.contiguous(), value.contiguous(), 0.0, False, scale=scale)[0]
    return part


@functools.cache
def _bounds(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Row n of the first hides the keys before the n-th, row n of the second those from the n-th on."""
    hidden = torch.arange(SPLIT) < torch.arange(SPLIT + 1)[:, None]
    zero, hide = torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype)
    return torch.where(hidden, hide, zero), torch.where(hidden, zero, hide)
