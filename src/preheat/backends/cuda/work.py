"""How attention is cut into pieces of work, on the host: splits of keys for decoding rows, tiles of longer runs.

Keys are cut at absolute multiples of ``SPLIT``, so that a token's pieces depend on its position alone. Pure numpy.
"""

from __future__ import annotations

import numpy as np

from preheat.backends.cuda.facts import FACTS

SPLIT = FACTS.split
"""Keys of a split. Part of attention's contract: another value gives other bits."""


MOST_SPLITS = 1 << 20
"""A piece of decoding says in one number which split of its tile it is, and in multiples of this how many queries the
tile has beyond the first."""

WHOLE_CONTEXT = MOST_SPLITS - 1
"""In place of a split: all of them."""


def decode_work(
    token_index: np.ndarray,
    positions: np.ndarray,
    split: int,
    window: int | None,
    *,
    queries: np.ndarray | None = None,
    room: int | None = None,
) -> np.ndarray:
    """The pieces of tiles of queries: int32 [pieces, 2] of (first token, split), a tile's in rising order one after
    another.

    ``token_index`` and ``positions`` [tiles] say which token of the step the first query of each tile is and where in
    its sequence; ``queries`` [tiles] how many there are, by default one. Splits that lie wholly before the ``window``
    of all of a tile's queries are left out. If the pieces are more than ``room``, each tile is one piece.
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
    """Rows of ``extend`` [rows] tokens, which end before the step's tokens ``ends`` and begin at the positions
    ``first`` of their sequences, cut into tiles of at most ``tile``: the first token of each, its position and length.
    """
    counts = -(-extend // tile)
    offset = (np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)) * tile
    longest = extend.repeat(counts) - offset
    return (ends - extend).repeat(counts) + offset, first.repeat(counts) + offset, np.minimum(longest, tile)


def steady_steps(positions: np.ndarray, split: int, window: int | None) -> int:
    """For how many more steps, in each of which every query is one position further, the pieces stay the same."""
    into = positions % split
    if window:
        oldest = positions - (window - 1)  # negative where the window has not begun to move
        into = np.maximum(into, np.minimum(oldest, oldest % split))
    return split - 1 - int(into.max(initial=0))


def prefill_tiles(starts: np.ndarray, extends: np.ndarray, positions: np.ndarray, tile: int) -> np.ndarray:
    """The pieces of longer runs: int32 [pieces, 2] of (first token, number of tokens, at most ``tile``).

    Run r is ``extends[r]`` tokens from token ``starts[r]`` of the step and position ``positions[r]`` of its sequence
    on. The pieces that see most keys, which take longest, come first.
    """
    counts = -(-extends // tile)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    offset = (np.arange(total) - np.repeat(ends - counts, counts)) * tile
    order = np.argsort(-(np.repeat(positions, counts) + offset), kind="stable")
    tiles = np.empty((total, 2), np.int32)
    tiles[:, 0] = (np.repeat(starts, counts) + offset)[order]
    tiles[:, 1] = np.minimum(np.repeat(extends, counts) - offset, tile)[order]
    return tiles
