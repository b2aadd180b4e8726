"""Paged causal attention.

Contract. Keys are cut into splits at fixed absolute positions (:data:`preheat.backends.cpu.tiles.SPLIT`). Inside a
split: scores = q . k * scale in fp32, softmax over the visible keys in fp32, output = p . v, rounded to the model's
dtype, together with the split's log-sum-exp in fp32. Across the splits of a query, in rising order: w_i = exp(lse_i -
max), out = (sum w_i * out_i) / (sum w_i), in fp32, rounded once. A query with one split has that split's output. With
ALiBi, slope * (key - query) is added to the scores before their softmax: one fp32 product of the head's slope and the
distance of the positions.

With a sink the merge goes on, also behind one split, with one more split: its log-sum-exp is the head's sink, its
output zero. So max includes the sink, and exp(sink - max) is added last to the sum of the weights.

Every query row therefore has the same bits in any tile, batch, chunk or cache state. The CPU kernel is torch's flash
attention. Its products are a library's. For several threads the library cuts a call into parts. It takes other kernels
for few rows, for the last rows of a block, and for such parts, depending on the processor. So the contract is the
result for one number of query rows a head (:func:`_reference`), reading a whole split. Tiles are padded to a number of
rows that was proven, on this machine, to give each row the same bits at every place in the call. The proof covers every
number of keys that a call reads, with a mask and without, for one pair and for several. A changed call must keep to the
proof: a number of rows from :func:`padded_rows`, a span of :data:`SPANS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cpu.hidden import attend, kernel
from preheat.backends.cpu.tiles import MAX_TILE, SPLIT, KernelCall, Tiles
from preheat.errors import ModelError
from preheat.ops.distances import by_distance
from preheat.ops.proof import noise, signed_pairs

REFERENCES = (64, 32, 24, 16, 12, 8, 4)
"""Numbers of query rows that may be the contract's.

The first number with one order for rows at all places is the contract's.
"""

STEPS = (4, 8, 12, 16, 24, 32, 64)
"""Rows are padded to a multiple of one of these."""

SPANS = (64, 128, 256)

Reader = Callable[[Tensor], Sequence[Tensor]]
"""Function from a cache to the keys and values of a call.

The cache is [blocks, sides, kv heads, slots, dim]; keys and values are [pairs, kv heads, span, dim] each.
"""

WORKSPACE_BYTES = 8 << 20
"""Bytes of keys and values gathered for one kernel call.

They are about a core's cache. The number changes no bits.
"""


def max_keys(num_kv_heads: int, head_dim: int, dtype: torch.dtype, sides: int = 2) -> int:
    """Return the most keys that one call gathers."""
    return WORKSPACE_BYTES // (sides * num_kv_heads * head_dim * dtype.itemsize)


class PagedAttention:
    """Attention of one group of tiles of a step.

    It is prepared once and run by every layer with the same window.
    """

    def __init__(
        self, tiles: Tiles, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, sides: int = 2,
        apart: int = 0,
    ) -> None:  # fmt: skip
        self.kv_heads, self.group, self.dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        self.sides, self._apart = sides, apart or sides * num_kv_heads  # rows from one block to the next
        self.num_tiles, self.width = tiles.queries.shape
        self.rows = self.group * self.width
        self.pad_rows = padded_rows(self.rows, head_dim, dtype) - self.rows
        self.queries = torch.from_numpy(tiles.queries.reshape(-1))
        self.valid = None if tiles.valid.all() else torch.from_numpy(np.flatnonzero(tiles.valid))
        self.targets = self.queries if self.valid is None else self.queries[self.valid]
        self.dtype = dtype
        self.calls = [
            (torch.from_numpy(call.tile), self._reader(call), call, self._mask(call, dtype)) for call in tiles.calls
        ]
        pairs = sum(len(call.tile) for call in tiles.calls)
        self.direct = (
            len(tiles.calls) == 1 and pairs == self.num_tiles and bool((np.diff(tiles.calls[0].tile) > 0).all())
        )
        self.num_splits = tiles.pair_of.shape[1]
        self.pair_of = torch.from_numpy(tiles.pair_of.reshape(-1))
        unseen = torch.from_numpy(~tiles.seen)[:, :, None, None, :]
        self.unseen = unseen.expand(-1, -1, self.kv_heads, self.group, -1).flatten(3)

    def __call__(
        self, q: Tensor, cache: Tensor, scale: float, alibi: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with ``q`` [tokens, heads, dim] over ``cache`` [blocks, sides, kv heads, slots, dim].

        ``sinks`` are fp32 [heads], ``alibi`` are slopes or a table, see :mod:`preheat.ops.distances`.
        Returns [queries, heads, dim] for the tokens in ``targets``.
        """
        if self.width == 1:
            tiled = q.index_select(0, self.queries).view(self.num_tiles, self.kv_heads, self.rows, self.dim)
        else:
            tiled = q.index_select(0, self.queries).view(self.num_tiles, self.width, self.kv_heads, -1, self.dim)
            tiled = tiled.permute(0, 2, 3, 1, 4).reshape(self.num_tiles, self.kv_heads, self.rows, self.dim)
        if self.pad_rows:
            tiled = torch.nn.functional.pad(tiled, (0, 0, 0, self.pad_rows))
        done = [self._pairs(call, tiled, cache, scale, alibi) for call in self.calls]
        merged = done[0][0] if len(done) == 1 else torch.cat([part for part, _ in done])
        if self.num_splits > 1 or sinks is not None:
            merged = self._merge(merged, torch.cat([lse for _, lse in done]), sinks)
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
        self,
        call: tuple[Tensor, Reader, KernelCall, Tensor | None],
        tiled: Tensor,
        cache: Tensor,
        scale: float,
        alibi: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the partial results of a call's pairs.

        They are outputs [pairs, kv heads, rows, dim] and log-sum-exps [pairs, kv heads, rows].
        """
        tile, read, kernel_call, mask = call
        key, value = read(cache)
        query = tiled if self.direct else tiled.index_select(0, tile)
        if alibi is not None:
            mask = self._bias(kernel_call, mask, alibi)
        elif mask is not None:
            mask = mask.expand(len(tile), 1, query.shape[2], kernel_call.span)
        return attend(query, key, value, mask, scale)

    def _merge(self, part: Tensor, lse: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Add up each tile's splits in rising order, then the sinks; see the module's contract."""
        part = part.index_select(0, self.pair_of).view(self.num_tiles, self.num_splits, *part.shape[1:])
        lse = lse.index_select(0, self.pair_of).view(self.num_tiles, self.num_splits, *lse.shape[1:])
        lse[..., : self.rows].masked_fill_(self.unseen, -torch.inf)
        top = lse.amax(dim=1, keepdim=True).clamp(min=torch.finfo(lse.dtype).min)  # a query that pads sees nothing
        if sinks is not None:
            own = sinks.view(self.kv_heads, self.group).repeat_interleave(self.width, 1)
            own = torch.nn.functional.pad(own, (0, self.pad_rows))
            top = torch.maximum(top, own)
        weight = torch.exp(lse - top).unsqueeze(-1)
        total, norm = _added(part, weight)
        if total.sum().isnan():  # zero times a NaN of an unseen split must not be added
            part[..., : self.rows, :].masked_fill_(self.unseen.unsqueeze(-1), 0.0)
            total, norm = _added(part, weight)
        if sinks is not None:
            norm = norm + torch.exp(own - top[:, 0]).unsqueeze(-1)
        return (total / norm).to(part.dtype)

    def _reader(self, call: KernelCall) -> Reader:
        """Return a function that gathers the call's keys and its values.

        It gathers head by head, in the dtype of the queries.
        """
        entry = self.sides * self.kv_heads
        places = np.arange(entry).reshape(self.sides, 1, self.kv_heads, 1)  # within a block: all keys, all values
        rows = torch.from_numpy((call.blocks[:, None] * self._apart + places).reshape(-1))
        shape = (self.sides, len(call.tile), self.kv_heads, call.span, self.dim)

        def read(cache: Tensor) -> Sequence[Tensor]:
            found = by_rows(cache, cache.shape[-2] * self.dim).index_select(0, rows)
            found = found.to(self.dtype).view(shape)
            return found[0], found[-1]

        return read

    def _mask(self, call: KernelCall, dtype: torch.dtype) -> Tensor | None:
        """Return an additive mask [pairs, 1, rows or 1, span]: 0 where the query sees the key, -inf elsewhere."""
        if not call.masked:
            return None
        before, after = hidden_keys(dtype)
        mask = after[:, : call.span].index_select(0, torch.from_numpy(call.end.reshape(-1)))
        if call.begin is not None:
            mask += before[:, : call.span].index_select(0, torch.from_numpy(call.begin.reshape(-1)))
        mask = mask.view(len(call.tile), 1, self.width, call.span)
        if self.width == 1:
            return mask
        return torch.nn.functional.pad(mask.repeat(1, 1, self.group, 1), (0, 0, 0, self.pad_rows))

    def _bias(self, call: KernelCall, mask: Tensor | None, alibi: Tensor) -> Tensor:
        """Return the bias by distance with the ``mask``, fp32 [pairs, kv heads, rows, span].

        It is made anew in each layer: kept, it would be as large as the scores of a whole step.
        """
        distance = torch.arange(call.span) - torch.from_numpy(call.query)[:, :, None]
        bias = by_distance(alibi, distance).view(self.kv_heads, self.group, *distance.shape)
        bias = bias.permute(2, 0, 1, 3, 4).flatten(2, 3)
        bias = torch.nn.functional.pad(bias, (0, 0, 0, self.pad_rows))
        return bias if mask is None else bias.add_(mask)


def by_rows(cache: Tensor, numbers: int) -> Tensor:
    """Return ``cache`` [blocks, ...] as rows of ``numbers`` numbers, from a layer's first one on."""
    if cache.is_contiguous():
        return cache.view(-1, numbers)
    count = ((len(cache) - 1) * cache.stride(0) + cache[0].numel()) // numbers
    return cache.as_strided((count, numbers), (numbers, 1))


def _added(part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ordered sums over the splits.

    They are sums of ``part`` [tiles, splits, ...] times ``weight``, and of ``weight``.
    """
    total, norm = part[:, 0] * weight[:, 0], weight[:, 0]
    for i in range(1, part.shape[1]):
        total = total + part[:, i] * weight[:, i]
        norm = norm + weight[:, i]
    return total, norm


def widest_tile(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the most queries of a tile, a power of two.

    ``group`` heads share each key. All powers of two up to it are proven.
    """
    width = 1
    while width < MAX_TILE and _proven_rows(2 * width * group, head_dim, dtype, torch.get_num_threads()):
        width *= 2
    return width


def padded_rows(rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the query rows of a call for ``rows`` rows.

    Raises ModelError if no number was proven.
    """
    size = _proven_rows(rows, head_dim, dtype, torch.get_num_threads())
    if not size:
        raise ModelError(
            f"this machine has no attention kernel for {rows} query rows of head_dim {head_dim} for each key"
        )
    return size


@functools.cache
def _proven_rows(rows: int, head_dim: int, dtype: torch.dtype, threads: int) -> int:
    """Return the least proven number of rows, at least ``rows``; 0: none.

    It has the reference's bits on ``threads`` threads.
    """
    reference = _reference(head_dim, dtype, threads)
    sizes = sorted({-(-rows // step) * step for step in STEPS}) if reference else []
    return next((size for size in sizes if _agrees(size, reference, head_dim, dtype, threads)), 0)


@functools.cache
def _reference(head_dim: int, dtype: torch.dtype, threads: int) -> int:
    """Return the contract's number of rows; 0: none.

    It is the first number that gives a row the same bits at all places. MKL on processors without AVX512, for one,
    computes the last two of 32 rows by another kernel than the others.
    """
    return next((rows for rows in REFERENCES if _agrees(rows, rows, head_dim, dtype, threads)), 0)


def _agrees(size: int, reference: int, head_dim: int, dtype: torch.dtype, threads: int) -> bool:
    """Return whether ``size`` rows add in the reference's order in both products.

    The rows stand at other places than in the reference. The check covers every number of keys read, masked or not, for
    one pair and, if threads share the pairs, for several. From four key heads on the kernel may pack keys and values
    first. It packs for few pairs wherever it packs for many, so one pair with four heads is checked too.
    """
    order = torch.randperm(reference, generator=torch.Generator().manual_seed(size))
    order = order.repeat(-(-size // reference))[:size]
    for keys in SPANS:
        for products, expected in _expected(keys, reference, head_dim, dtype, threads):
            for span in (span for span in SPANS if span >= keys):
                for pairs, heads in ((1, 1), (1, 4)) if threads == 1 else ((1, 1), (1, 4), (3, 1)):
                    found = _attend(products._replace(query=products.query[:, :, order]), keys, span, pairs, heads)
                    if not bool((found == expected[:, :, order]).all()):
                        return False
    return True


class _Products(NamedTuple):
    """The two products of a call, each tensor [1, 1, rows or keys, dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


@functools.lru_cache(maxsize=16)
def _expected(
    keys: int, reference: int, head_dim: int, dtype: torch.dtype, threads: int
) -> list[tuple[_Products, Tensor]]:
    """Return two products with the reference's results.

    In the first the scores, in the second the outputs over the first ``keys`` keys are exactly zero. See
    :mod:`preheat.ops.proof`.
    """
    query, key, value = (noise(1, 1, n, head_dim, seed=seed) for seed, n in enumerate((reference, SPLIT, SPLIT), 1))
    scores = signed_pairs(query.clone(), -1.0), signed_pairs(key.clone(), 1.0), value.clone()
    for x, sign in ((key, 1.0), (value, -1.0)):
        x[:, :, :keys] = signed_pairs(x[:, :, :keys].mT.clone(), sign).mT
    found = []
    for tensors, scale in ((scores, 1e6), ((query, key, value), head_dim**-0.5)):
        q, k, v = (x.to(dtype) for x in tensors)
        products = _Products(q, k, v, scale)
        found.append((products, _attend(products, keys, SPLIT, 1, 1)))
    return found


def _attend(products: _Products, keys: int, span: int, pairs: int, heads: int) -> Tensor:
    """Run a call of ``heads`` equal key heads that reads ``span`` keys and sees ``keys`` of them.

    Returns [pairs, heads, rows, dim].
    """
    query, key, value = (x.expand(pairs, heads, -1, -1).contiguous() for x in products[:3])
    key, value = key[:, :, :span].contiguous(), value[:, :, :span].contiguous()
    mask = None
    if keys < span:
        mask = hidden_keys(query.dtype)[1][keys, :span].expand(pairs, 1, query.shape[2], span)
    part: Tensor = kernel(query, key, value, 0.0, False, attn_mask=mask, scale=products.scale)[0]
    return part


@functools.cache
def hidden_keys(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two masks of hidden keys.

    Row n of the first hides the keys before the n-th; row n of the second hides all keys from the n-th on.
    """
    hidden = torch.arange(SPLIT) < torch.arange(SPLIT + 1)[:, None]
    zero, hide = torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype)
    return torch.where(hidden, hide, zero), torch.where(hidden, zero, hide)
