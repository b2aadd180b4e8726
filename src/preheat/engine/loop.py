"""The loop: three beats, schedule - run - settle.

The life of a request, from here: the mailbox hands over a Request (``take``); the scheduler gives it a slot and
blocks (``schedule``); the packer turns the step's rows into tensors (``pack``); the executor runs the model and draws
tokens (``launch``); the scheduler books the outcome (``settle``); the mailbox carries the Delta back to the front
door. The one arrow against this direction is Cancel, and it too comes through the mailbox.

With ``overlap`` the loop is a step ahead: it launches each step before it waits for the one before it, so that the
device always has work. The beats are the same; only how many steps it leaves in flight differs. Until a step must be
prepared it listens: who arrives in time takes part.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

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
    StepResult,
    Swaps,
    ToEngine,
)
from preheat.engine.launch_timer import LaunchTimer
from preheat.errors import PreheatError, WireError
from preheat.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

TICK = 0.001
"""Seconds that a mailbox can wait at least."""


class EngineSide(Protocol):
    """The engine's end of a mailbox."""

    def take(self, timeout: float | None) -> list[ToEngine]:
        """What arrived; waits up to ``timeout`` seconds for the first message (None: as long as it takes)."""

    def put(self, message: FromEngine) -> None:
        """Send to the front door."""


class Packer(Protocol):
    """Turns a step's rows into a batch, which only the executor and the observer look into."""

    def pack(self, schedule: Schedule) -> Any: ...


class Running(Protocol):
    """A step on the device."""

    def result(self) -> StepResult:
        """Waits for it; raises what went wrong."""


class Executor(Protocol):
    """Runs what it is given in the order in which it is given."""

    def launch(self, batch: Any) -> Running: ...

    def swap(self, swaps: Swaps) -> None: ...


class StepListener(Protocol):
    """Told of every batch once it is launched, which is where a step can be cold, and of every compaction. An error
    that it raises fails the step's requests.
    """

    def step(self, event: Any) -> None: ...

    def report(self) -> bytes:
        """What it has seen, for a Report."""


class SilentListener:
    """A listener that nothing interests: for dummy requests."""

    def step(self, event: Any) -> None:
        """Ignored."""

    def report(self) -> bytes:
        return b""


@dataclass(slots=True)
class _Step:
    """A step in flight, or one that could not be launched and fails in its turn."""

    schedule: Schedule
    running: Running | None = None
    error: Exception | None = None

    def result(self) -> StepResult:
        result = self.running.result() if self.running else None  # whatever the observer said: it uses the device
        if self.error or result is None:
            raise self.error or PreheatError("The step was interrupted before it ran")
        return result


class Loop:
    """Runs requests from a mailbox until it is drained. ``overlap`` needs a device that runs while the host goes on."""

    def __init__(
        self,
        transport: EngineSide,
        scheduler: Scheduler,
        packer: Packer,
        executor: Executor,
        listener: StepListener,
        *,
        overlap: bool = False,
    ) -> None:
        self.transport, self.scheduler, self.packer, self.executor = transport, scheduler, packer, executor
        self.listener, self.overlap, self.launch_timer = listener, overlap, LaunchTimer()
        self.draining = False
        self._in_flight: deque[_Step] = deque()

    def run(self) -> None:
        """Step until drained; sleep in the mailbox while there is nothing to run."""
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
        """Launch a step and settle the one before it, or the same one without ``overlap``. False when idle."""
        if self.scheduler.idle:
            return False
        self._compact()
        self.launch_timer.preparing()
        schedule = self.scheduler.schedule()
        runs = schedule is not None and self._launch(schedule)
        self._settle(leave=1 if self.overlap and runs else 0)
        return True

    def _launch(self, schedule: Schedule) -> bool:
        """Put a step in flight; False if it will fail, so that none is launched behind it."""
        step = _Step(schedule)
        self._in_flight.append(step)
        try:
            batch = self.packer.pack(schedule)
            step.running = self.executor.launch(batch)
            self.launch_timer.launched(batch.shape)
            self.listener.step(batch)
        except Exception as error:
            step.error = error
        return step.error is None

    def _settle(self, leave: int = 0) -> None:
        """Wait for the steps in flight, but for the last ``leave``, and tell the front door what became of them."""
        while len(self._in_flight) > leave:
            self.transport.put(self._outcome(self._in_flight[0]))
            if self._in_flight.popleft().running:
                self.launch_timer.settled()

    def _outcome(self, step: _Step) -> Delta:
        try:
            result = step.result()
        except Exception as error:  # a failing step fails its requests; everyone else goes on
            logger.error("A step of %d rows failed", step.schedule.rows, exc_info=error)
            return self.scheduler.fail(step.schedule, error)
        delta = self.scheduler.settle(step.schedule, result)
        delta.stats = self.scheduler.stats()
        return delta

    def _compact(self) -> None:
        """Bring the blocks in use together where they lie too scattered."""
        if self._in_flight and not self.scheduler.scattered:
            return
        self._settle()
        swaps = self.scheduler.compact()
        if swaps is None:
            return
        try:
            self.executor.swap(swaps)
            self.listener.step(swaps)
        except Exception as error:  # what the cache holds is unknown: nobody may read it
            logger.exception("A swap of %d blocks failed", len(swaps.pairs))
            self.transport.put(self.scheduler.lose_cache(error))

    def take(self, timeout: float | None) -> None:
        """Book what arrived through the mailbox."""
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
        if messages and self.scheduler.idle:  # no step will tell that the last ones are gone
            self.transport.put(Delta(stats=self.scheduler.stats()))

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except PreheatError as error:  # the frontend refuses these; one that slips through must not stop the loop
            self.transport.put(Delta(finished={request.id: Finish("error", error=WireError.of(error))}))
