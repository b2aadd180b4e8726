"""Values that the steps of a boot hand on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Mode
from preheat.engine.loop import EngineSide, Loop
from preheat.execution.draft_model import DraftModel
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.execution.offload import HostTier
from preheat.grammar.service import Grammars
from preheat.lora.service import Adapters
from preheat.model.loader import LoadedModel
from preheat.parallel.share import Share
from preheat.plan.cost import ModelSizes
from preheat.plan.plan import Plan
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.utils.trace import Trace
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.warmup.record import Record
from preheat.warmup.steps import Steps
from preheat.warmup.store import Store


class Device(NamedTuple):
    """An open device: the settings that hold on it, its backend, and the execution mode."""

    settings: Settings
    backend: Backend
    mode: Mode

    @property
    def overlap(self) -> bool:
        """Whether the next step is scheduled while one runs."""
        asked = self.settings.async_scheduling
        return self.backend.facts.asynchronous if asked is None else asked


class Given(NamedTuple):
    """Everything that the steps of a boot share: the open device, the other ranks, the log of steps, the frontend.

    ``threads`` are torch's when the device was opened.
    """

    device: Device
    share: Share
    steps: Steps
    transport: EngineSide
    trace: Trace
    threads: int


class Loaded(NamedTuple):
    """What was loaded: the model, the draft model, adapters, and the free bytes of each other rank afterwards."""

    model: LoadedModel
    draft: LoadedModel | None
    adapters: Adapters | str
    others_free: list[int]

    @property
    def pools(self) -> bool:
        """Whether the model pools its states instead of generating."""
        return self.model.spec.head is None

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.model.spec, self.model.dtype.itemsize)


class Planned(NamedTuple):
    """The plan, its record with all items pending, and the store of earlier boots."""

    plan: Plan
    record: Record
    store: Store


class Parts(NamedTuple):
    """The parts of an engine: they schedule, pack and run a step."""

    scheduler: Scheduler
    packer: Packer
    executor: Executor
    drafter: DraftModel | None
    offload: HostTier | None
    grammars: Grammars | str
    adapters: Adapters | str

    def loop(self, transport: EngineSide, device: Device, **more: Any) -> Loop:
        """Return a loop on ``transport``; ``more`` are its listener and other observers."""
        loop = Loop(
            transport, scheduler=self.scheduler, packer=self.packer, executor=self.executor, grammars=self.grammars,
            adapters=self.adapters, overlap=device.overlap, **more,
        )  # fmt: skip
        goes_on = any(device.backend.facts.functions) and not self.packer.plan.limits.pools
        loop.context = torch.inference_mode
        loop.delivers_late = goes_on and self.scheduler.drafting is None
        return loop

    def check(self, device: Device, record: Record) -> BootCheck:
        runner = CheckRunner(self.scheduler.pool, self.packer, self.executor)
        return BootCheck(runner, record, device.backend.facts, self.grammars)
