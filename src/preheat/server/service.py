"""What the server's routes share: the front door, the engine's process and whether both are well.

A service is starting, ready, draining or dead; while the engine does not answer in time it is stalled as well, and
says so until it hears of it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from preheat.core import FromEngine, Progress, Ready, Report
from preheat.errors import EngineDead, ModelNotFound, NotReady, StepTimeout
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontdoor import FrontDoor, held_back
from preheat.frontend.tokenizer import Tokenizer
from preheat.metrics import Metrics
from preheat.server.live import Live
from preheat.server.process import ENGINE, EngineProcess
from preheat.settings import Settings
from preheat.startup import boot_front

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.2


async def _no_rehearsal() -> None:
    pass


class Service:
    """Serves one model. ``on_dead`` is called once, when the engine has gone and the server must follow; ``on_message``
    is told of everything that the engine says, and ``rehearsal`` runs before the engine is listened to.
    """

    def __init__(self, settings: Settings, entry: str = ENGINE) -> None:
        self.settings = settings
        self.names = settings.served_model_name or (settings.model,)
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0])
        self.draining = self._stopping = False
        self.stalled: str | None = None
        self.dead: str | None = None
        self.on_dead: Callable[[], None] = lambda: None
        self.on_message: Callable[[FromEngine], None] = lambda _: None
        self.rehearsal: Callable[[], Awaitable[None]] = _no_rehearsal
        self._engine = EngineProcess(settings, entry)
        self.live = Live(self._engine.transport.send)
        self._door: FrontDoor | None = None
        self._template: ChatTemplate | None = None
        self._heard_at = time.monotonic()
        self._offered_at: float | None = None

    # ----------------------------------------------------------------------------------------------- for routes

    @property
    def door(self) -> FrontDoor:
        """The front door, when it takes requests. Raises NotReady or EngineDead, saying why it does not."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.draining:
            raise NotReady("The server is about to stop and takes no more requests")
        if self.stalled is not None:
            raise NotReady(self.stalled)
        if self._door is None or self._door.ready is None:
            raise NotReady("The engine is still starting; try again later")
        if self._door.ready.held:
            raise NotReady(held_back(self._door.ready))
        return self._door

    @property
    def progress(self) -> Progress | None:
        """How far the engine's start is; None once it is ready, or will never be."""
        over = self.dead is not None or self.draining or self.max_model_len is not None
        return None if over else (self._door and self._door.progress) or Progress(0, 0, "")

    async def refresh(self, patience: float) -> None:
        """Bring ``live`` and the metrics that come from it up to date, within ``patience`` seconds if that is possible.

        Before the engine is ready there is nothing to know.
        """
        if self.max_model_len is None:
            return
        if self.dead is None:
            await self.live.refresh(patience)
        record = self.live.record
        self.metrics.items, self.metrics.warmup_seconds = record.states, record.seconds
        self.metrics.cold, self.metrics.misses = record.cold, sum(record.misses.values())
        self.metrics.digest = {record.proof.digest: 1} if record.proof.digest else {}

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._door is not None, "the front door is not there yet"
        return self._door.tokenizer

    def take_door(self, door: FrontDoor) -> None:
        """Serve through ``door`` from now on."""
        self._door = door

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise NotReady("The engine is still starting; try again later")
        return self._template

    @property
    def max_model_len(self) -> int | None:
        return self._door.ready.max_model_len if self._door and self._door.ready else None

    @property
    def busy(self) -> bool:
        """Requests are running."""
        return self._door is not None and self._door.busy

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless ``name`` is one that is served here."""
        if name is not None and name not in self.names:
            raise ModelNotFound(f"The model {name!r} is not served here, but {', '.join(self.names)} is", param="model")

    def check_health(self) -> None:
        """Raise what keeps the engine from answering; starting and draining are healthy."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.stalled is not None:
            raise StepTimeout(self.stalled)

    # --------------------------------------------------------------------------------------------------- the life

    async def run(self) -> None:
        """Load what speaks text, then listen to the engine and watch it, until cancelled."""
        try:
            self._door, self._template = await asyncio.to_thread(
                boot_front, self.settings, self._engine.transport.send, self.metrics
            )
        except Exception as error:  # whatever it is, the server cannot serve
            self._die(f"The tokenizer cannot be loaded: {error}")
            return
        await self.rehearsal()
        self._engine.watch(self._receive, self._exited)
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self.settings.rpc_timeout_ms / 4000))
            self._check_time()

    async def stop(self, now: bool) -> None:
        """End the engine: when it has finished what it runs, or ``now``."""
        self.draining = self._stopping = True
        await self._engine.stop(now or self.dead is not None)

    def _receive(self) -> None:
        transport, door = self._engine.transport, self._door
        assert door is not None
        untaken = transport.untaken
        messages = transport.receive()
        if messages or transport.untaken != untaken:
            self._heard_at, self.stalled = time.monotonic(), None
        for message in messages:
            door.handle(message)
            if isinstance(message, Ready | Report):
                self.live.book(message.record)
            self.on_message(message)
        if door.dead is not None:
            self._die(door.dead)

    def _exited(self, code: int) -> None:
        if not self._stopping:
            self._receive()  # its last words may still be on their way
            self._die(f"The engine's process ended with status {code}")

    def _die(self, message: str) -> None:
        if self.dead is not None:
            return
        logger.error("%s", message)
        self.dead = message
        if self._door is not None:
            self._door.die(message)
        self.on_dead()

    def _check_time(self) -> None:
        """The step watchdog, and the hand-over of requests to an engine that has nothing else to do."""
        door, now = self._door, time.monotonic()
        assert door is not None
        if not door.busy:
            self._heard_at, self._offered_at = now, None
            return
        untaken = self._engine.transport.untaken
        if untaken and untaken >= door.num_running:
            self._offered_at = self._offered_at or now
        else:
            self._offered_at = None
        step, hand_over = self.settings.engine_iteration_timeout_s, self.settings.rpc_timeout_ms
        if now - self._heard_at > step:
            self._stall(f"A step took longer than the {step:g} s that VLLM_ENGINE_ITERATION_TIMEOUT_S allows")
        elif self._offered_at is not None and now - self._offered_at > hand_over / 1000:
            self._stall(f"The engine did not take a request within the {hand_over} ms that VLLM_RPC_TIMEOUT allows")

    def _stall(self, message: str) -> None:
        assert self._door is not None
        logger.error("%s", message)
        self.stalled = message
        self._door.fail_all(StepTimeout(message))
