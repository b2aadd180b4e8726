"""What attention needs to know of a step: which queries meet which keys, cut at fixed boundaries.

Keys are cut into splits of ``SPLIT`` tokens at absolute positions, queries into tiles of one sequence each. A *pair*
is one tile against one split; every pair is an independent piece of work, and a tile's partial results are merged in
the order of its splits. Because the cuts depend on positions alone, the bits of a token's attention do not depend on
what else is in the step, on how its prompt was chunked or on what came from the prefix cache.

Pure numpy; :mod:`preheat.ops.attention` does the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SPLIT = 256
"""Tokens of a KV split. Part of the contract: another value gives other bits."""

MAX_TILE = 64
"""Queries of a tile at most. Not part of the contract: it changes no bits."""

MIN_SPAN = 64
"""Keys read for a pair at least; a span is a power of two up to ``SPLIT`` and changes no bits."""

FEW_PAIRS = 8
"""Up to so many pairs run as one call: more calls would cost more than reading keys that are masked."""


@dataclass(slots=True)
class Call:
    """Pairs that read equally many keys, run by one kernel call.

    Pair p is tile ``tile[p]`` against ``span`` keys held by the physical blocks ``blocks[p]``. Its query q sees the keys
    from ``begin[p, q]`` up to ``end[p, q]``; without ``masked`` all real queries see all keys. ``begin`` is None where
    no layer limits how far back a query sees.
    """

    tile: np.ndarray
    blocks: np.ndarray
    span: int
    masked: bool
    begin: np.ndarray | None
    end: np.ndarray


@dataclass(slots=True)
class Tiles:
    """Query tiles of one step, and the pairs they form with splits of keys.

    ``queries`` [tiles, width] indexes the step's tokens, ``valid`` [tiles, width] tells real queries from padding.
    ``pair_of`` [tiles, splits] numbers each tile's pairs in split order, counting through ``calls``; ``num_pairs``
    stands where a tile has fewer than the most. ``seen`` [tiles, splits, width]: does the query see any key there?
    """

    queries: np.ndarray
    valid: np.ndarray
    calls: list[Call]
    pair_of: np.ndarray
    seen: np.ndarray
    num_pairs: int


def plan_tiles(
    first_query: np.ndarray,
    first_position: np.ndarray,
    extend: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    window: int | None,
    max_keys: int,
) -> Tiles:
    """Cut rows into tiles and pairs. Row r has ``extend[r]`` queries from token ``first_query[r]`` of the step on.

    ``block_tables`` [rows, blocks] are the rows' physical blocks; ``window`` limits how far back a query sees;
    ``max_keys`` bounds the keys that one call gathers.
    """
    width = min(MAX_TILE, _power_of_two(int(extend.max())))
    tiles_per_row = -(-extend // width)
    row = np.repeat(np.arange(len(extend)), tiles_per_row)
    offset = _ranges(tiles_per_row) * width
    valid = (offset[:, None] + np.arange(width)) < extend[row][:, None]
    first = first_position[row] + offset
    last = first + valid.sum(axis=1) - 1
    position = np.where(valid, first[:, None] + np.arange(width), -1)

    oldest = np.maximum(first - window + 1, 0) if window else np.zeros_like(first)
    splits = last // SPLIT - oldest // SPLIT + 1
    tile = np.repeat(np.arange(len(row)), splits)
    nth = _ranges(splits)
    start = (oldest[tile] // SPLIT + nth) * SPLIT
    keys = np.minimum(last[tile] + 1 - start, SPLIT)
    full = start + SPLIT - 1 <= first[tile]
    if window:
        full &= start > last[tile] - window
    spans = np.maximum(_power_of_two(keys), max(MIN_SPAN, block_size))
    if len(tile) <= FEW_PAIRS:
        full[:] = full.all()
        spans[:] = spans.max()

    order = np.lexsort((spans, ~full))
    number = np.empty(len(tile), np.int64)
    number[order] = np.arange(len(tile))
    tile_of, start_of, span_of, full_of = tile[order], start[order], spans[order], full[order]
    columns = start_of[:, None] // block_size + np.arange(max(SPLIT // block_size, 1))
    blocks = block_tables[row[tile_of][:, None], np.minimum(columns, block_tables.shape[1] - 1)].astype(np.int64)
    query = position[tile_of] - start_of[:, None]
    end = np.minimum(np.maximum(query + 1, 0), SPLIT)
    begin = np.minimum(np.maximum(query - window + 1, 0), SPLIT) if window else None
    calls = []
    edges = np.flatnonzero((np.diff(span_of) != 0) | (np.diff(full_of) != 0)) + 1
    for at, to in zip([0, *edges.tolist()], [*edges.tolist(), len(order)], strict=True):
        span, step = int(span_of[at]), max(1, max_keys // int(span_of[at]))
        for i in range(at, to, step):
            some = slice(i, min(i + step, to))
            seen_from = None if begin is None else begin[some]
            calls.append(
                Call(tile_of[some], blocks[some, : span // block_size], span, not full_of[at], seen_from, end[some])
            )

    pair_of = np.full((len(row), int(splits.max())), len(tile), np.int64)
    pair_of[tile, nth] = number
    split_start = (oldest[:, None] // SPLIT + np.arange(pair_of.shape[1])) * SPLIT
    seen = valid[:, None, :] & (split_start[:, :, None] <= position[:, None, :])
    if window:
        seen &= (split_start + SPLIT)[:, :, None] > position[:, None, :] - window + 1
    queries = np.where(valid, (first_query[row] + offset)[:, None] + np.arange(width), 0)
    return Tiles(queries, valid, calls, pair_of, seen, len(tile))


def _ranges(counts: np.ndarray) -> np.ndarray:
    """0..counts[0]-1, 0..counts[1]-1, ... in one array."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def _power_of_two(value):  # noqa: ANN001, ANN202 - int or array, as it came
    """The least power of two that is not below ``value``."""
    if isinstance(value, int):
        return 1 << (value - 1).bit_length()
    return (1 << np.ceil(np.log2(np.maximum(value, 1))).astype(np.int64)).astype(np.int64)
