"""Kernels that are fastest together. No Triton.

A kernel's time depends on its neighbors: it may begin before the kernel ahead has ended, and a kernel that leaves room
on a multiprocessor lets the next one in. So the fastest kernels alone are not the fastest layers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

C = TypeVar("C")

LEAST_GAIN = 0.002
"""The least share of the time that another choice has to save: replays differ by about as much."""

ROUNDS = 8
"""How often all layers are gone through at most."""


def fastest_together(
    options: Sequence[Sequence[C]], starts: Sequence[Sequence[C]], measured: Callable[[Sequence[C], bool], float]
) -> list[C]:
    """Return one of ``options`` for each layer, so that no other option of one layer takes less time together.

    The fastest of ``starts`` is where the search begins. ``measured`` returns the time of choices for all layers, with
    more replays if its second argument is true. It is asked again before a choice changes, so that noise changes none.
    """
    times = [measured(choices, True) for choices in starts]
    best = list(starts[times.index(min(times))])
    least = measured(best, True)
    for _ in range(ROUNDS):
        before = list(best)
        for layer, some in enumerate(options):
            for choice in some:
                tried = [*best[:layer], choice, *best[layer + 1 :]]
                if choice == best[layer] or measured(tried, False) >= least:
                    continue
                new, least = measured(tried, True), measured(best, True)
                if new < least * (1 - LEAST_GAIN):
                    best, least = tried, new
        if best == before:
            break
    return best
