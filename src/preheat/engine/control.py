"""Commands of an operator: pause and resume, new weights, sleep and wake. No torch here.

A command takes effect between two steps. While the engine is paused no step runs, and new requests are held back. The
:class:`Operator` does the work on the device. A command that waits for a trainer does so in a thread, and steps go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from copy import copy
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

from preheat.core import Command, EngineState, FromEngine, Outcome, Request
from preheat.errors import EngineDead, InvalidRequest, PreheatError, WireError

if TYPE_CHECKING:
    from preheat.engine.admission import Admission
    from preheat.engine.audit import Audit
    from preheat.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


POLL_SECONDS = 0.001
"""Seconds that an idle loop waits for a thread at once."""


class Operator(Protocol):
    """Work on the device for commands, with no step in flight. After an error everything is unchanged."""

    state: EngineState

    def update(self, command: Command) -> None:
        """Replace the weights by the command's tensors; running sequences are computed again."""

    def beside(self, command: Command) -> Callable[[], None] | None:
        """Return the work that ``command`` waits for, or None.

        Steps go on meanwhile.
        """

    def gather(self) -> None:
        """From now on keep a trainer's tensors until :meth:`finish`."""

    def finish(self, command: Command) -> None:
        """Replace the weights by all gathered tensors, as :meth:`update` does."""

    def check_sleep(self, level: int) -> None:
        """Raise InvalidRequest if the engine cannot sleep at this level."""

    def sleep(self, level: int) -> None:
        """Release memory: at level 1 the cache's, at level 2 the weights' too."""

    def wake(self, tags: list[str]) -> bool:
        """Take memory again, for ``tags`` or for all; return whether nothing sleeps any more."""


class Outbox(Protocol):
    """The engine's way to its frontend."""

    def put(self, message: FromEngine) -> None: ...


class Steps(Protocol):
    """The loop, as commands stop it and read it."""

    @property
    def admission(self) -> Admission: ...

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def transport(self) -> Outbox: ...

    @property
    def audit(self) -> Audit | None: ...

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""

    def drain_steps(self) -> None:
        """Process the results of all steps in flight."""

    def abort_all(self) -> None:
        """End every request."""


class Beside(NamedTuple):
    """A command, and the work in a thread that it waits for."""

    command: Command
    done: Future[None]

    @classmethod
    def start(cls, command: Command, work: Callable[[], None]) -> Beside:
        """Begin ``work`` in a thread that does not keep the process alive."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        Thread(target=run, name=command.name, daemon=True).start()
        return cls(command, done)


class Control:
    """The commands of an operator, carried out on ``loop``.

    The loop must not step while ``paused``.
    """

    def __init__(self, loop: Steps, operator: Operator | None) -> None:
        self._loop, self._operator = loop, operator
        self.paused = False
        self._state = EngineState() if operator is None else operator.state
        self._waiting: Command | None = None  # for running requests to end
        self._held: dict[int, Request] = {}  # arrived during a pause
        self._beside: Beside | None = None

    @property
    def receiving(self) -> bool:
        """Whether a command waits for work beside the loop."""
        return self._beside is not None

    def arrive(self, request: Request) -> None:
        """Accept a request, or hold it back."""
        if self.paused or self._waiting is not None:
            self._held[request.id] = request
        else:
            self._loop.admission.add(request)

    def cancel(self, request_id: int) -> bool:
        """Forget a held request; return False if it is not held."""
        return self._held.pop(request_id, None) is not None

    def drain(self) -> None:
        """Prepare for the engine's end.

        Held requests run. If the engine sleeps, all requests are dropped.
        """
        if self._state.sleeping is None:
            self._resume()
        else:
            self._held.clear()
            self._loop.scheduler.cancel_all()

    def take(self, command: Command) -> None:
        """Carry out ``command`` and answer it, now or when running requests have ended."""
        self._try(command, self._begin)

    def proceed(self) -> None:
        """Carry out a waiting command if it can proceed.

        It waits for its work in a thread, or for the end of all requests.
        """
        if self._beside is not None:
            command, done = self._beside
            wait([done], POLL_SECONDS if self.paused or self._loop.idle else 0)
            if done.done():
                self._beside = None
                self._try(command, lambda command: self._act(command, done))
        if self._waiting is not None and self._loop.idle:
            command, self._waiting = self._waiting, None
            self.paused = True
            self.take(command)

    def _try(self, command: Command, act: Callable[[Command], bool]) -> None:
        """Call ``act``, and answer with its error, or if it reports ``command`` done."""
        try:
            answers = act(command)
        except EngineDead:
            raise
        except Exception as error:
            if not isinstance(error, PreheatError):
                logger.exception("%s failed", command.name)
            self._answer(command, error)
        else:
            if answers:
                self._answer(command)

    def _begin(self, command: Command) -> bool:
        """Carry out ``command``; return False if it must wait."""
        if self._waiting is not None and command.name != "resume":
            raise InvalidRequest(f"{self._waiting.name} is waiting for running requests to end: resume first, or wait")
        if self._beside is not None and command.name not in ("pause", "resume"):
            raise InvalidRequest(
                f"{self._beside.command.name} is waiting for the trainer: send {command.name} when it has ended"
            )
        if command.name == "audit":
            return self._audit(command)
        if command.name in ("pause", "sleep") and not self._halt(command):
            self._waiting = command
            return False
        if command.name in ("init_weight_transfer_engine", "update_weights"):
            work = self._operate().beside(command)
            if work is not None:
                self._beside = Beside.start(command, work)
                return False
        return self._act(command)

    def _audit(self, command: Command) -> bool:
        """Ask for a pass of the audit; its end answers the command."""
        if (audit := self._loop.audit) is None:
            raise InvalidRequest("this engine takes no digests of its memory: start it with --audit-every SECONDS")
        if self.paused:
            raise InvalidRequest("the engine is paused or sleeps, and reads no memory: resume or wake it first")
        audit.ask(lambda: self._answer(command))
        return False

    def _halt(self, command: Command) -> bool:
        """Stop stepping; return False if running requests must end first."""
        if command.name == "sleep":
            self._may_sleep(command.level)
        if command.mode == "wait" and not self._loop.idle and not self.paused:
            return False
        self._loop.drain_steps()
        if command.mode == "abort":
            self._loop.abort_all()
        self.paused = True
        return True

    def _may_sleep(self, level: int) -> None:
        if self._state.sleeping is not None:
            raise InvalidRequest("the engine sleeps already: wake it up first")
        self._operate().check_sleep(level)

    def _act(self, command: Command, done: Future[None] | None = None) -> bool:
        """Carry out ``command`` and return True. Raises the error of ``done``, its finished work in a thread."""
        if done is not None:
            done.result()
        match command.name:
            case "resume":
                if self._state.sleeping is not None:
                    raise InvalidRequest("the engine sleeps: wake it up (/wake_up)")
                self._resume()
            case "update_weights":
                self._loop.drain_steps()
                self._operate().update(command)
            case "start_weight_update":
                self._operate().gather()
            case "finish_weight_update":
                self._loop.drain_steps()
                self._operate().finish(command)
            case "sleep":
                self._operate().sleep(command.level)
                self._state.sleeping = command.level
            case "wake_up":
                self._wake(command)
        return True

    def _wake(self, command: Command) -> None:
        if self._state.sleeping is None:
            raise InvalidRequest("the engine does not sleep")
        if self._operate().wake(command.tags):
            self._state.sleeping = None
            self._resume()

    def _operate(self) -> Operator:
        if self._operator is None:
            raise InvalidRequest("this engine takes no operator's commands")
        return self._operator

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._answer(
                waiting, InvalidRequest(f"{waiting.name} was canceled: the engine was resumed before it began")
            )
        self.paused = False
        held, self._held = self._held, {}
        for request in held.values():
            self._loop.admission.add(request)

    def _answer(self, command: Command, error: Exception | None = None) -> None:
        self._state.paused = self.paused
        wire = None if error is None else WireError.of(error)
        self._loop.transport.put(Outcome(command.id, copy(self._state), wire))  # a copy, as the state goes on changing
