"""What the endpoints share: the frontend, the model's names, and whether requests are taken.

A service is starting, ready, draining or dead; while the engine does not answer in time it is stalled as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from preheat.core import Progress, ToEngine
from preheat.errors import EngineDead, ModelNotFound, NotReady, StepTimeout
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontend import Frontend
from preheat.metrics import Metrics
from preheat.server.live import LiveRecord
from preheat.settings import Settings


class Service:
    """Serves one model: from :meth:`attach` and the engine's Ready on. ``send`` hands a message to the engine."""

    def __init__(self, settings: Settings, send: Callable[[ToEngine], None]) -> None:
        self.settings = settings
        self.names = settings.served_model_name or (settings.model,)
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0])
        self.live = LiveRecord(send)
        self.draining = False
        self.stalled: str | None = None
        self.dead: str | None = None
        self._frontend: Frontend | None = None
        self._template: ChatTemplate | None = None

    def attach(self, frontend: Frontend, template: ChatTemplate) -> None:
        """Serve through these from now on."""
        self._frontend, self._template = frontend, template

    @property
    def frontend(self) -> Frontend:
        """The frontend, when it takes requests. Raises NotReady or EngineDead, saying why it does not."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.draining:
            raise NotReady("The server is about to stop and takes no more requests")
        if self.stalled is not None:
            raise NotReady(self.stalled)
        if self._frontend is None:
            raise NotReady("The engine is still starting; try again later")
        self._frontend.limits()
        return self._frontend

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise NotReady("The engine is still starting; try again later")
        return self._template

    @property
    def progress(self) -> Progress | None:
        """How far the engine's start is; None once it is ready, or will never be."""
        over = self.dead is not None or self.draining or self.max_model_len is not None
        return None if over else (self._frontend and self._frontend.progress) or Progress(0, 0, "")

    @property
    def max_model_len(self) -> int | None:
        return self._frontend.ready.max_model_len if self._frontend and self._frontend.ready else None

    @property
    def busy(self) -> bool:
        """Requests are running."""
        return self._frontend is not None and self._frontend.busy

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
