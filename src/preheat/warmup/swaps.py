"""The warm-up of compaction: every padded size once, on blocks 0 and 1, leaving the cache as it was.

Source: the defragmenter's warm-up of vLLM on Gaudi. Each swap of the pair (1, 0) exchanges the two blocks, so an even
number of swaps restores them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from preheat.core import Swaps
from preheat.plan import lines
from preheat.plan.items import SWAP_SIZES

if TYPE_CHECKING:
    from preheat.warmup.run import StepExecutor

logger = logging.getLogger(__name__)

PAIR = (1, 0)


def run_swap(executor: StepExecutor, size: int) -> None:
    """Exchange blocks 1 and 0 by the program of ``size`` pairs, which are all the same one.

    Padding would swap block 0, which is one of the two, with itself, and the two would contradict each other.
    """
    executor.swap(Swaps(np.full((size, 2), PAIR, np.int32), size))


class SwapRuns:
    """The swaps of one warm-up: :meth:`begin`, :meth:`run` for each size, :meth:`end`.

    Whatever times and records the sizes stands in between; one that fails or is left out does no harm.
    """

    def __init__(self, executor: StepExecutor, sizes: Sequence[int] = SWAP_SIZES) -> None:
        self._executor, self._sizes, self._done = executor, sizes, 0

    def begin(self) -> bool:
        """Say so; False, with a warning, where there are not two blocks to swap."""
        blocks = self._executor.cache.data.shape[1]
        logger.info("%s", lines.defragmenter_start(self._sizes))
        if blocks < 2:
            logger.warning("%s", lines.defragmenter_skipped(blocks))
        return blocks >= 2

    def run(self, size: int) -> None:
        """Run one size."""
        run_swap(self._executor, size)
        self._done += 1

    def end(self) -> None:
        """After an odd number of swaps run the first size once more, so that the cache is as it was."""
        if self._done % 2:
            self.run(self._sizes[0])
        logger.info("%s", lines.defragmenter_finished())
