"""Items that run programs of other items again, to time or to check them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.cost import Cost, Costs
from preheat.plan.item import Item, ItemRunner, Plan

MAX_DETERMINISM_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PaceItem(Item):
    """A decode or verify step, timed after its first run.

    The times decide how many tokens are drafted.
    """

    KIND, stage = "pace", "last"
    bucket: Bucket
    draft: bool

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[PaceItem]:
        """Yield buckets of each phase with about doubling rows, and the largest."""
        if not (plan.options.measures_drafts and plan.verifies):
            return
        for phase in ("decode", "verify"):
            buckets = plan.dispatcher.phases[phase].buckets
            for width in sorted({bucket.longest for bucket in buckets}):
                rows = [bucket for bucket in buckets if bucket.longest == width]
                yield from (cls(bucket, draft=False) for bucket in _doubling(rows))
        if plan.draft:
            yield from (cls(bucket, draft=True) for bucket in _doubling(plan.draft.dispatcher.phases["decode"].buckets))

    @property
    def shape(self) -> dict[str, Any]:
        return {"of": f"draft {self.bucket.phase}" if self.draft else self.bucket.phase, **self.bucket.named_dims()}

    def cost(self, costs: Costs) -> Cost:
        return costs.forward(self.name, self.bucket)

    def run(self, warm: ItemRunner) -> None:
        warm.pace(self.bucket, draft=self.draft)


def _doubling(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return buckets with about doubling rows, and the largest.

    Each has at least twice the rows of the one before. The buckets differ in rows alone.
    """
    ordered = sorted(buckets, key=lambda bucket: bucket.rows)
    chosen: list[Bucket] = []
    for bucket in ordered:
        if not chosen or bucket.rows >= 2 * chosen[-1].rows:
            chosen.append(bucket)
    return list(dict.fromkeys((*chosen, ordered[-1])))


@dataclass(frozen=True, slots=True)
class DeterminismItem(Item):
    """A pass of the determinism warm-up, which runs ``bucket`` again."""

    KIND, stage = "determinism", "last"
    number: int
    bucket: Bucket

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[DeterminismItem]:
        """Return passes over a decode step of a usual batch size.

        The result is empty without batch invariance.
        """
        rows = min(plan.limits.max_rows, MAX_DETERMINISM_TOKENS)
        bucket = plan.dispatcher.peek(StepSize("decode", rows, rows, longest=1, blocks=rows))
        passes = plan.options.determinism_warmup_iterations if plan.options.batch_invariant else 0
        return (cls(number + 1, bucket) for number in range(passes))

    @classmethod
    def run_kind(cls, items: Sequence[Self], run_one: Callable[[Item], None], warm: ItemRunner) -> int:
        passes = iter(items)
        warm.determinism_passes(lambda: run_one(next(passes)), len(items))
        return len(items)

    @property
    def shape(self) -> dict[str, Any]:
        return {"size": self.number}

    def cost(self, costs: Costs) -> Cost:
        return costs.forward(str(self.bucket), self.bucket)

    def run(self, warm: ItemRunner) -> None:
        warm.forward(self.bucket)


@dataclass(frozen=True, slots=True)
class CheckItem(Item):
    """A cross-check at boot, by its name in :mod:`preheat.verify.names`."""

    KIND, stage = "check", "last"
    check: str

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterable[CheckItem]:
        return map(cls, plan.checks)

    @property
    def shape(self) -> dict[str, Any]:
        return {"name": self.check}

    def cost(self, costs: Costs) -> Cost:
        return costs.check(self.name)

    def run(self, warm: ItemRunner) -> None:
        warm.run_check(self.check)
