"""Loads the frontend, passes on the engine's messages, notices when the engine hangs or dies."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from preheat.core import Died, FromEngine, Ready, Report
from preheat.errors import EngineDead, PreheatError, StepTimeout
from preheat.frontend.frontend import Frontend
from preheat.server.process import EngineProcess
from preheat.server.service import Service
from preheat.startup import boot_front

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.2

WarmUpFrontend = Callable[[Frontend], None]
"""Called in a thread while the engine starts."""


class Supervisor:
    """Connects ``service`` with its ``engine``. ``on_message`` is called with every message of the engine, ``on_dead``
    once, when the engine is dead and the server must exit.
    """

    def __init__(
        self,
        service: Service,
        engine: EngineProcess,
        *,
        on_message: Callable[[FromEngine], None],
        on_dead: Callable[[], None],
    ) -> None:
        self._service, self._settings, self._engine = service, service.settings, engine
        self._on_message, self._on_dead = on_message, on_dead
        self.boot_error: PreheatError | None = None
        """Why the server never became ready."""
        self._frontend: Frontend | None = None
        self._stopping = False
        self._heard_at = time.monotonic()
        self._offered_at: float | None = None

    async def run(self, warm_up: WarmUpFrontend | None) -> None:
        """Load the frontend, warm it up, then listen to the engine and watch it, until cancelled."""
        try:
            send, metrics = self._engine.transport.send, self._service.metrics
            frontend = await asyncio.to_thread(
                boot_front, self._settings, send, metrics, max_queued=self._settings.max_queued_requests
            )
        except PreheatError as error:
            self._die(error)
            return
        if warm_up is not None:
            try:
                await asyncio.to_thread(warm_up, frontend)
            except Exception:
                logger.exception("The frontend warm-up failed; the first requests may be slower")
        self._frontend = frontend
        self._service.attach(frontend)
        self._engine.watch(self._receive, self._exited)
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._settings.rpc_timeout_ms / 4000))
            self._receive()  # what came while this process itself was held up
            self._check_heartbeat()
            self._check_time(frontend)

    async def stop(self, now: bool) -> None:
        """Stop the engine: when its requests are finished, or ``now``."""
        self._service.draining = self._stopping = True
        await self._engine.stop(now or self._service.dead is not None)

    def _receive(self) -> None:
        transport, service, frontend = self._engine.transport, self._service, self._frontend
        assert frontend is not None
        untaken = len(transport.untaken)
        messages = transport.receive()
        if messages or len(transport.untaken) != untaken:
            self._heard_at, service.stalled = time.monotonic(), None
        for message in messages:
            if isinstance(message, Died):
                self._die(message.error.restore())
            frontend.handle(message)
            if isinstance(message, Ready | Report):
                service.live.book(message.record)
            self._on_message(message)

    def _exited(self, code: int) -> None:
        if not self._stopping:
            self._receive()  # its last message may still be on its way
            self._die(EngineDead(f"The engine's process ended with status {code}{_killed(code)}"))

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
        """Note in the service that no heartbeat comes, or that it comes again."""
        service, beat_at = self._service, self._engine.transport.beat_at
        limit = self._settings.engine_heartbeat_timeout_s
        if beat_at is None or time.monotonic() - beat_at <= limit:
            if service.silent is not None:
                logger.info("The engine's heartbeat is back")
                service.silent = None
        elif service.silent is None and service.dead is None:
            service.silent = (
                f"The engine has sent no heartbeat for {limit:g} s (--engine-heartbeat-timeout-s): its process is "
                "stopped, or its device does not answer"
            )
            logger.error("%s", service.silent)

    def _check_time(self, frontend: Frontend) -> None:
        """Check the time limits of a step, and of the hand-over of requests to an idle engine."""
        now = time.monotonic()
        if not frontend.busy or frontend.halted:
            self._heard_at, self._offered_at = now, None
            return
        waiting = [(id, at) for id, at in self._engine.transport.untaken if frontend.is_unfinished(id)]
        if waiting and len(waiting) == frontend.num_unfinished:
            self._offered_at = self._offered_at or now
        else:
            self._offered_at = None
        step, hand_over = self._settings.engine_iteration_timeout_s, self._settings.rpc_timeout_ms
        if now - self._heard_at > step:
            self._stall(frontend, f"A step took longer than the {step:g} s that VLLM_ENGINE_ITERATION_TIMEOUT_S allows")
        elif self._offered_at is not None and now - self._offered_at > hand_over / 1000:
            self._stall(frontend, _not_taken(hand_over))
        elif self._service.silent is not None:  # it may run others, but not in the middle of a step
            late = [id for id, at in waiting if now - at > hand_over / 1000]
            frontend.fail(late, StepTimeout(f"{_not_taken(hand_over)}. {self._service.silent}"))

    def _stall(self, frontend: Frontend, message: str) -> None:
        logger.error("%s", message)
        self._service.stalled = message
        frontend.fail_all(StepTimeout(message))


def _killed(code: int) -> str:
    return ": it was killed, perhaps because the machine ran out of memory" if code == -signal.SIGKILL else ""


def _not_taken(milliseconds: int) -> str:
    return f"The engine did not take a request within the {milliseconds} ms that VLLM_RPC_TIMEOUT allows"
