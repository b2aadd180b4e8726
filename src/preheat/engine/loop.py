"""The loop: three beats, schedule - run - settle.

The life of a request, from here: the mailbox hands over a Request (``take``); the scheduler gives it a slot and
blocks (``schedule``); the packer turns the step's rows into tensors (``pack``); the executor runs the model and draws
tokens (``execute``); the scheduler books the outcome (``settle``); the mailbox carries the Delta back to the front
door. The one arrow against this direction is Cancel, and it too comes through the mailbox.
"""

from __future__ import annotations

import logging
from typing import Protocol

from preheat.batch.pack import Batch, Packer
from preheat.core import Ask, Cancel, Delta, Drain, Finish, FromEngine, Report, Request, Schedule, Swaps, ToEngine
from preheat.errors import PreheatError
from preheat.execute.executor import Executor
from preheat.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineSide(Protocol):
    """The engine's end of a mailbox."""

    def take(self, timeout: float | None) -> list[ToEngine]:
        """What arrived; waits up to ``timeout`` seconds for the first message (None: as long as it takes)."""

    def put(self, message: FromEngine) -> None:
        """Send to the front door."""


class Observer(Protocol):
    """Told of every step that ran, before it is settled, and of every compaction; an error that it raises fails the
    step's requests.
    """

    def step(self, event: Batch | Swaps) -> None: ...

    def report(self) -> bytes:
        """What it has seen, for a Report."""


class Loop:
    """Runs requests from a mailbox until it is drained."""

    def __init__(
        self, mailbox: EngineSide, scheduler: Scheduler, packer: Packer, executor: Executor, observer: Observer
    ) -> None:
        self.mailbox, self.scheduler, self.packer, self.executor = mailbox, scheduler, packer, executor
        self.observer = observer
        self.draining = False

    def run(self) -> None:
        """Step until drained; sleep in the mailbox while there is nothing to run."""
        while not (self.draining and self.scheduler.idle):
            self.take(None if self.scheduler.idle else 0)
            self.step()

    def step(self) -> bool:
        """One step. False when nothing could run."""
        self._compact()
        schedule = self.scheduler.schedule()
        if schedule is None:
            return False
        self.mailbox.put(self._run(schedule))
        return True

    def _compact(self) -> None:
        """Bring the blocks in use together where they lie too scattered."""
        swaps = self.scheduler.compact()
        if swaps is None:
            return
        try:
            self.executor.swap(swaps)
            self.observer.step(swaps)
        except Exception as error:  # what the cache holds is unknown: nobody may read it
            logger.exception("A swap of %d blocks failed", len(swaps.pairs))
            self.mailbox.put(self.scheduler.lose_cache(f"{type(error).__name__}: {error}"))

    def _run(self, schedule: Schedule) -> Delta:
        try:
            batch = self.packer.pack(schedule)
            result = self.executor.execute(batch)
            self.observer.step(batch)
        except Exception as error:  # a failing step fails its requests; everyone else goes on
            logger.exception("A step of %d rows failed", schedule.rows)
            return self.scheduler.fail(schedule, f"{type(error).__name__}: {error}")
        delta = self.scheduler.settle(schedule, result)
        delta.stats = self.scheduler.stats()
        return delta

    def take(self, timeout: float | None) -> None:
        """Book what arrived through the mailbox."""
        messages = self.mailbox.take(timeout)
        for message in messages:
            match message:
                case Request():
                    self._add(message)
                case Cancel():
                    self.scheduler.cancel(message.id)
                case Ask():
                    self.mailbox.put(Report(self.observer.report()))
                case Drain():
                    self.draining = True
                    if message.now:
                        self.scheduler.cancel_all()
        if messages and self.scheduler.idle:  # no step will tell that the last ones are gone
            self.mailbox.put(Delta(stats=self.scheduler.stats()))

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except PreheatError as error:  # the front door refuses these; one that slips through must not stop the loop
            self.mailbox.put(Delta(finished={request.id: Finish("error", message=error.message)}))
