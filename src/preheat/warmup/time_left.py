"""An estimate of the rest of the warm-up's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from preheat.plan.item import Item


class TimeLeft:
    """The remaining time of warm-up.

    It is corrected by the error of the estimates of the ``items`` that have run. Estimates of one kind are off by about
    the same factor; factors of different kinds differ by more than ten. A kind without a finished item takes the factor
    of all finished items together.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._left: dict[str, float] = defaultdict(float)  # estimated seconds of items still to run, by kind
        self._estimated: dict[str, float] = defaultdict(float)  # estimated seconds of items that have run, by kind
        self._took: dict[str, float] = defaultdict(float)
        for item in items:
            self._left[item.kind] += item.estimate.seconds

    def ran(self, item: Item, seconds: float) -> None:
        """Note that ``item`` has run for ``seconds``."""
        self.left_out(item)
        self._estimated[item.kind] += item.estimate.seconds
        self._took[item.kind] += seconds

    def left_out(self, item: Item) -> None:
        """Note that ``item`` will not run any more."""
        self._left[item.kind] -= item.estimate.seconds

    def seconds(self) -> float:
        """Return the remaining seconds; never negative."""
        overall = _factor(sum(self._took.values()), sum(self._estimated.values()), 1.0)
        factors = {kind: _factor(self._took[kind], self._estimated[kind], overall) for kind in self._left}
        return max(sum(left * factors[kind] for kind, left in self._left.items()), 0.0)


def _factor(took: float, estimated: float, unknown: float) -> float:
    return took / estimated if estimated > 0 else unknown
