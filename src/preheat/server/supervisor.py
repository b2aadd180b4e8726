"""The life of a server: load the frontend, pass on what the engine says, notice when it hangs or dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from preheat.core import FromEngine, Ready, Report
from preheat.errors import StepTimeout
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontend import Frontend
from preheat.server.process import EngineProcess
from preheat.server.service import Service
from preheat.startup import boot_front

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.2

WarmUpFrontend = Callable[[Frontend, ChatTemplate], None]
"""Runs in a thread while the engine starts."""


class Supervisor:
    """Connects ``service`` with its ``engine``. ``on_message`` is called with every message of the engine; ``on_dead``
    once, when it has gone and the server must follow.
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
        self._frontend: Frontend | None = None
        self._stopping = False
        self._heard_at = time.monotonic()
        self._offered_at: float | None = None

    async def run(self, warm_up: WarmUpFrontend | None) -> None:
        """Load tokenizer and template, warm up, then listen to the engine and watch it, until cancelled."""
        try:
            frontend, template = await asyncio.to_thread(
                boot_front, self._settings, self._engine.transport.send, self._service.metrics
            )
        except Exception as error:  # whatever it is, the server cannot serve
            self._die(f"The tokenizer cannot be loaded: {error}")
            return
        if warm_up is not None:
            try:
                await asyncio.to_thread(warm_up, frontend, template)
            except Exception:
                logger.exception("The frontend warm-up failed; the first requests may be slower")
        self._frontend = frontend
        self._service.attach(frontend, template)
        self._engine.watch(self._receive, self._exited)
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._settings.rpc_timeout_ms / 4000))
            self._check_time(frontend)

    async def stop(self, now: bool) -> None:
        """End the engine: when it has finished what it runs, or ``now``."""
        self._service.draining = self._stopping = True
        await self._engine.stop(now or self._service.dead is not None)

    def _receive(self) -> None:
        transport, service, frontend = self._engine.transport, self._service, self._frontend
        assert frontend is not None
        untaken = transport.untaken
        messages = transport.receive()
        if messages or transport.untaken != untaken:
            self._heard_at, service.stalled = time.monotonic(), None
        for message in messages:
            frontend.handle(message)
            if isinstance(message, Ready | Report):
                service.live.book(message.record)
            self._on_message(message)
        if frontend.dead is not None:
            self._die(frontend.dead)

    def _exited(self, code: int) -> None:
        if not self._stopping:
            self._receive()  # its last message may still be on its way
            self._die(f"The engine's process ended with status {code}")

    def _die(self, message: str) -> None:
        if self._service.dead is not None:
            return
        logger.error("%s", message)
        self._service.dead = message
        if self._frontend is not None:
            self._frontend.die(message)
        self._on_dead()

    def _check_time(self, frontend: Frontend) -> None:
        """The step watchdog, and the hand-over of requests to an engine that has nothing else to do."""
        now = time.monotonic()
        if not frontend.busy:
            self._heard_at, self._offered_at = now, None
            return
        untaken = self._engine.transport.untaken
        if untaken and untaken >= frontend.num_unfinished:
            self._offered_at = self._offered_at or now
        else:
            self._offered_at = None
        step, hand_over = self._settings.engine_iteration_timeout_s, self._settings.rpc_timeout_ms
        if now - self._heard_at > step:
            self._stall(frontend, f"A step took longer than the {step:g} s that VLLM_ENGINE_ITERATION_TIMEOUT_S allows")
        elif self._offered_at is not None and now - self._offered_at > hand_over / 1000:
            message = f"The engine did not take a request within the {hand_over} ms that VLLM_RPC_TIMEOUT allows"
            self._stall(frontend, message)

    def _stall(self, frontend: Frontend, message: str) -> None:
        logger.error("%s", message)
        self._service.stalled = message
        frontend.fail_all(StepTimeout(message))
