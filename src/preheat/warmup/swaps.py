"""The warm-up of compaction: every padded size once, on blocks 0 and 1, leaving the cache as it was.

Source: the defragmenter's warm-up of vLLM on Gaudi. Each swap of the pair (1, 0) exchanges the two blocks, so an even
number of swaps restores them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from preheat.core import Swaps
from preheat.execute.executor import Executor
from preheat.plan import lines
from preheat.plan.items import SWAP_SIZES

logger = logging.getLogger(__name__)

PAIR = (1, 0)


def run_swap(executor: Executor, size: int) -> None:
    """Exchange blocks 1 and 0 by the program of ``size`` pairs, which are all the same one.

    Padding would swap block 0, which is one of the two, with itself, and the two would contradict each other.
    """
    executor.swap(Swaps(np.full((size, 2), PAIR, np.int32), size))


def run_swaps(
    executor: Executor, sizes: Sequence[int] = SWAP_SIZES, touch: Callable[[Executor, int], None] = run_swap
) -> bool:
    """Run every size, and the first once more where their number is odd; False, with a warning, without two blocks.

    ``touch`` runs one size, :func:`run_swap` by way of whatever times and records it. An error of its goes through;
    the blocks are as they were even then, unless a swap itself broke off.
    """
    blocks = executor.cache.data.shape[1]
    logger.info(lines.defragmenter_start(sizes))
    if blocks < 2:
        logger.warning(lines.defragmenter_skipped(blocks))
        return False
    done = 0
    try:
        for size in sizes:
            touch(executor, size)
            done += 1
    finally:
        if done % 2:
            run_swap(executor, sizes[0])
    logger.info(lines.defragmenter_finished())
    return True
