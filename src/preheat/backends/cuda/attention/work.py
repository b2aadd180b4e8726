"""Cutting of attention into pieces of work, on the host.

Decoding rows are cut into KV splits, longer runs into tiles of queries. Keys are cut at absolute multiples of
``SPLIT``, so that a token's pieces depend on its position alone. Pure numpy.
"""

from __future__ import annotations

import numpy as np

from preheat.backends.cuda.facts import FACTS

SPLIT = FACTS.split
"""Keys of a split. Part of attention's contract: another value gives other bits."""


MOST_SPLITS = 1 << 20
"""Base of the number of a piece of decoding.

The number is the split, plus this base for each query of the tile after the first.
"""

WHOLE_CONTEXT = MOST_SPLITS - 1
"""In place of a split: the whole context."""

BEHIND = 256
"""Base of the second number of a tile: above it are the tokens of the run behind the tile, below it its own."""


def decode_work(
    token_index: np.ndarray,
    positions: np.ndarray,
    split: int,
    window: int | None,
    *,
    queries: np.ndarray | None = None,
    room: int | None = None,
) -> np.ndarray:
    """Return the pieces of tiles of queries: int32 [pieces, 2] of (first token, split).

    The pieces of a tile are consecutive and in rising order. ``token_index`` and ``positions`` [tiles] hold the first
    query of each tile, as a token of the step and as a position in its sequence. ``queries`` [tiles] holds the queries
    of each tile, by default one. Splits wholly before the ``window`` of all of a tile's queries are left out. If there
    are more pieces than ``room``, each tile is one piece.
    """
    beyond = np.zeros_like(positions) if queries is None else queries - 1
    last = (positions + beyond) // split
    counts = last + 1
    if window:
        counts -= np.maximum(positions - (window - 1), 0) // split
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if room is not None and total > room:
        whole = beyond * MOST_SPLITS + np.full(len(positions), WHOLE_CONTEXT)
        return np.stack((token_index, whole), 1).astype(np.int32)
    work = np.empty((total, 2), np.int32)
    work[:, 0] = token_index.repeat(counts)
    work[:, 1] = np.arange(total) - (ends - last - 1).repeat(counts)
    if queries is not None:
        work[:, 1] += (beyond * MOST_SPLITS).repeat(counts)
    return work


def query_tiles(ends: np.ndarray, extend: np.ndarray, first: np.ndarray, tile: int) -> tuple[np.ndarray, ...]:
    """Cut rows of ``extend`` [rows] tokens into tiles of at most ``tile`` tokens.

    Rows end before the step's tokens ``ends`` and begin at the positions ``first`` of their sequences. Returns the
    first token of each tile, its position and its length.
    """
    counts = -(-extend // tile)
    offset = (np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)) * tile
    longest = extend.repeat(counts) - offset
    return (ends - extend).repeat(counts) + offset, first.repeat(counts) + offset, np.minimum(longest, tile)


def steady_steps(positions: np.ndarray, split: int, window: int | None) -> int:
    """Return for how many more steps the pieces stay the same.

    In each step, every query is one position further.
    """
    into = positions % split
    if window:
        oldest = positions - (window - 1)  # negative where the window has not begun to move
        into = np.maximum(into, np.minimum(oldest, oldest % split))
    return split - 1 - int(into.max(initial=0))


def prefill_tiles(
    starts: np.ndarray, extends: np.ndarray, positions: np.ndarray, tile: int, *, sides: bool = False
) -> np.ndarray:
    """Return the tiles of longer runs: int32 [tiles, 2] of (first token, number of tokens).

    A tile has at most ``tile`` tokens. Run r is ``extends[r]`` tokens, from token ``starts[r]`` of the step and
    position ``positions[r]`` of its sequence on. Tiles with the most keys take longest, and come first. If a token
    sees both ``sides``, the number of tokens includes :data:`BEHIND` for each token of the run behind the tile.
    """
    counts = -(-extends // tile)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    offset = (np.arange(total) - np.repeat(ends - counts, counts)) * tile
    left = np.repeat(extends, counts) - offset
    own = np.minimum(left, tile)
    order = np.argsort(-(np.repeat(positions + extends * sides, counts) + offset * (not sides)), kind="stable")
    tiles = np.empty((total, 2), np.int32)
    tiles[:, 0] = (np.repeat(starts, counts) + offset)[order]
    tiles[:, 1] = (own + BEHIND * (left - own) * sides)[order]
    return tiles
