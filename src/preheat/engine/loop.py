"""The engine's loop: schedule, run, process results.

The life of a request: the transport hands over a Request (``take``); the scheduler gives it a slot and blocks
(``schedule``); the packer turns the step's rows into tensors (``pack``); the executor runs the model and samples tokens
(``launch``); the scheduler applies the outcome (``process_results``); the transport carries the Delta to the frontend.

With ``overlap`` the loop launches a step before it waits for the previous one, so that the device always has work.
Until a step must be prepared the loop keeps listening, so that requests that arrive in time join it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from preheat.core import (
    Ask,
    Cancel,
    Delta,
    Drain,
    Finish,
    FromEngine,
    Report,
    Request,
    Schedule,
    Swaps,
    ToEngine,
)
from preheat.engine.launch_timer import LaunchTimer
from preheat.errors import PreheatError, WireError
from preheat.schedule.scheduler import Scheduler
from preheat.utils.trace import Call, untraced

if TYPE_CHECKING:
    from preheat.execution.executor import Executor, LaunchedStep
    from preheat.execution.input_batch import InputBatch, Packer

logger = logging.getLogger(__name__)

TICK = 0.001
"""The shortest time in seconds for which the loop listens."""


class EngineSide(Protocol):
    """The engine's end of the transport."""

    def take(self, timeout: float | None) -> list[ToEngine]:
        """The messages that arrived; waits at most ``timeout`` seconds for the first one (None: without limit)."""

    def put(self, message: FromEngine) -> None:
        """Send to the frontend."""


class StepListener(Protocol):
    """Hears of every batch once it is launched, which is when a step can be cold, and of every compaction. An error
    that it raises fails the step's requests.
    """

    def step(self, event: InputBatch | Swaps) -> None: ...

    def report(self) -> bytes:
        """What it has recorded, for a Report."""


class SilentListener:
    """A listener that records nothing, for dummy requests."""

    def step(self, event: InputBatch | Swaps) -> None:
        """Does nothing."""

    def report(self) -> bytes:
        return b""


@dataclass(slots=True)
class InFlightStep:
    """A launched step, or one that could not be launched and fails when its turn comes."""

    schedule: Schedule
    launched: LaunchedStep | None = None
    error: Exception | None = None


class Loop:
    """Runs requests from the transport until it is drained. ``overlap`` needs an asynchronous device. The parts of a
    step are called through ``call``, by name, for the trace.
    """

    def __init__(
        self,
        transport: EngineSide,
        scheduler: Scheduler,
        packer: Packer,
        executor: Executor,
        listener: StepListener,
        *,
        overlap: bool = False,
        call: Call = untraced,
    ) -> None:
        self.transport, self.scheduler, self.packer, self.executor = transport, scheduler, packer, executor
        self.listener, self.overlap, self.call, self.launch_timer = listener, overlap, call, LaunchTimer()
        self.draining = False
        self._in_flight: deque[InFlightStep] = deque()

    def run(self) -> None:
        """Step until drained; wait in the transport while there is nothing to run."""
        while not (self.draining and self.scheduler.idle):
            self.take(None if self.scheduler.idle else 0)
            while (spare := self.launch_timer.spare()) >= TICK:
                self.take(spare)
            self.step()

    def finish(self) -> None:
        """Step until idle, whatever arrives meanwhile."""
        while not self.scheduler.idle:
            self.step()

    def step(self) -> bool:
        """Launch a step and process the results of the previous one, or of the same one without ``overlap``.

        False when idle.
        """
        if self.scheduler.idle:
            return False
        self.call("step", self._step)
        return True

    def _step(self) -> None:
        self._compact()
        self.launch_timer.preparing()
        schedule = self.call("schedule", self.scheduler.schedule)
        runs = schedule is not None and self._launch(schedule)
        self._process_results(leave=1 if self.overlap and runs else 0)

    def _launch(self, schedule: Schedule) -> bool:
        """Put a step in flight; False if it will fail, so that no other is launched behind it."""
        step = InFlightStep(schedule)
        self._in_flight.append(step)
        try:
            batch = self.call("pack", self.packer.pack, schedule)
            step.launched = self.call("launch", self.executor.launch, batch)
            self.launch_timer.launched(batch.bucket)
            self.listener.step(batch)
        except Exception as error:
            step.error = error
        return step.error is None

    def _process_results(self, leave: int = 0) -> None:
        """Wait for all steps in flight but the last ``leave``, and send their outcomes to the frontend."""
        while len(self._in_flight) > leave:
            self.transport.put(self._outcome(self._in_flight[0]))
            if self._in_flight.popleft().launched:
                self.launch_timer.finished()

    def _outcome(self, step: InFlightStep) -> Delta:
        try:
            # Waited for even after an error of the listener: the step uses the device.
            result = step.launched.result() if step.launched else None
            if step.error or result is None:
                raise step.error or PreheatError("The step was interrupted before it ran")
        except Exception as error:  # a failing step fails its requests; all others go on
            logger.error("A step of %d rows failed", step.schedule.rows, exc_info=error)
            return self.scheduler.fail(step.schedule, error)
        delta = self.call("process_results", self.scheduler.process_results, step.schedule, result)
        delta.stats = self.scheduler.stats()
        return delta

    def _compact(self) -> None:
        """Compact the KV cache if its blocks in use are too scattered."""
        if self._in_flight and not self.scheduler.scattered:
            return
        self._process_results()
        swaps = self.scheduler.compact()
        if swaps is None:
            return
        try:
            self.executor.swap(swaps)
            self.listener.step(swaps)
        except Exception as error:  # the cache's contents are unknown and must not be read
            logger.exception("A swap of %d blocks failed", len(swaps.pairs))
            self.transport.put(self.scheduler.lose_cache(error))

    def take(self, timeout: float | None) -> None:
        """Handle what arrived through the transport."""
        messages = self.transport.take(timeout)
        for message in messages:
            match message:
                case Request():
                    self._add(message)
                case Cancel():
                    self.scheduler.cancel(message.id)
                case Ask():
                    self.transport.put(Report(self.listener.report()))
                case Drain():
                    self.draining = True
                    if message.now:
                        self.scheduler.cancel_all()
        if messages and self.scheduler.idle:  # no step will report that the last requests are gone
            self.transport.put(Delta(stats=self.scheduler.stats()))

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except PreheatError as error:  # the frontend rejects these; one that slips through must not stop the loop
            self.transport.put(Delta(finished={request.id: Finish("error", error=WireError.of(error))}))
