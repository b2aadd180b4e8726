"""What warm-up asks of the packer and the executor that serve."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np

from preheat.core import Schedule, StepResult, Swaps
from preheat.execution.kv_cache import KVCache
from preheat.execution.sampling import SamplingBatch
from preheat.model.decoder import Attended, Decoder
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.plan.programs import SamplerProgram
from preheat.schedule.slots import Slots


class StepBatch(Protocol):
    """A step's input, padded to a bucket."""

    shape: Bucket
    sampled_rows: np.ndarray
    sampling_size: int
    sampling: SamplingBatch

    @property
    def padded_tokens(self) -> int: ...


class RunningStep(Protocol):
    """A step on the device."""

    def result(self) -> StepResult: ...


class SamplerState(Protocol):
    """What the sampler keeps of requests between steps."""

    def forget(self) -> None:
        """Forget all of it."""


B = TypeVar("B", bound=StepBatch)
B_co = TypeVar("B_co", bound=StepBatch, covariant=True)
B_contra = TypeVar("B_contra", bound=StepBatch, contravariant=True)


class StepPacker(Protocol[B_co]):
    """Lays a step out as a batch."""

    slots: Slots

    def pack(self, schedule: Schedule) -> B_co: ...


class StepExecutor(Protocol[B_contra]):
    """Runs batches, and makes graphs of the programs that run them."""

    decoder: Decoder
    cache: KVCache

    @property
    def sampler(self) -> SamplerState: ...

    def launch(self, batch: B_contra) -> RunningStep: ...

    def execute(self, batch: B_contra) -> StepResult: ...

    def finish(self, attended: Attended, batch: B_contra) -> StepResult: ...

    def swap(self, swaps: Swaps) -> None: ...

    def compile(self, plan: Plan, threads: int) -> None:
        """Build the kernels of the plan's programs, ``threads`` at a time."""

    def prepare(self, batch: B_contra) -> None:
        """Run what a step launches, so that its program can be captured."""

    def is_captured(self, bucket: Bucket) -> bool: ...

    def capture(self, bucket: Bucket) -> None:
        """Capture the forward program of ``bucket``. Raises torch.OutOfMemoryError."""

    def capture_sampling(self, program: SamplerProgram) -> None:
        """Capture ``program``, unless it is captured already, and run it on padding."""
