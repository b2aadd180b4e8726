"""What the items of a plan are made from."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from preheat.limits import Limits
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.dispatcher import Dispatcher
from preheat.plan.options import PlanOptions
from preheat.plan.policy import Policy


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanBase:
    """The buckets of all phases, frozen. ``checks`` name the cross-checks that a boot runs last."""

    limits: Limits
    options: PlanOptions
    policy: Policy
    dispatcher: Dispatcher
    checks: tuple[str, ...] = ()

    def fit(self, size: StepSize) -> Bucket:
        """The bucket that a step of ``size`` runs in; see `Dispatcher.fit`."""
        return self.dispatcher.fit(size)

    @cached_property
    def sampler_sizes(self) -> tuple[int, ...]:
        """Numbers of rows that sampling is padded to, ascending: 0, 1, those of the decode buckets, and the most rows
        that a step can have.
        """
        decode = self.dispatcher.phases["decode"]
        rows = {bucket.rows for bucket in (*decode.buckets, decode.fallback) if bucket is not None}
        return tuple(sorted({0, 1, self.limits.max_rows} | rows))

    def sampler_rows(self, rows: int) -> int:
        """What the sampling of ``rows`` rows is padded to."""
        return self.sampler_sizes[bisect_left(self.sampler_sizes, rows)]

    def padded(self, rows: int, tokens: int, longest: int) -> int:
        """What a step with prompts in it is padded to, in tokens: what admission counts against the budget."""
        if longest == 1:
            return tokens  # decoding rows; their number is bounded by the slots
        bucket = self.dispatcher.find(StepSize(self.policy.prefill, rows, tokens, longest=longest))
        return bucket.tokens if bucket else max(tokens, self.limits.max_num_batched_tokens)
