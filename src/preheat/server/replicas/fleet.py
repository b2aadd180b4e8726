"""The faults of members: their requests go on elsewhere, their processes start again, and clients wait in between."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from preheat.core import Drain
from preheat.errors import EngineDead, MemoryFault, PreheatError
from preheat.frontend.frontend import Frontend
from preheat.frontend.journal import MOST_MOVES
from preheat.server.http.service import Service
from preheat.server.replicas.member import EngineMember, State
from preheat.server.replicas.replicas import Replicas
from preheat.server.replicas.restarts import Restarts

logger = logging.getLogger(__name__)

READING_SECONDS = 10.0
"""The longest time for which an engine starts later, so that others read moved requests with the whole machine."""

PAUSE_SECONDS = 5.0
"""Seconds between two signs of life on a stream that waits for an engine."""


class Fleet:
    """The members of ``service`` through their faults.

    ``die`` ends the server with the error of the last member. ``started`` is called with a member that starts again.
    """

    def __init__(
        self,
        service: Service,
        replicas: Replicas,
        die: Callable[[PreheatError], None],
        started: Callable[[int], None],
    ) -> None:
        self._started = started
        self._starts: dict[int, float] = {}  # members that start again, and the latest time
        self._service, self._settings, self._replicas, self._die = service, service.settings, replicas, die
        self._restarts = [Restarts(self._settings.engine_restarts) for _ in replicas.members]
        self._reasons = ["died" for _ in replicas.members]
        self._waits_since: float | None = None
        self._nudged_at = 0.0
        self.frontend: Frontend | None = None
        replicas.prepare = lambda: self.frontend.adapters.again() if self.frontend else ()
        replicas.parts = lambda: self.frontend.parts if self.frontend else {}
        service.engines = lambda: len(replicas.takers)

    def fall(self, replica: int, error: PreheatError, reason: str) -> None:
        """Take out a member with a fault. Its requests go on elsewhere, or wait for a member to start again.

        Without a member to wait for, the server dies of ``error``.
        """
        member = self._replicas.members[replica]
        if member.state is State.GONE:  # refused
            logger.error("%s", error.message)
            member.process.kill()
            self._end_if_alone(error)
            return
        if not self._replicas.joined:
            self._die(error)
            return
        if member.state is State.DEAD or self._service.dead is not None:
            return
        asked_to = member.state is State.LEAVING
        if not (self._others(replica) or self._may_restart(member)):
            self._die(error)
            return
        reason = error.code if isinstance(error, MemoryFault) else "drained" if asked_to else reason
        self._reasons[replica] = reason
        logger.log(logging.INFO if asked_to else logging.ERROR, "%s", error.message)
        self._move(replica, reason, error)

    def _move(self, replica: int, reason: str, error: PreheatError) -> None:
        """Move the requests of a member; with a fault of its memory, end them and forget kept answers."""
        frontend, trusted = self.frontend, not isinstance(error, MemoryFault)
        assert frontend is not None
        moved = self._replicas.lose(replica, trusted=trusted)
        self._service.metrics.moves[reason] += moved.requests
        if moved.requests:
            logger.warning("%d requests go on behind the tokens that their clients have", moved.requests)
        frontend.interrupt("The engine ended before it had carried out the command")
        said = f"The engines of this request have ended {MOST_MOVES + 1} times, so it may be the reason"
        frontend.fail(moved.ended, EngineDead(said) if trusted else error)
        if not trusted and frontend.answers is not None:
            frontend.answers.forget()
        self._service.live.lose(replica)
        self._note()

    def restart(self, replica: int) -> None:
        """Start a member again whose process has exited, unless it stays away.

        It starts when its requests have gone on elsewhere, as a boot would take time from the engines that read them.
        """
        member = self._replicas.members[replica]
        if self._service.dead is not None or member.state is not State.DEAD:
            return
        if not self._may_restart(member):
            member.state = State.GONE
            if self._service.draining:
                return
            logger.error("%s", self._replicas.named(replica, "The engine ended too often, and is not started again"))
            self._end_if_alone(EngineDead("The last engine has ended"))
            return
        self._restarts[replica].begin(time.monotonic())
        self._starts[replica] = time.monotonic() + READING_SECONDS
        self._start()

    def _start(self) -> None:
        """Start the members again whose time has come."""
        if self._service.draining or self._service.dead is not None:
            self._starts.clear()
        busy = self._replicas.takers and self._replicas.journal.moving
        for replica, latest in list(self._starts.items()):
            if not busy or time.monotonic() > latest:
                del self._starts[replica]
                self._service.metrics.restarts[self._reasons[replica]] += 1
                self._replicas.restart(replica)
                self._started(replica)

    def check(self) -> None:
        """Do the work of time: members that start again, that leave, members that are back, requests that wait."""
        self._start()
        for member in self._replicas.members:
            if member.state is State.SERVING:
                self._restarts[member.number].succeed()
            if member.state is State.LEAVING:
                self._check_leaving(member)
            if not member.alive:
                self._service.live.lose(member.number)
        self._note()
        now, since = time.monotonic(), self._waits_since
        if since is None or self.frontend is None:
            return
        if now - since > self._settings.engine_restart_wait:
            said = f"No engine was back within the {self._settings.engine_restart_wait:g} s of --engine-restart-wait"
            self.frontend.fail_all(EngineDead(said))
            if any(member.state is State.GONE for member in self._replicas.members):
                self._die(EngineDead(f"{said}, and one was refused"))
        elif now - self._nudged_at > PAUSE_SECONDS:
            self._nudged_at = now
            self.frontend.nudge()

    def _check_leaving(self, member: EngineMember) -> None:
        """End a member that leaves once it is idle; at the deadline, move its requests."""
        assert member.left_at is not None
        if not self._replicas.router.requests(member.number):
            member.send(Drain())
        elif time.monotonic() - member.left_at > self._settings.shutdown_timeout:
            said = f"The engine was asked to end, and had {self._settings.shutdown_timeout:g} s for its requests"
            self.fall(member.number, EngineDead(self._replicas.named(member.number, said)), "drained")

    def _note(self) -> None:
        """Note in the service whether requests wait for a member."""
        if not self._replicas.joined or self._replicas.takers:
            self._service.waiting, self._waits_since = None, None
            return
        self._service.waiting = "No engine takes requests now, and one starts again; try again later"
        if any(member.alive for member in self._replicas.members):
            return  # it leaves, and its requests run
        self._waits_since = self._waits_since or time.monotonic()

    def _others(self, replica: int) -> bool:
        """Return whether another member runs requests, or will."""
        members = (member for member in self._replicas.members if member.number != replica)
        return any(
            member.state in (State.SERVING, State.STARTING)
            or (member.state in (State.LEAVING, State.DEAD) and self._may_restart(member))
            for member in members
        )

    def _may_restart(self, member: EngineMember) -> bool:
        """Return whether ``member`` may be started again.

        An engine that sleeps or is paused has a state that a new one lacks.
        """
        frontend = self.frontend
        if self._service.draining or frontend is None or frontend.state.paused or frontend.state.sleeping is not None:
            return False
        return self._restarts[member.number].allowed(time.monotonic())

    def _end_if_alone(self, error: PreheatError) -> None:
        if all(member.state is State.GONE for member in self._replicas.members):
            self._die(error)
