"""Shared state of the endpoints: the frontend, the model's names, and readiness.

A service is starting, ready, draining or dead. It is also silent while the engine's heartbeat is missing; new requests
may then still wait for the engine. It is stalled while the engine does not answer in time; new requests are then
refused. It is waiting while no engine runs and one starts again: running requests wait, new ones are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from preheat.configs.adapters import LoraModule, lora_modules, model_names
from preheat.core import Progress, ToEngine
from preheat.errors import Asleep, Draining, EngineDead, ModelNotFound, NotReady, PreheatError, StepTimeout
from preheat.frontend.frontend import Frontend
from preheat.metrics import Metrics
from preheat.server.http.turns import Turns
from preheat.server.openai.background import Background
from preheat.server.openai.responses_store import ResponseStore
from preheat.server.operations.live import LiveRecords
from preheat.settings import Settings

if TYPE_CHECKING:
    from preheat.server.http.image_lanes import ImageLanes


class Service:
    """One served model, after :meth:`attach` and the engine's Ready.

    ``send`` sends a message to the engine.
    """

    def __init__(self, settings: Settings, send: Callable[[ToEngine], None]) -> None:
        self.settings = settings
        self.names = model_names(settings)
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0], settings.metrics_prefix, settings.data_parallel_size)
        self.live = LiveRecords(send, settings.data_parallel_size)
        self.load = 0  # requests for completions that are being answered
        self.turns = Turns()
        self.image_lanes: ImageLanes | None = None
        self.background = Background()
        self.responses = ResponseStore() if settings.enable_responses_store else None
        self.loads_adapters = settings.enable_lora and settings.allow_runtime_lora_updating
        self.draining = False
        self.drain: Callable[[], asyncio.Future[None]] = self._drain
        self.silent: str | None = None
        self.stalled: str | None = None
        self.waiting: str | None = None
        self.dead: str | None = None
        self.engines: Callable[[], int] = lambda: settings.data_parallel_size
        self._frontend: Frontend | None = None

    def attach(self, frontend: Frontend) -> None:
        """Serve through ``frontend`` from now on."""
        if frontend.images is not None:
            from preheat.server.http.image_lanes import ImageLanes  # needs Pillow; other models do without it

            self.image_lanes = ImageLanes(frontend.images)
        self._frontend = frontend

    @property
    def frontend(self) -> Frontend:
        """The frontend, if it accepts requests. Raises NotReady or EngineDead, with the reason, if not."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.draining:
            raise Draining("The server is about to stop and takes no more requests")
        if reason := self.stalled or self.waiting:
            raise NotReady(reason)
        if self._frontend is None:
            raise NotReady("The engine is still starting; try again later")
        self._frontend.limits()
        return self._frontend

    @property
    def takes_requests(self) -> bool:
        """Whether a request would be accepted now."""
        try:
            return bool(self.frontend)
        except PreheatError:
            return False

    @property
    def booted(self) -> Frontend:
        """The frontend of a running engine, even if it takes no requests now. Raises NotReady or EngineDead."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self._frontend is None or self._frontend.ready is None:
            raise NotReady("The engine is still starting; try again later")
        return self._frontend

    @property
    def progress(self) -> Progress | None:
        """The progress of the engine's start, while it goes on.

        None if it is ready, or never will be.
        """
        over = self.dead is not None or self.draining or self.max_model_len is not None
        return None if over else (self._frontend and self._frontend.progress) or Progress(0, 0, "")

    @property
    def max_model_len(self) -> int | None:
        return self._frontend.ready.max_model_len if self._frontend and self._frontend.ready else None

    @property
    def adapters(self) -> list[LoraModule]:
        """The served adapters; while the engine starts, the configured ones."""
        if self._frontend is None:
            return list(lora_modules(self.settings.lora_modules))
        return list(self._frontend.adapters.served.values())

    @property
    def busy(self) -> bool:
        return self._frontend is not None and self._frontend.busy

    def _drain(self) -> asyncio.Future[None]:
        """Take no more requests; a process that listens replaces this by a drain with a deadline."""
        self.draining = True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def check_ready(self) -> None:
        """Raise NotReady or EngineDead unless requests are taken and the engine answers."""
        _ = self.frontend
        if self.silent is not None:
            raise NotReady(self.silent)

    def end_all(self, error: PreheatError) -> None:
        """End the running requests with ``error``."""
        if self._frontend is not None:
            self._frontend.fail_all(error)

    async def refresh(self, patience: float) -> None:
        """Update ``live`` and the metrics based on it.

        Waits up to ``patience`` seconds for the engine.
        """
        if self.max_model_len is None:
            return
        if self.dead is None:
            await self.live.refresh(patience)
        if self.settings.enable_lora and self._frontend is not None:
            self.metrics.adapters = self._frontend.adapter_labels(self.settings.max_loras)
        records, ready = self.live.records, self._frontend.ready if self._frontend else None
        if ready is not None and not self.metrics.cache_config:
            self.metrics.cache_config = {
                "block_size": ready.block_size,
                "num_gpu_blocks": ready.num_blocks,
                "enable_prefix_caching": self.settings.enable_prefix_caching,
                "gpu_memory_utilization": self.settings.gpu_memory_utilization,
            }
        for engine, record in zip(self.metrics.engines, records, strict=True):
            engine.items, engine.warmup_seconds = record.states, record.seconds
            engine.cold, engine.misses = record.cold, sum(record.misses.values())
        digest = records[0].proof.digest
        self.metrics.digest = {digest: 1} if digest else {}

    def adapter_of(self, name: str | None) -> str:
        """Return the adapter that the model's ``name`` selects; empty for the model itself.

        Raises ModelNotFound if the name is not served, and the errors of :attr:`frontend`.
        """
        adapters = self.frontend.adapters.served
        if name is None or name in self.names:
            return ""
        if name not in adapters:
            known = ", ".join((*self.names, *adapters))
            raise ModelNotFound(f"The model {name!r} is not served here, but {known} is", param="model")
        return name

    def check_health(self) -> None:
        """Raise the reason against new requests, if any.

        A sleep is no reason, as ``/wake_up`` ends it.
        """
        if self.dead is not None:
            error = EngineDead(self.dead)
            error.status = NotReady.status
            raise error
        if reason := self.stalled or self.silent:
            raise StepTimeout(reason)
        with suppress(Asleep):
            _ = self.frontend
