"""How attention is cut into pieces of work, on the host: splits of keys for single queries, tiles of longer runs.

Keys are cut at absolute multiples of ``SPLIT``, so that a token's pieces depend on its position alone. Pure numpy.
"""

from __future__ import annotations

import numpy as np

from preheat.backends.cuda.facts import FACTS

SPLIT = FACTS.split
"""Keys of a split. Part of attention's contract: another value gives other bits."""


def decode_work(token_index: np.ndarray, positions: np.ndarray, split: int, window: int | None) -> np.ndarray:
    """The pieces of single queries: int32 [pieces, 2] of (token, split), a token's in rising order one after another.

    ``token_index`` and ``positions`` [rows] say which token of the step each query is and where in its sequence.
    Splits that lie wholly before a query's ``window`` are left out.
    """
    last = positions // split
    counts = last + 1
    if window:
        counts -= np.maximum(positions - (window - 1), 0) // split
    ends = counts.cumsum()
    work = np.empty((int(ends[-1]) if len(ends) else 0, 2), np.int32)
    work[:, 0] = token_index.repeat(counts)
    work[:, 1] = np.arange(len(work)) - (ends - last - 1).repeat(counts)
    return work


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
