"""The current warm-up record: the engine keeps it, and the server asks for it when a client wants to see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from preheat.core import Ask, ToEngine
from preheat.warmup.record import Record


class LiveRecord:
    """The record that the engine sent last. ``send`` hands a message to the engine."""

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
        """Ask for the record; after ``patience`` seconds without an answer, keep the last one.

        The engine answers between two steps. One question is under way at a time, however many clients ask.
        """
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._send(Ask())
        await asyncio.wait([self._answer], timeout=patience)
