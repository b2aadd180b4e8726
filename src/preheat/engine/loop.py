"""The engine's loop: schedule, run, process results.

The life of a request: the transport hands over a Request (``take``). The scheduler gives it a slot and blocks
(``schedule``). The packer turns the step's rows into tensors (``pack``). The executor runs the model and samples tokens
(``launch``). The scheduler applies the outcome (``process_results``). The transport carries the Delta to the frontend.

With ``overlap`` the loop launches a step before it waits for the previous one, so that the device always has work. A
step with drafts must be waited for first; the next step is then launched before the frontend gets the results. Until a
step must be prepared the loop keeps listening, so that new requests can join the step. A loop that ``delivers_late``
does so with every step: the frontend gets the results while the next step runs. A loop that pools delivers at once, as
the launch of its steps waits for them.

A request with an adapter or a grammar first waits beside the queue until both are ready (``admission``). The scheduler
lists the adapters to load into adapter slots before a step. A step with grammars is launched up to its logits. The loop
then waits for the previous step's tokens, since grammars advance by them. Threads compute the masks while the device
runs the model; only sampling waits for them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from preheat.core import (
    Ask,
    Cancel,
    Command,
    Delta,
    Drain,
    Finish,
    FromEngine,
    GrammarStats,
    KvTransferStats,
    LoadAdapter,
    Report,
    Request,
    ResetPrefixCache,
    Schedule,
    Stats,
    ToEngine,
    UnloadAdapter,
    Wake,
)
from preheat.engine.admission import Admission
from preheat.engine.audit import Audit
from preheat.engine.control import Control, Operator
from preheat.engine.launch_timer import LaunchTimer
from preheat.engine.step_listener import StepListener
from preheat.errors import EngineDead, PreheatError, WireError
from preheat.grammar.service import Grammars
from preheat.kv_transfer.sends import Sends
from preheat.lora.service import NO_ADAPTERS, Adapters
from preheat.schedule.scheduler import Scheduler
from preheat.utils.trace import Call, untraced

if TYPE_CHECKING:
    from preheat.engine.kv_publisher import KvPublisher
    from preheat.execution.executor import Executor
    from preheat.execution.input_batch import InputBatch, Packer
    from preheat.execution.launched import LaunchedStep
    from preheat.kv_transfer.server import BlockServer

logger = logging.getLogger(__name__)

TICK = 0.001
"""The shortest time in seconds for which the loop listens."""


class EngineSide(Protocol):
    """The engine's end of the transport."""

    def take(self, timeout: float | None) -> list[ToEngine]:
        """Return the messages that arrived.

        Waits up to ``timeout`` seconds for the first one (None: without limit).
        """

    def put(self, message: FromEngine) -> None:
        """Send a message to the frontend."""

    def waker(self) -> Callable[[], None]:
        """Return a function that ends a wait in :meth:`take`; any thread may call it."""


@dataclass(slots=True)
class InFlightStep:
    """A launched step, or one that failed to launch.

    A step that failed to launch fails when its turn comes.
    """

    schedule: Schedule
    launched: LaunchedStep | None = None
    timed: bool = False  # the launch timer knows of it
    error: Exception | None = None


class Loop:
    """The loop that runs requests from the transport until it is drained.

    ``overlap`` needs an asynchronous device. The parts of a step are called through ``call``, by name, for the trace.
    ``grammars`` serve structured outputs and ``adapters`` LoRA; a string instead is the reason why there are none.
    ``operator`` does the work of commands on the device.
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
        grammars: Grammars | str = "structured outputs are off",
        adapters: Adapters | str = NO_ADAPTERS,
        operator: Operator | None = None,
    ) -> None:
        self.transport, self.scheduler, self.packer, self.executor = transport, scheduler, packer, executor
        self.listener, self.overlap, self.call, self.launch_timer = listener, overlap, call, LaunchTimer()
        self.grammars, self.adapters, self.draining = grammars, adapters, False
        self._grammars_reported = GrammarStats()
        self._in_flight: deque[InFlightStep] = deque()
        self.admission = Admission(scheduler, grammars, adapters, self._reject, transport.put)
        self.control = Control(self, operator)
        self.kv_publisher: KvPublisher | None = None
        self.sends: Sends | None = None
        self.block_server: BlockServer | None = None
        self.audit: Audit | None = None
        self._audits_reported = 0
        self.delivers_late = False
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around all steps of a run, so that no step has to."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run, compile or read, and nothing in flight."""
        return self.scheduler.idle and not self.admission.pending

    def run(self) -> None:
        """Step until drained; wait in the transport while there is nothing to run."""
        with self.context():
            while not (self.draining and self.idle):
                self.take(self._patience())
                while self.overlap and (spare := self.launch_timer.spare()) >= TICK:
                    self.take(spare)
                self.step()

    def _patience(self) -> float | None:
        """Return the seconds to wait for messages while no step can run.

        None means to wait until one comes.
        """
        if not (self.control.paused or self.scheduler.idle):
            return 0.0
        if self.control.receiving:
            return 0.0  # the control waits itself
        if self.sends is not None and self.sends.pending:
            return 0.0
        if self.admission.pending:
            return TICK
        return None if self.audit is None or self.control.paused else self.audit.patience()

    def finish(self) -> None:
        """Step until idle or paused, whatever arrives meanwhile."""
        while not (self.idle or self.control.paused):
            self.step()

    def step(self) -> bool:
        """Launch a step and process the results of the previous one.

        Without ``overlap`` process the results of the same one. Return False when idle or paused, or when nothing can
        run before a grammar is compiled or an adapter read.
        """
        if self.admission.pending:
            self.admission.take(self._patience() or 0.0)
        runs = not (self.control.paused or self.scheduler.idle)
        if runs:
            self.call("step", self._step)
        self.control.proceed()
        if self.sends is not None and self.sends.pending:
            self.sends.turn(available=not self.control.paused)
            if self.idle and not self.sends.busy:  # no step will report the blocks
                self.transport.put(Delta(stats=self._stats()))
        if self.scheduler.pool.events is not None:
            self.scheduler.pool.events.flush()
        if self.audit is not None and not self.control.paused:
            self._turn(self.audit)
        return runs

    def _turn(self, audit: Audit) -> None:
        """Let the audit read a slice, and report its figures after a pass or a fault."""
        try:
            audit.turn(idle=self.idle and not self._in_flight)
        finally:
            if (told := audit.stats.passes + audit.stats.faults) != self._audits_reported:
                self._audits_reported = told
                stats = self._stats()
                stats.audit = copy(audit.stats)
                self.transport.put(Delta(stats=stats))

    def _step(self) -> None:
        self._compact()
        self.launch_timer.preparing()
        outcomes = self._outcomes() if self.delivers_late else []
        try:
            schedule = self.call("schedule", self.scheduler.schedule)
            if schedule is None and self._in_flight and self.scheduler.drafting is not None:
                outcomes = self._outcomes()
                self.launch_timer.preparing()
                schedule = self.call("schedule", self.scheduler.schedule)
            runs = schedule is not None and self._launch(schedule)
        finally:
            for outcome in outcomes:
                self.transport.put(outcome)
        self._process_results(leave=1 if (self.overlap or self.delivers_late) and runs else 0)

    def _outcomes(self) -> list[Delta]:
        """Wait for all steps in flight, and return their outcomes."""
        return [self._next_outcome() for _ in range(len(self._in_flight))]

    def _launch(self, schedule: Schedule) -> bool:
        """Put a step in flight. Return False if it will fail, so that no other step is launched behind it."""
        step = InFlightStep(schedule)
        self._in_flight.append(step)
        try:
            if schedule.loads:
                self.call("load_adapters", self.executor.load_adapters, schedule.loads)
                if self.audit is not None:
                    self.audit.memory.adapters_changed()
            batch = self.call("pack", self.packer.pack, schedule)
            if self.scheduler.slots.grammars and batch.sampling.masked is not None:
                step.launched = self._launch_masked(step, batch)
            else:
                step.launched = self.call("launch", self.executor.launch, batch)
                self._time(step, batch)
            self.listener.step(batch)
        except EngineDead:  # no step can run any more
            raise
        except Exception as error:
            step.error = error
        return step.error is None

    def _time(self, step: InFlightStep, batch: InputBatch) -> None:
        self.launch_timer.launched(batch.bucket)
        step.timed = True

    def _launch_masked(self, step: InFlightStep, batch: InputBatch) -> LaunchedStep:
        """Launch a step, compute its masks meanwhile, and sample.

        Masks depend on the tokens of a step in flight before it, so its results are processed first.
        """
        grammars, schedule, slots = self.grammars, batch.schedule, self.scheduler.slots
        if isinstance(grammars, str):
            raise PreheatError(f"a row has a grammar, but {grammars}")
        masks, alone = self.executor.masks(batch.turn), len(self._in_flight) == 1
        filled = grammars.fill(masks, slots, schedule) if alone else None
        self.call("launch", self.executor.begin, batch)
        self._time(step, batch)
        if filled is None:
            self._process_results(leave=1)
            filled = grammars.fill(masks, slots, schedule)
        self.call("wait_for_masks", grammars.wait, filled)
        return self.call("draw", self.executor.complete, batch)

    def _process_results(self, leave: int = 0) -> None:
        """Wait for all steps in flight except the last ``leave``.

        Their outcomes are sent to the frontend.
        """
        while len(self._in_flight) > leave:
            self.transport.put(self._next_outcome())

    def _next_outcome(self) -> Delta:
        """Wait for the oldest step in flight, and return its outcome."""
        delta = self._outcome(self._in_flight[0])
        if self._in_flight.popleft().timed:
            self.launch_timer.finished()
        return delta

    def _outcome(self, step: InFlightStep) -> Delta:
        try:
            # Wait even after an error of the listener: the step uses the device.
            result = step.launched.result() if step.launched else None
            if step.error or result is None:
                raise step.error or PreheatError("The step was interrupted before it ran")
        except Exception as error:  # a failing step fails its requests; all others go on
            logger.error("A step of %d rows failed", step.schedule.rows, exc_info=error)
            return self.scheduler.fail(step.schedule, error)
        delta = self.call("process_results", self.scheduler.process_results, step.schedule, result)
        delta.stats = self._stats()
        return delta

    def _stats(self) -> Stats:
        stats = self.scheduler.stats()
        if not isinstance(self.grammars, str) and self.grammars.stats != self._grammars_reported:
            self._grammars_reported = stats.grammars = copy(self.grammars.stats)
        stats.kv_transfer = self._transferred()
        return stats

    def _transferred(self) -> KvTransferStats | None:
        """Return the counters of blocks sent and pulled, None in an engine that does neither."""
        sends, pulls = self.sends, self.admission.pulls
        if sends is None and pulls is None:
            return None
        return KvTransferStats.sum([each.stats for each in (sends, pulls) if each is not None])

    def close(self) -> None:
        """End the threads of the loop."""
        if self.kv_publisher is not None:
            self.kv_publisher.close()
        if self.block_server is not None:
            self.block_server.close()
        if self.admission.pulls is not None:
            self.admission.pulls.close()

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
        except EngineDead:
            raise
        except Exception as error:  # the cache's contents are unknown and must not be read
            logger.exception("A swap of %d blocks failed", len(swaps.pairs))
            self.transport.put(self.scheduler.lose_cache(error))

    def take(self, timeout: float | None) -> None:
        """Handle messages from the transport."""
        messages = self.transport.take(timeout)
        if not messages:
            return
        for message in messages:
            match message:
                case Request():
                    self.control.arrive(message)
                case Cancel():
                    self._cancel(message.id)
                case Command():
                    self.control.take(message)
                case Wake():
                    pass
                case Ask():
                    self.transport.put(Report(self.listener.report()))
                case LoadAdapter() | UnloadAdapter():
                    self.admission.change(message)
                case ResetPrefixCache():
                    self.drain_steps()  # steps in flight publish blocks too
                    self.scheduler.reset_prefix_cache()
                case Drain():
                    self.draining = True
                    self.control.drain()
                    if message.now:
                        self.scheduler.cancel_all()
                        self.admission.cancel_all()
        self.control.proceed()
        if self.scheduler.pool.events is not None:  # events of a reset or a command
            self.scheduler.pool.events.flush()
        told = any(not isinstance(each, Wake) for each in messages)
        if told and self.idle:  # no step will report the end of the last requests
            self.transport.put(Delta(stats=self._stats()))

    def drain_steps(self) -> None:
        """Process the results of all steps in flight."""
        self._process_results()

    def abort_all(self) -> None:
        """End all requests with reason "abort".

        Requests that wait for a grammar or an adapter end too.
        """
        self.drain_steps()
        delta = self.scheduler.abort_all()
        delta.finished |= dict.fromkeys(self.admission.cancel_all(), Finish("abort"))
        delta.stats = self._stats()
        self.transport.put(delta)

    def _cancel(self, request_id: int) -> None:
        if not self.control.cancel(request_id) and not self.admission.cancel(request_id):
            self.scheduler.cancel(request_id)

    def _reject(self, request: Request, error: PreheatError) -> None:
        finish = Finish("error", error=WireError.of(error))
        self.transport.put(Delta(finished={request.id: finish}, stats=self._stats()))
