"""Random adapters for checks and ``preheat verify``, the same at every boot and on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from preheat.model.adapters import ModelAdapterSlots, Packed
from preheat.ops.matmul import LowRankPair

SMALL_RANK = 5


class RandomSource(NamedTuple):
    """The number of a random adapter; other ranks make the same adapter of it."""

    number: int


@dataclass(frozen=True)
class RandomAdapter:
    """See :class:`preheat.schedule.adapters.Adapter`."""

    name: str
    digest: str
    packed: Packed
    source: RandomSource


def random_adapter(adapter_slots: ModelAdapterSlots, number: int) -> RandomAdapter:
    """Return random matrices: of the largest rank and for every module in adapter 0, of a small rank in the others.

    The others leave every third module alone, so that a slot has to forget the adapter before.
    """
    generator = torch.Generator().manual_seed(number)
    rank = adapter_slots.max_rank if number == 0 else min(SMALL_RANK + number, adapter_slots.max_rank)
    factors = {
        name: LowRankPair(
            torch.randn(rank, inputs, generator=generator) * inputs**-0.5,
            torch.randn(outputs, rank, generator=generator) * rank**-0.5,
            1.0 + number,
        )
        for at, (name, (outputs, inputs)) in enumerate(adapter_slots.modules.items())
        if number == 0 or (at + number) % 3
    }
    return RandomAdapter(f"random {number}", f"random {number}", adapter_slots.pack(factors), RandomSource(number))
