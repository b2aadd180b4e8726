"""The draft model's part of the warm-up: the items of its plan, run through its own packer and executor."""

from __future__ import annotations

from dataclasses import dataclass

from preheat.core import SamplingParams
from preheat.plan.buckets import Bucket
from preheat.plan.items import NothingToRun
from preheat.plan.programs import SamplerProgram
from preheat.warmup.dummy_steps import DummySteps


@dataclass
class DraftWarmUp:
    """Runs forward and sampler items. With ``captures`` each program becomes a graph once it has run."""

    steps: DummySteps
    captures: bool

    def first_run(self, bucket: Bucket) -> None:
        """All layers: the model is small."""
        executor = self.steps.executor
        if self.captures and executor.is_captured(bucket):
            raise NothingToRun("the same program as another bucket")
        self.steps.run(bucket, executor.execute)
        if self.captures:
            executor.capture(bucket)
            self.steps.run(bucket, executor.execute)

    def sample(self, program: SamplerProgram, params: SamplingParams, times: int) -> None:
        """As for the target."""
        if self.steps.sample(program.rows, params, times) and self.captures:
            self.steps.executor.capture_sampling(program)
