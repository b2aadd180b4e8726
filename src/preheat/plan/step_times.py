"""Seconds of decode and verify steps, measured at boot or else estimated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.plan.step_items import ForwardItem, SamplerItem

LEAST = 1e-9
"""Seconds: the least time of a step, so that rates stay finite."""

_Line = tuple[np.ndarray, np.ndarray]


class StepTimes:
    """The seconds of decode and verify steps of ``plan``.

    ``measured`` has a key ("target" or "draft", bucket). It is read when a time is asked for first.
    """

    def __init__(self, plan: Plan, measured: Mapping[tuple[str, Bucket], float]) -> None:
        self._plan, self._measured = plan, measured

    def __call__(self, rows: int, drafts: int) -> float:
        """Return the seconds of a step of ``rows`` rows with ``drafts`` drafts each.

        Times between two known sizes are interpolated. A step with more drafts never takes less than one with fewer,
        whatever was measured.
        """
        widths = self._plan.options.verify_widths
        width = next((each for each in widths if drafts < each), widths[-1]) if drafts else 0
        return max(float(np.interp(rows, *line)) for each, line in self._lines.items() if each <= width)

    def drafting(self, rows: int) -> float:
        """Return the seconds of one draft token for each of ``rows`` rows.

        Returns 0 without a draft model.
        """
        return float(np.interp(rows, *self._draft)) if self._plan.draft else 0.0

    @cached_property
    def _lines(self) -> dict[int, _Line]:
        """Rows and seconds, by the width of a verify step.

        0 for a step without drafts.
        """
        phases = self._plan.dispatcher.phases
        buckets = (*phases["decode"].buckets, *phases["verify"].buckets)
        own = {bucket: seconds for (whose, bucket), seconds in self._measured.items() if whose == "target"}
        known = own or {bucket: self._estimate(self._plan, bucket) for bucket in buckets}
        widths = {bucket.longest for bucket in buckets}
        return {width: _line({each: took for each, took in known.items() if each.longest == width}) for width in widths}

    @cached_property
    def _draft(self) -> _Line:
        draft = self._plan.draft
        assert draft is not None
        known = {bucket: seconds for (whose, bucket), seconds in self._measured.items() if whose == "draft"}
        decode = draft.dispatcher.phases["decode"].buckets
        return _line(known or {bucket: self._estimate(draft, bucket) for bucket in decode})

    def _estimate(self, plan: Plan, bucket: Bucket) -> float:
        """Return the plan's estimate of a forward step and of sampling all its tokens."""
        size = plan.sampler_rows(min(bucket.tokens, plan.sampler_sizes[-1]))
        forward = (
            item.estimate.seconds for item in plan.items if isinstance(item, ForwardItem) and item.bucket == bucket
        )
        sample = (item.estimate.seconds for item in plan.items if isinstance(item, SamplerItem) and item.rows == size)
        return next(forward, 0.0) + next(sample, 0.0)


def _line(known: Mapping[Bucket, float]) -> _Line:
    points = sorted((bucket.rows, max(seconds, LEAST)) for bucket, seconds in known.items())
    rows, seconds = zip(*points, strict=True)
    return np.array(rows), np.array(seconds)
