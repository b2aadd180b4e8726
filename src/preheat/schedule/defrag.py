"""Compaction: swaps that move used blocks to the cache's bottom.

The contents of both blocks of a pair change places, so a free block with a cached prefix keeps it, under its new id.
Source: the defragmenter of vLLM on Gaudi.
"""

from __future__ import annotations

import logging

import numpy as np

from preheat.core import Swaps
from preheat.plan.cache_items import SWAP_SIZES
from preheat.schedule.blocks import BlockPool
from preheat.schedule.running import RunningSequences

logger = logging.getLogger(__name__)

THRESHOLD = 32

PAIRS_AT_ONCE = 8
"""Pairs that are swapped together where no graph asks for more. So a swap takes little memory."""


def compact(running: RunningSequences, threshold: int = THRESHOLD) -> Swaps | None:
    """Apply the next swaps to the pool and the block tables.

    Returns the swaps; None up to the threshold. No step may be in flight. The device must exchange the contents before
    the next step. More than 512 pairs take several calls.
    """
    if not is_due(running.pool, threshold):
        return None
    before = running.pool.refs > 0
    pairs = plan_swaps(before, threshold)
    running.swap(pairs)
    size = padded_size(len(pairs))
    if logger.isEnabledFor(logging.DEBUG):
        after = running.pool.refs > 0
        logger.debug(
            "Defragmentation: %d blocks swapped with as many free ones (padded to %d), %d in use, "
            "fragmentation %d before, %d after",
            len(pairs), size, running.pool.num_used, fragmentation(before), fragmentation(after),
        )  # fmt: skip
    return Swaps(pairs, size)


def is_due(pool: BlockPool, threshold: int) -> bool:
    """Return whether the cache is scattered.

    It is if the highest block in use lies more than ``threshold`` above the number in use.
    """
    return bool(pool.refs[pool.num_used + threshold + 1 :].max(initial=0))


def fragmentation(in_use: np.ndarray) -> int:
    """Return how far used blocks lie above their number.

    It is the highest block in use less the number in use; ``in_use`` is bool [blocks]. The pad block does not count.
    """
    used = np.flatnonzero(in_use[1:])
    return int(used[-1]) + 1 - len(used) if len(used) else 0


def plan_swaps(in_use: np.ndarray, threshold: int = THRESHOLD) -> np.ndarray:
    """Return the pairs of block ids to swap in one step.

    A pair is (used, free); the result is int32 [n, 2]. There are at most 512, and none up to the threshold. The highest
    block in use goes to the lowest free one, and so on until the free one is the higher. The pad block
    never moves. No id occurs twice, so the pairs may be swapped in any order.
    """
    if fragmentation(in_use) <= threshold:
        return np.empty((0, 2), np.int32)
    used = np.flatnonzero(in_use[1:])[::-1][: SWAP_SIZES[-1]] + 1
    free = np.flatnonzero(~in_use[1:])[: SWAP_SIZES[-1]] + 1
    count = min(len(used), len(free))
    pairs = np.stack([used[:count], free[:count]], axis=1).astype(np.int32)
    return pairs[pairs[:, 1] < pairs[:, 0]]


def padded_size(pairs: int) -> int:
    """Return the padded size of ``pairs`` swaps. Raises ValueError above 512."""
    for size in SWAP_SIZES:
        if pairs <= size:
            return size
    raise ValueError(f"{pairs} pairs are more than one step swaps ({SWAP_SIZES[-1]})")


def pad_pairs(pairs: np.ndarray, size: int | None = None) -> np.ndarray:
    """Return ``pairs`` padded to ``size``, or to the next size.

    Padding is (0, 0), the pad block itself.
    """
    size = padded_size(len(pairs)) if size is None else size
    padded = np.zeros((size, 2), np.int32)
    padded[: len(pairs)] = pairs
    return padded


def swap_parts(pairs: np.ndarray, size: int, *, padded: bool) -> list[np.ndarray]:
    """Return the swaps of ``pairs`` as parts, each int32 [n, 2].

    ``padded``: there is one part of ``size`` pairs. Otherwise parts have at most 8 pairs, and no pair comes twice.
    """
    if padded:
        return [pad_pairs(pairs, size)]
    distinct = np.unique(pairs, axis=0)
    return [distinct[at : at + PAIRS_AT_ONCE] for at in range(0, len(distinct), PAIRS_AT_ONCE)]
