"""A launched step and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from preheat.backends.base.sampling import Sampler
from preheat.core import StepResult
from preheat.execution.input_batch import InputBatch
from preheat.execution.pooler import Pooler


@dataclass(slots=True)
class LaunchedStep:
    """A launched step on the device.

    Its result may be read until another step uses its host copy. ``draw`` belongs to a step that still computes its
    logits: it waits for them, draws, and returns the whole step. Read the result of such a step before the next launch.
    """

    batch: InputBatch
    sampler: Sampler
    prompt_logprobs: dict[int, list[Any]]
    draw: Callable[[InputBatch], LaunchedStep] | None = field(default=None, kw_only=True)

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        if self.draw is not None:
            return self.draw(self.batch).result()
        batch, rows, reporting = self.batch, self.batch.sampled_rows, self.batch.reporting
        if isinstance(self.sampler, Pooler):
            if batch.bounds is not None:
                return self._sums(self.sampler, batch.bounds)
            states = self.sampler.states(batch.turn, len(rows))
            return StepResult(np.zeros(batch.schedule.total_sampled, np.int64), hidden=_by_row(rows, states))
        tokens, reports = self.sampler.read(batch.turn, len(rows), reporting, batch.alternatives)
        result = StepResult(tokens, prompt_logprobs=self.prompt_logprobs)
        if batch.digested:
            result.digests = self.sampler.digests(batch.turn, len(rows))
        if reports:
            result.logprobs = dict(zip(reporting.tolist(), reports, strict=True))
        return result

    def _sums(self, pooler: Pooler, bounds: np.ndarray) -> StepResult:
        """Return the result of a step whose texts between ``bounds`` are added up."""
        batch, rows = self.batch, self.batch.sampled_rows[bounds[:-1]].tolist()
        sums = pooler.sums(batch.turn, len(rows))
        return StepResult(
            np.zeros(batch.schedule.total_sampled, np.int64),
            hidden={row: sums[place : place + 1] for place, row in enumerate(rows)},
            summed=dict(zip(rows, (bounds[1:] - bounds[:-1]).tolist(), strict=True)),
        )


def _by_row(rows: np.ndarray, states: np.ndarray) -> dict[int, np.ndarray]:
    """Return the ``states`` [n, hidden] of each row, in the order of its tokens; ``rows`` [n] ascend."""
    if not len(rows):
        return {}
    ends = [*((rows[1:] != rows[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
    return {int(rows[begin]): states[begin:end] for begin, end in pairwise((0, *ends))}
