"""What steps take: measured when the engine booted, or estimated where nothing was."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from preheat.plan.buckets import Bucket
from preheat.plan.items import ForwardItem, SamplerItem
from preheat.plan.plan import Plan

LEAST = 1e-9
"""Seconds: a step takes some time."""

_Line = tuple[np.ndarray, np.ndarray]


class StepTimes:
    """The seconds of steps of ``plan`` that decode. ``measured`` is by whose step it is ("target" or "draft") and by
    bucket; it is read when a time is asked for first.
    """

    def __init__(self, plan: Plan, measured: Mapping[tuple[str, Bucket], float]) -> None:
        self._plan, self._measured = plan, measured

    def __call__(self, rows: int, drafts: int) -> float:
        """A step of ``rows`` rows, each with so many drafts: between two sizes that are known, in proportion. More
        drafts never take less, whatever was measured.
        """
        widths = self._plan.options.verify_widths
        width = next((each for each in widths if drafts < each), widths[-1]) if drafts else 0
        return max(float(np.interp(rows, *line)) for each, line in self._lines.items() if each <= width)

    def drafting(self, rows: int) -> float:
        """One token of a draft model, for each of ``rows`` rows; 0 without one."""
        return float(np.interp(rows, *self._draft)) if self._plan.draft else 0.0

    @cached_property
    def _lines(self) -> dict[int, _Line]:
        """Rows and seconds, by the width of a verify step; 0 for a step without drafts."""
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
        """The plan's estimates of a forward step and of sampling all of its tokens."""
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
