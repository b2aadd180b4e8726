"""Tiles of a step for attention, cut at fixed boundaries.

They say which queries meet the keys of a split. Keys are cut into splits of ``SPLIT`` tokens at absolute positions,
queries into tiles of one sequence each. A *pair* is one tile against one split. Every pair is an independent piece of
work, and a tile's partial results are merged in the order of its splits. The cuts depend only on positions. So other
rows of the step, the chunks of a prompt and blocks from the prefix cache change no bits of a token's attention.

Pure numpy; :mod:`preheat.backends.cpu.attention` does the arithmetic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from preheat.backends.cpu.facts import FACTS

SPLIT = FACTS.split
"""Tokens of a KV split.

Part of the contract: another value gives other bits.
"""

MAX_TILE = 64
"""Most queries of a tile.

Not part of the contract: it changes no bits.
"""

MIN_SPAN = 64
"""Least keys read for a pair.

A span is a power of two up to ``SPLIT`` and changes no bits.
"""

KEYS_PER_CALL = 2048
"""Number of needlessly read keys that cost as much as a call."""


@dataclass(slots=True)
class KernelCall:
    """Pairs that read equally many keys, run by one kernel call.

    Pair p is tile ``tile[p]`` against ``span`` keys in the physical blocks ``blocks[p]``. Its query q sees keys from
    ``begin[p, q]`` up to ``end[p, q]``. Without ``masked`` all real queries see all keys. ``begin`` is None if no layer
    limits how far back a query sees. A query that sees nothing is given all keys, lest its softmax be of nothing; its
    output is not used. ``query[p, q]`` is the query's position, counted from the first key of the pair's split.
    """

    tile: np.ndarray
    blocks: np.ndarray
    span: int
    masked: bool
    begin: np.ndarray | None
    end: np.ndarray
    query: np.ndarray


@dataclass(slots=True)
class Tiles:
    """Query tiles of one step, and their pairs with splits of keys.

    ``queries`` [tiles, width] indexes the step's tokens, ``valid`` [tiles, width] tells real queries from padding.
    ``pair_of`` [tiles, splits] numbers each tile's pairs in split order, counting through ``calls``; a tile with fewer
    splits than the most has any number in the rest. ``seen`` [tiles, splits, width] tells whether the query sees any
    key of the split.
    """

    queries: np.ndarray
    valid: np.ndarray
    calls: list[KernelCall]
    pair_of: np.ndarray
    seen: np.ndarray


@dataclass(slots=True)
class Rows:
    """Rows of a step, with their queries and blocks.

    Row r has ``extend[r]`` queries, from token ``first_query[r]`` of the step on. Their positions begin at
    ``first_position[r]`` of the sequence, and ``block_tables[r]`` are the sequence's physical blocks.
    """

    first_query: np.ndarray
    first_position: np.ndarray
    extend: np.ndarray
    block_tables: np.ndarray


def plan_tiles(
    rows: Rows,
    block_size: int,
    window: int | None,
    max_keys: int,
    *,
    widest: int = MAX_TILE,
    causal: bool = True,
) -> Tiles:
    """Cut ``rows`` into tiles and pairs.

    ``window`` limits how far back a query sees. ``max_keys`` limits the keys that a call gathers. ``widest`` (a power
    of two) limits the queries of a tile. If not ``causal``, a query sees the whole row, and as far ahead as back.
    """
    width = min(widest, _power_of_two(int(rows.extend.max())))
    tiles_per_row = -(-rows.extend // width)
    row = np.repeat(np.arange(len(rows.extend)), tiles_per_row)
    offset = ranges(tiles_per_row) * width
    step = np.arange(width)
    valid = offset[:, None] + step < rows.extend[row][:, None]
    first = rows.first_position[row] + offset
    position = np.where(valid, first[:, None] + step, -1)
    queries = np.where(valid, (rows.first_query[row] + offset)[:, None] + step, 0)
    last = first + valid.sum(axis=1) - 1
    reach = position if causal else _both_sides(position, (rows.first_position + rows.extend - 1)[row], window)
    reached = reach.max(axis=1)

    first_split = np.maximum(first - window + 1, 0) // SPLIT if window else np.zeros_like(first)
    splits = reached // SPLIT - first_split + 1
    tile, nth = np.repeat(np.arange(len(row)), splits), ranges(splits)
    start = (first_split[tile] + nth) * SPLIT
    full = start + SPLIT - 1 <= reach[tile, 0]
    if window:
        full &= start > last[tile] - window
    if width == 1:
        full[:] = False  # one mask row a pair costs less than a call of its own
    span = spans(np.minimum(reached[tile] + 1 - start, SPLIT), full, max(MIN_SPAN, block_size))

    columns = start[:, None] // block_size + np.arange(max(SPLIT // block_size, 1))
    last_column = rows.block_tables.shape[1] - 1
    blocks = rows.block_tables[row[tile][:, None], np.minimum(columns, last_column)].astype(np.int64)
    pairs = _Pairs(tile, start, span, full, blocks)
    number = np.empty(len(tile), np.int64)
    order = np.lexsort((span, ~full))
    number[order] = np.arange(len(order))
    calls = _gathering(pairs.take(order), (position, reach), (block_size, window, max_keys))
    pair_of = np.zeros((len(row), int(splits.max())), np.int64)
    pair_of[tile, nth] = number
    split_start = (first_split[:, None] + np.arange(pair_of.shape[1])) * SPLIT
    seen = valid[:, None, :] & (split_start[:, :, None] <= reach[:, None, :])
    if window:
        seen &= (split_start + SPLIT)[:, :, None] > position[:, None, :] - window + 1
    return Tiles(queries, valid, calls, pair_of, seen)


def spans(keys: np.ndarray, full: np.ndarray, least: int) -> np.ndarray:
    """Return how many keys each pair reads, for the ``keys`` it needs.

    The numbers are few, as each is a call of its own.
    """
    span = np.where(full, SPLIT, least)
    narrow = least
    while narrow < SPLIT:
        wide = narrow * 2
        span[(keys > narrow) & ~full] = wide
        narrow = wide
    narrow = least
    while narrow < SPLIT:
        some = (span == narrow) & ~full
        wider = span[(span > narrow) & ~full]
        if len(wider) and int(some.sum()) * (int(wider.min()) - narrow) < KEYS_PER_CALL:
            span[some] = wider.min()
        narrow *= 2
    return span


@dataclass(slots=True)
class _Pairs:
    """Pairs of a tile and a KV split.

    Pair p is tile ``tile[p]`` against ``span[p]`` keys from position ``start[p]`` on, in the physical blocks
    ``blocks[p]``. If ``full[p]``, its real queries see all keys.
    """

    tile: np.ndarray
    start: np.ndarray
    span: np.ndarray
    full: np.ndarray
    blocks: np.ndarray

    def take(self, some: np.ndarray) -> _Pairs:
        return _Pairs(self.tile[some], self.start[some], self.span[some], self.full[some], self.blocks[some])


def _gathering(
    pairs: _Pairs, places: tuple[np.ndarray, np.ndarray], sizes: tuple[int, int | None, int]
) -> list[KernelCall]:
    """Cut the pairs, given in the order of their calls, into calls.

    A call has one span and at most ``max_keys`` keys. ``places`` are the queries' positions, and the last positions
    that they see.
    """
    block_size, window, max_keys = sizes
    query, reach = (place[pairs.tile] - pairs.start[:, None] for place in places)
    begin, end = _visible(query, reach, window)
    calls = []
    edges = np.flatnonzero((np.diff(pairs.span) != 0) | (np.diff(pairs.full) != 0)) + 1
    for at, to in itertools.pairwise([0, *edges.tolist(), len(pairs.tile)] if len(pairs.tile) else []):
        span, masked = int(pairs.span[at]), not pairs.full[at]
        count = max(1, max_keys // span)
        for i in range(at, to, count):
            some = slice(i, min(i + count, to))
            seen_from = None if begin is None else begin[some]
            blocks = pairs.blocks[some, : span // block_size]
            calls.append(KernelCall(pairs.tile[some], blocks, span, masked, seen_from, end[some], query[some]))
    return calls


def _both_sides(position: np.ndarray, last: np.ndarray, window: int | None) -> np.ndarray:
    """Return the last position that each query sees, in rows that end at ``last``; -1 for queries that pad."""
    ahead = last[:, None] if window is None else np.minimum(last[:, None], position + window - 1)
    return np.where(position < 0, -1, ahead)


def _visible(query: np.ndarray, reach: np.ndarray, window: int | None) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the first and the end of the keys that queries see.

    A ``query`` is a position from its split's start, ``reach`` the last position that it sees.
    """
    end = np.minimum(reach + 1, SPLIT)
    begin = np.maximum(query - window + 1, 0) if window else None
    blind = end <= (0 if begin is None else begin)
    end[blind] = SPLIT
    if begin is not None:
        begin[blind] = 0
    return begin, end


def ranges(counts: np.ndarray) -> np.ndarray:
    """Return 0..counts[0]-1, 0..counts[1]-1, ... in one array."""
    ends = np.cumsum(counts)
    ranges: np.ndarray = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return ranges


def _power_of_two(value: int) -> int:
    """Return the least power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()
