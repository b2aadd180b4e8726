"""The record as it is now: the engine keeps it, so the server asks for it when somebody wants to see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from preheat.core import Ask, ToEngine
from preheat.warmup.record import Record


class Live:
    """What the engine last said of its warm-up. ``send`` hands a message to the engine."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self.json = b""
        self._send = send
        self._booked_at = time.monotonic()
        self._decoded: Record | None = None
        self._answer: asyncio.Future[None] | None = None  # of the question that is under way

    @property
    def record(self) -> Record:
        if self._decoded is None:
            self._decoded = Record.from_json(self.json)
        return self._decoded

    @property
    def age(self) -> float:
        """Seconds since the engine sent the record."""
        return time.monotonic() - self._booked_at

    def book(self, json: bytes) -> None:
        """The engine has sent its record."""
        self.json, self._decoded, self._booked_at = json, None, time.monotonic()
        if self._answer is not None:
            self._answer.set_result(None)
            self._answer = None

    async def refresh(self, patience: float) -> None:
        """Ask for the record; after ``patience`` seconds without an answer the last one has to do.

        The engine answers between two steps. However many want to know, one question is under way at a time.
        """
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._send(Ask())
        await asyncio.wait([self._answer], timeout=patience)
