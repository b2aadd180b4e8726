"""Paged attention of rows that decode.

A row has one query, and the rows are the step's first tokens. Contract and bits are equal to
:mod:`preheat.backends.cpu.paged_attention`. Work for several steps is done once and kept: the pairs of a row and a KV
split, and the places of their keys and results. A step only moves the end of the keys that each row sees.

Blocks of a whole split can be read where they lie. One kernel call reads neighbors in memory. Another call reads a
block that several rows share, repeated without a copy. Smaller blocks are gathered. If the cache has fewer bits than
the queries, every call widens it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preheat.backends.cpu.hidden import attend
from preheat.backends.cpu.paged_attention import by_rows, hidden_keys, padded_rows
from preheat.backends.cpu.tiles import MIN_SPAN, SPLIT, ranges, spans
from preheat.ops.distances import by_distance


class Heads(NamedTuple):
    """Sizes of a layer's attention that decide its cutting into work, and the group with its block table.

    A row of one token is alike in causal and in other attention: the token sees no key behind it. ``sides``: a head has
    a key and a value in the cache, or one entry for both. A layer that is not ``own`` reads another layer's entries.
    From one block to the next are ``apart`` rows; 0 stands for the rows of a block.
    """

    window: int | None
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    sides: int = 2
    group: int = 0
    own: bool = True
    apart: int = 0

    @property
    def step(self) -> int:
        """Rows from one block to the next."""
        return self.apart or self.rows

    @property
    def given(self) -> int:
        """Heads of a token that the layer is given: queries, and its own keys and values."""
        return self.heads + self.rows * self.own

    @property
    def rows(self) -> int:
        """Rows of the cache in a block: a key and a value of each head, or a row for both."""
        return self.sides * self.kv_heads


class _Call(NamedTuple):
    """Pairs ``first`` to ``last`` - 1, which read ``span`` keys each.

    They read in place from the block ``block`` on, the same block for all if ``shared``; or they read the ``gathered``
    rows of the cache.
    """

    first: int
    last: int
    span: int
    block: int = 0
    shared: bool = False
    gathered: Tensor | None = None

    def keys_and_values(self, cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values [pairs, kv heads, span, dim] in ``dtype``.

        ``cache`` is [blocks, sides, kv heads, slots, dim].
        """
        _, sides, kv_heads, slots, dim = cache.shape
        count = self.last - self.first
        if self.gathered is not None:
            rows = by_rows(cache, slots * dim).index_select(0, self.gathered)
            found = rows.to(dtype).view(sides, count, kv_heads, self.span, dim)
            return found[0], found[-1]
        blocks = cache[self.block : self.block + (1 if self.shared else count), :, :, : self.span].to(dtype)
        blocks = blocks.expand(count, -1, -1, -1, -1)
        return blocks[:, 0], blocks[:, -1]


class DecodeAttention:
    """Attention of rows with one query each.

    Rows are at ``position`` int64 [rows], with their blocks in the rows ``slots`` of ``block_table``. Results are given
    for ``tokens`` tokens; tokens beyond the rows are padding. The work is good for ``steady`` more steps of the same
    rows. ``max_keys`` limits the keys that a call gathers. With ``in_place``, which needs blocks of ``SPLIT`` tokens,
    nothing is gathered.
    """

    def __init__(
        self,
        position: np.ndarray,
        slots: np.ndarray,
        block_table: np.ndarray,
        heads: Heads,
        dtype: torch.dtype,
        *,
        block_size: int,
        tokens: int,
        max_keys: int,
        in_place: bool,
    ) -> None:
        self.heads, self.tokens, self._dtype = heads, tokens, dtype
        first = np.maximum(position - heads.window + 1, 0) // SPLIT if heads.window else np.zeros_like(position)
        splits = position // SPLIT + 1 - first
        row = np.repeat(np.arange(len(position)), splits)
        split = first[row] + ranges(splits)
        start = split * SPLIT
        keys = np.minimum(position[row] + 1 - start, SPLIT)
        if in_place:
            order, self._calls, span = _in_place(block_table[slots[row], split], keys)
        else:
            columns = start[:, None] // block_size + np.arange(max(SPLIT // block_size, 1))
            blocks = block_table[slots[row][:, None], np.minimum(columns, block_table.shape[1] - 1)]
            order, self._calls, span = _gathering(blocks.astype(np.int64), keys, block_size, heads, max_keys)
        self.steady = min(_steady(position, keys, span, block_size), _until_behind(position, first, heads.window))
        self._hidden = hidden_keys(dtype)
        self._row = torch.from_numpy(row[order].astype(np.int32))
        self._before = torch.from_numpy((start[order] - 1).astype(np.int32))
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._masks: list[Tensor] = []
        self._lay_out(row, order, splits, padded_rows(heads.heads // heads.kv_heads, heads.dim, dtype))

    def _lay_out(self, row: np.ndarray, order: np.ndarray, splits: np.ndarray, query_rows: int) -> None:
        """Lay out the rows of queries and of results.

        Queries are rows of the step's heads; results are rows of all pairs' results.
        """
        heads, kv_heads, given = self.heads.heads, self.heads.kv_heads, self.heads.given
        group = heads // kv_heads
        self._query_shape = len(row), kv_heads, query_rows, self.heads.dim
        padded = np.minimum(np.arange(query_rows), group - 1)  # rows that pad repeat the last head
        head = (np.arange(kv_heads)[:, None] * group + padded).reshape(-1)
        self._heads = torch.from_numpy(head)
        self._queries = torch.from_numpy((row[order][:, None] * given + head).reshape(-1))
        number = np.empty(len(row), np.int64)
        number[order] = np.arange(len(row))
        most = int(splits.max())
        pair_of = np.zeros((most, self.tokens), np.int64)
        pair_of[:, : len(splits)] = number[splits.cumsum() - splits]  # the row's own first pair, where there is none
        seen = np.arange(most)[:, None] < splits
        pair_of[:, : len(splits)].T[seen.T] = number
        place = np.arange(heads) % group * kv_heads + np.arange(heads) // group
        self._results = torch.from_numpy((pair_of[:, :, None] * (query_rows * kv_heads) + place).reshape(-1))
        unseen = np.zeros((most, self.tokens), bool)
        unseen[:, : len(splits)] = ~seen
        self._unseen = torch.from_numpy(unseen.repeat(heads, 1)) if most > 1 else None

    def move(self, positions: Tensor) -> None:
        """Move the rows to ``positions`` int32 [tokens]."""
        before, after = self._hidden
        at = positions.index_select(0, self._row).sub_(self._before)
        self._at = at - 1  # each row's position in the split
        mask = after.index_select(0, at.clamp(max=SPLIT))
        if self.heads.window:
            mask += before.index_select(0, at.sub_(self.heads.window).clamp_(min=0))
        mask = mask.view(-1, 1, 1, SPLIT)
        rows = self._query_shape[2]
        self._masks = [mask[call.first : call.last, :, :, : call.span].expand(-1, 1, rows, -1) for call in self._calls]

    def __call__(
        self, qkv: Tensor, layer: int, cache: Tensor, scale: float, alibi: Tensor | None = None, *,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend with the queries of ``qkv`` over the ``cache`` of ``layer``.

        Returns [tokens, heads * dim]. ``qkv`` is [tokens, given heads, dim]. ``alibi``, fp32 [heads], are
        slopes; ``sinks``, fp32 [heads], are scores without keys.
        """
        masks = self._masks
        if alibi is not None:
            masks = [self._bias(call, mask, alibi) for call, mask in zip(self._calls, masks, strict=True)]
        query = qkv.view(-1, self.heads.dim).index_select(0, self._queries).view(self._query_shape)
        done = [
            attend(query[call.first : call.last], *read, mask, scale)
            for call, read, mask in zip(self._calls, self._read(layer, cache), masks, strict=True)
        ]
        found = _flat([part for part, _ in done]).view(-1, self.heads.dim).index_select(0, self._results)
        if self._unseen is not None or sinks is not None:
            found = self._merge(found, _flat([lse for _, lse in done]).index_select(0, self._results), sinks)
        return found.view(self.tokens, -1)

    def _bias(self, call: _Call, mask: Tensor, alibi: Tensor) -> Tensor:
        """Return the bias by distance with the ``mask`` of a call, fp32 [pairs, kv heads, rows, span]."""
        _, kv_heads, rows, _ = self._query_shape
        distance = torch.arange(call.span) - self._at[call.first : call.last, None]
        bias = by_distance(alibi.index_select(0, self._heads), distance).view(kv_heads, rows, *distance.shape)
        return bias.permute(2, 0, 1, 3).add(mask)

    def _read(self, layer: int, cache: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each call; keep views of the cache."""
        views = self._views.get(layer)
        if views is None:
            views = [call.keys_and_values(cache, self._dtype) for call in self._calls]
            if self._calls[0].gathered is None and cache.dtype == self._dtype:
                self._views[layer] = views
        return views

    def _merge(self, part: Tensor, lse: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Add up each row's splits in rising order, then the sinks: ``part`` [splits * tokens * heads, dim]."""
        if self._unseen is None:
            lse = lse.view(1, -1)
        else:
            lse = lse.view(self._unseen.shape).masked_fill_(self._unseen, -torch.inf)
        top = lse.amax(dim=0)
        if sinks is not None:
            own = sinks.repeat(self.tokens)
            top = torch.maximum(top, own)
        weight = torch.exp(lse - top).unsqueeze(-1)
        weighted = part.view(*lse.shape, -1) * weight
        total, norm = weighted[0], weight[0]
        for nth in range(1, len(weight)):
            total += weighted[nth]
            norm += weight[nth]
        if sinks is not None:
            norm += torch.exp(own - top).unsqueeze(-1)
        return (total / norm).to(part.dtype)


def _flat(results: list[Tensor]) -> Tensor:
    """Return the calls' ``results`` [pairs, kv heads, rows, ...] in one tensor.

    The order is by pairs, then rows, then heads.
    """
    flat = [result.transpose(1, 2).reshape(-1) for result in results]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _in_place(block: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, list[_Call], np.ndarray]:
    """Return the order of pairs, their calls, and their spans.

    Each pair reads a ``block``. A call reads neighboring blocks together.
    """
    order = block.argsort(kind="stable")
    gaps = np.diff(block[order])
    same = np.concatenate(([False], gaps == 0, [False]))
    shared = same[1:] | same[:-1]
    cut = (gaps > 1) | ((gaps == 1) & (shared[1:] | shared[:-1]))
    edges = [0, *(cut.nonzero()[0] + 1).tolist(), len(order)]
    keys, calls, spans = keys[order], [], np.empty(len(order), np.int64)
    for first, last in itertools.pairwise(edges):
        span = max(MIN_SPAN, 1 << (int(keys[first:last].max()) - 1).bit_length())
        calls.append(_Call(first, last, span, int(block[order[first]]), bool(shared[first])))
        spans[order[first:last]] = span
    return order, calls, spans


def _gathering(
    blocks: np.ndarray, keys: np.ndarray, block_size: int, heads: Heads, max_keys: int
) -> tuple[np.ndarray, list[_Call], np.ndarray]:
    """Return as :func:`_in_place`, for pairs of several ``blocks`` [pairs, n].

    A call gathers at most ``max_keys``.
    """
    span = spans(keys, np.zeros(len(keys), bool), max(MIN_SPAN, block_size))
    order = span.argsort(kind="stable")
    ordered, calls = span[order], []
    places = np.arange(heads.rows).reshape(heads.sides, 1, heads.kv_heads, 1)  # within a block: all keys, all values
    edges = [0, *((np.diff(ordered) != 0).nonzero()[0] + 1).tolist(), len(order)]
    for begin, end in itertools.pairwise(edges):
        width = int(ordered[begin])
        count = max(1, max_keys // width)
        for first in range(begin, end, count):
            last = min(first + count, end)
            read = blocks[order[first:last], : width // block_size]
            rows = torch.from_numpy((read[:, None] * heads.step + places).reshape(-1))
            calls.append(_Call(first, last, width, gathered=rows))
    return order, calls, span


def _steady(position: np.ndarray, keys: np.ndarray, span: np.ndarray, block_size: int) -> int:
    """Return for how many more steps the work stays valid.

    It is valid while no row enters a block or sees more keys than are read.
    """
    steady = int((block_size - 1 - position % block_size).min())
    return int((span - keys)[keys < SPLIT].min(initial=steady))


def _until_behind(position: np.ndarray, first: np.ndarray, window: int | None) -> int:
    """Return for how many more steps each ``first`` split counts.

    It counts while the row sees some key of it.
    """
    left = (first + 1) * SPLIT - 1 - (position - window + 1) if window else np.full(1, SPLIT)
    return int(left.min())
