"""Items that move blocks of the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from preheat.core import Transfer
from preheat.plan.cost import Cost, Costs
from preheat.plan.item import Item, ItemRunner, Plan
from preheat.plan.programs import Program

logger = logging.getLogger(__name__)

SWAP_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Sizes of a compaction step in pairs of swapped blocks.

Every step is padded to one of them.
"""


@dataclass(frozen=True, slots=True)
class SwapItem(Item):
    """A padded size of the defragmenter.

    Source: the warm-up of vLLM on Gaudi, which swaps blocks 0 and 1 at each size. An even number of swaps leaves the
    cache unchanged.
    """

    KIND = "swap"
    pairs: int

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[SwapItem]:
        """Return the sizes that the blocks can need.

        Each block in use is swapped with a free one.
        """
        most = max(1, (plan.limits.num_blocks - 1) // 2)
        return (cls(pairs) for below, pairs in pairwise((0, *SWAP_SIZES)) if below < most and plan.policy.compacts)

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        """Run all sizes, and the first one again after an odd number of swaps."""
        sizes = [item.pairs for item in items]
        warm.tell(f"Warming up defragmenter with thresholds: {sizes}")
        if warm.num_blocks < 2:
            logger.warning("Skipping defragmenter warmup, insufficient blocks (%d)", warm.num_blocks)
            return 0
        done = Item.run_kind(items, run_one, warm)
        if done % 2:
            warm.swap(sizes[0])
        warm.tell("Defragmenter warmup completed successfully")
        return done

    @property
    def shape(self) -> dict[str, Any]:
        return {"size": self.pairs}

    @property
    def program(self) -> Program[int]:
        return Program("swap", self.pairs)

    def cost(self, costs: Costs) -> Cost:
        return costs.swap(self.name, self.pairs)

    def run(self, warm: ItemRunner) -> None:
        warm.swap(self.pairs)


@dataclass(frozen=True, slots=True)
class TransferItem(Item):
    """A copy of a cache block to the host, or back.

    Exists only with ``kv_offloading_size``.
    """

    KIND = "offload"
    transfer: Transfer

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[TransferItem]:
        """Return the copy to the host, then the copy back."""
        transfers: tuple[Transfer, ...] = ("store", "load") if plan.options.kv_offloading_size else ()
        return map(cls, transfers)

    @property
    def shape(self) -> dict[str, Any]:
        return {"transfer": self.transfer}

    @property
    def program(self) -> Program[Transfer]:
        return Program("offload", self.transfer)

    def run(self, warm: ItemRunner) -> None:
        warm.transfer(self.transfer)
