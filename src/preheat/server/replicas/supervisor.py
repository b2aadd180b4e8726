"""The link between frontend and engines.

It loads the frontend, passes on the engines' messages, and notices when an engine hangs or dies. Then
:mod:`preheat.server.replicas.fleet` lets its requests go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from preheat.core import Declined, Died, FromEngine, Outcome, Ready, Report
from preheat.errors import EngineDead, PreheatError, StepTimeout
from preheat.frontend.frontend import Frontend
from preheat.server.http.service import Service
from preheat.server.replicas.engine_watch import EngineWatch
from preheat.server.replicas.fleet import Fleet
from preheat.server.replicas.replicas import Replicas
from preheat.startup import boot_front
from preheat.utils.gc import WholeWalks

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.2

WarmUpFrontend = Callable[[Frontend], None]
"""Called in a thread while the engine starts."""


class Supervisor:
    """The link between ``service`` and its ``replicas``.

    ``on_message`` is called with every message of an engine, ``on_dead`` once, when no engine is left and the server
    must exit.
    """

    def __init__(
        self,
        service: Service,
        replicas: Replicas,
        *,
        on_message: Callable[[FromEngine], None],
        on_dead: Callable[[], None],
    ) -> None:
        self._service, self._settings, self._replicas = service, service.settings, replicas
        self._watches = [EngineWatch(replicas, replica) for replica in range(len(replicas.members))]
        self._on_message, self._on_dead = on_message, on_dead
        self._fleet = Fleet(service, replicas, self._die, lambda replica: self._watches[replica].begin())
        self.boot_error: PreheatError | None = None
        """The error that kept the server from becoming ready, if any."""
        self._frontend: Frontend | None = None
        self._dying = set[int]()  # replicas that have died and have not exited yet
        self._stopping = False
        self._walks: WholeWalks | None = None  # from the first Ready on

    async def run(self, warm_up: WarmUpFrontend | None) -> None:
        """Load the frontend, warm it up, then watch the engine until cancelled.

        Any failure ends the server, as nobody else listens to the engine.
        """
        try:
            await self._run(warm_up)
        except PreheatError as error:
            self._die(error)
        except Exception as error:
            logger.debug("The server failed", exc_info=True)
            self._die(
                EngineDead(f"The server failed: {type(error).__name__}: {error}; --log-level debug shows the traceback")
            )

    async def _run(self, warm_up: WarmUpFrontend | None) -> None:
        send, metrics = self._replicas.send, self._service.metrics
        metrics.loads = self._replicas.router.loads if len(self._watches) > 1 else None
        frontend = await asyncio.to_thread(
            boot_front, self._settings, send, metrics, max_queued=self._settings.max_queued_requests
        )
        if warm_up is not None:
            try:
                await asyncio.to_thread(warm_up, frontend)
            except Exception:
                logger.exception("The frontend warm-up failed; the first requests may be slower")
        self._frontend = self._fleet.frontend = frontend
        self._service.attach(frontend)
        self._replicas.watch(self._receive, self._exited)
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._settings.rpc_timeout_ms / 4000))
            self._receive()  # messages that came while this process itself was held up
            self._check_heartbeat()
            self._check_time(frontend)
            self._fleet.check()
            if self._walks is not None:
                self._walks.walk()

    async def stop(self, now: bool) -> None:
        """Stop the engine: after its requests, or at once if ``now``."""
        self._service.draining = self._stopping = True
        await self._replicas.stop(now or self._service.dead is not None)

    def _receive(self) -> None:
        service, frontend = self._service, self._frontend
        assert frontend is not None
        for watch in self._watches:
            for message in watch.receive():
                if isinstance(message, Died):
                    self._fleet.fall(watch.replica, message.error.restore(), "died")
                    continue
                if isinstance(message, Declined):
                    self._service.metrics.moves["died" if message.lost else "overloaded"] += 1
                    continue
                frontend.handle(message)
                if isinstance(message, Outcome):
                    self._replicas.update(message.state.contract)
                if isinstance(message, Ready | Report):
                    service.live.book(message.record, message.engine)
                self._on_message(message)
                if self._walks is None and isinstance(message, Ready):
                    self._walks = WholeWalks()
        service.stalled = next((watch.stalled for watch in self._watches if watch.stalled), None)
        if any(watch.behind for watch in self._watches):
            asyncio.get_running_loop().call_soon(self._receive)

    def _exited(self, replica: int, code: int | None) -> None:
        """Let the requests of a replica go on elsewhere, and start it again once it has exited.

        Without a status it dies, and may take seconds to exit: then only others can help.
        """
        if self._stopping or (code is None and not set(self._replicas.takers) - {replica}):
            return
        self._receive()  # its last message may still be on its way
        while self._watches[replica].behind:
            self._receive()
        member = self._replicas.members[replica]
        said = self._replicas.named(replica, member.process.said(code))
        if code is not None and replica in self._dying:
            logger.error("%s", said)  # the requests have gone on already
            self._dying.discard(replica)
        elif code is None and member.alive:
            self._dying.add(replica)
        self._fleet.fall(replica, EngineDead(said), "died")
        if code is not None:
            self._fleet.restart(replica)

    def _die(self, error: PreheatError) -> None:
        if self._service.dead is not None:
            return
        if self._service.max_model_len is None:
            self.boot_error = error
            logger.debug("The boot failed", exc_info=error)
        else:
            logger.error("%s", error.message)
        self._service.dead = error.message
        if self._frontend is not None:
            self._frontend.die(error.message)
        self._on_dead()

    def _check_heartbeat(self) -> None:
        """Note in the service that the heartbeat is missing, or is back."""
        service, limit = self._service, self._settings.engine_heartbeat_timeout_s
        silents = [watch.replica for watch in self._watches if watch.is_silent(limit)]
        if set(self._replicas.takers) - set(silents):
            for replica in silents:
                self._watches[replica].stalled = None
                self._fleet.fall(replica, StepTimeout(self._replicas.named(replica, _silent(limit))), "silent")
            silents = []
        silent = next(iter(silents), None)
        if silent is None:
            if service.silent is not None:
                logger.info("The engine's heartbeat is back")
                service.silent = None
        elif service.silent is None and service.dead is None:
            service.silent = self._replicas.named(silent, _silent(limit))
            logger.error("%s", service.silent)

    def _check_time(self, frontend: Frontend) -> None:
        """Check the time limits of each engine.

        There is one for a step, and one for the hand-over of requests to an idle engine.
        """
        step, hand_over = self._settings.engine_iteration_timeout_s, self._settings.rpc_timeout_ms
        for replica, watch in enumerate(self._watches):
            if not frontend.busy or frontend.halted:
                watch.rest()
                continue
            too_long, not_taken = watch.overdue(step, hand_over / 1000)
            if too_long:
                allowed = f"the {step:g} s that VLLM_ENGINE_ITERATION_TIMEOUT_S allows"
                self._stall(frontend, replica, f"A step took longer than {allowed}")
            elif not_taken:
                self._stall(frontend, replica, _not_taken(hand_over))
            elif self._service.silent is not None:  # the engine may run others, but not in the middle of a step
                late = watch.late(hand_over / 1000)
                frontend.fail(late, StepTimeout(f"{_not_taken(hand_over)}. {self._service.silent}"))

    def _stall(self, frontend: Frontend, replica: int, said: str) -> None:
        message = self._replicas.named(replica, said)
        if set(self._replicas.takers) - {replica}:
            self._fleet.fall(replica, StepTimeout(message), "stalled")
            return
        logger.error("%s", message)
        self._service.stalled = self._watches[replica].stalled = message
        frontend.fail(self._replicas.router.requests(replica), StepTimeout(message))


def _silent(limit: float) -> str:
    return (
        f"The engine has sent no heartbeat for {limit:g} s (--engine-heartbeat-timeout-s): its process is stopped, or "
        "its device does not answer"
    )


def _not_taken(milliseconds: int) -> str:
    return f"The engine did not take a request within the {milliseconds} ms that VLLM_RPC_TIMEOUT allows"
