"""The draft model's part of the warm-up.

The items of its plan run through its own packer and executor.
"""

from __future__ import annotations

from dataclasses import dataclass

from preheat.core import SamplingParams
from preheat.plan.buckets import Bucket
from preheat.plan.item import NothingToRun
from preheat.plan.programs import Program
from preheat.warmup.dummy_steps import DummySteps


@dataclass
class DraftWarmUp:
    """The warm-up of the draft model's own plan, its forward and sampler programs.

    With ``captures`` each program becomes a graph once it has run.
    """

    steps: DummySteps
    captures: bool

    def first_run(self, program: Program[Bucket]) -> None:
        """Run all layers, since the model is small, then capture the graph."""
        executor = self.steps.executor
        if self.captures and executor.is_captured(program):
            raise NothingToRun("the same program as another bucket")
        self.steps.run(program, executor.execute)
        if self.captures:
            executor.capture(program)
            self.steps.run(program, executor.execute)

    def sample(self, program: Program[int], params: SamplingParams, times: int) -> None:
        """Sample as for the target, then capture the sampler's graph."""
        if self.steps.sample(program, params, times) and self.captures:
            self.steps.executor.capture(program)
