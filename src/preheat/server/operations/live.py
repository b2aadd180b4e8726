"""The current warm-up records. The engines hold them; the server asks for them on demand."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from preheat.core import Ask, ToEngine
from preheat.warmup.record import Record


class LiveRecords:
    """The last record of each engine, by its number. ``send`` sends a message to all engines."""

    def __init__(self, send: Callable[[ToEngine], None], engines: int = 1) -> None:
        self.json = [b""] * engines
        self._send = send
        self._booked_at = [time.monotonic()] * engines
        self._decoded: list[Record | None] = [None] * engines
        self._answer: asyncio.Future[None] | None = None  # of the pending Ask
        self._asked = set[int]()  # the engines that have not answered it
        self._absent = set[int]()  # the engines that do not run

    def record(self, engine: int) -> Record:
        if (record := self._decoded[engine]) is None:
            record = self._decoded[engine] = Record.from_json(self.json[engine])
        return record

    @property
    def records(self) -> list[Record]:
        return [self.record(engine) for engine in range(len(self.json))]

    def summary(self) -> dict[str, Any]:
        """Return the summary for /ready: the first engine's, with the counts of all engines."""
        records = self.records
        return records[0].summary() | {
            "items": dict(sum((record.states for record in records), Counter[str]())),
            "seconds": round(max(record.seconds for record in records), 3),
            "invariant": all(record.invariant for record in records),
            "cold_events": sum(sum(record.cold.values()) for record in records),
            "misses": sum(sum(record.misses.values()) for record in records),
            "notes": list(dict.fromkeys(note for record in records for note in record.notes)),
        }

    @property
    def age(self) -> float:
        """Seconds since the engines sent the oldest of the records."""
        return time.monotonic() - min(self._booked_at)

    def book(self, json: bytes, engine: int = 0) -> None:
        """Store the record that an engine sent."""
        self.json[engine], self._decoded[engine], self._booked_at[engine] = json, None, time.monotonic()
        self._absent.discard(engine)
        self._answered(engine)

    def lose(self, engine: int) -> None:
        """Keep the last record of ``engine``, which answers no more; :meth:`book` ends this."""
        self._absent.add(engine)
        self._answered(engine)

    def _answered(self, engine: int) -> None:
        self._asked.discard(engine)
        if self._answer is not None and not self._asked:
            self._answer.set_result(None)
            self._answer = None

    async def refresh(self, patience: float) -> None:
        """Ask for the records; after ``patience`` seconds without all answers, keep the last ones.

        An engine answers between two steps. Concurrent clients share one Ask.
        """
        if self._answer is None:
            if len(self._absent) == len(self.json):
                return
            self._answer = asyncio.get_running_loop().create_future()
            self._asked = set(range(len(self.json))) - self._absent
            self._send(Ask())
        await asyncio.wait([self._answer], timeout=patience)
