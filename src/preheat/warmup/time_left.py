"""How long the rest of the warm-up will take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from preheat.plan.items import Item


class TimeLeft:
    """Learns from the ``items`` that have run, in their order, how far their estimates are off.

    Items of one kind are off by about the same factor, which differs between kinds by more than ten. A kind of which
    none has run yet is taken to be off as all that have run together.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._left: dict[str, float] = defaultdict(float)  # estimated seconds of what is still to run, by kind
        self._estimated: dict[str, float] = defaultdict(float)  # the same of what has run
        self._took: dict[str, float] = defaultdict(float)
        for item in items:
            self._left[item.kind] += item.estimate.seconds

    def ran(self, item: Item, seconds: float) -> None:
        """``item`` has run for so long, or will not run."""
        self._left[item.kind] -= item.estimate.seconds
        self._estimated[item.kind] += item.estimate.seconds
        self._took[item.kind] += seconds

    def seconds(self) -> float:
        """The time that is left; never negative."""
        overall = _factor(sum(self._took.values()), sum(self._estimated.values()), 1.0)
        factors = {kind: _factor(self._took[kind], self._estimated[kind], overall) for kind in self._left}
        return max(sum(left * factors[kind] for kind, left in self._left.items()), 0.0)


def _factor(took: float, estimated: float, unknown: float) -> float:
    return took / estimated if estimated > 0 else unknown
