"""The cold monitor: after ready it looks at every step, counts what each item served, and reports what was cold."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from preheat.core import Swaps
from preheat.errors import ColdStep
from preheat.execution.input_batch import InputBatch
from preheat.plan.plan import Plan
from preheat.plan.programs import Program, SamplerProgram, SwapProgram
from preheat.warmup.record import DONE, MAX_EVENTS, ColdEvent, ItemRecord, Record

logger = logging.getLogger(__name__)

FIRST_RUN = "first run"


class ColdEvents(Protocol):
    """Where cold events come from (:class:`preheat.warmup.cold_sources.ColdSources`)."""

    def taken(self) -> Sequence[tuple[str, str]]:
        """What happened since the last call: (source, detail) pairs. Called after every step."""


@dataclass(slots=True)
class _Hits:
    """Steps of the same programs, all warm, that are not yet counted in their ``entries``."""

    entries: list[ItemRecord]
    steps: int = 0


class ColdMonitor:
    """A step listener. ``on_cold``: off, count, warn or raise (see docs/warm-up.md)."""

    def __init__(self, record: Record, plan: Plan, on_cold: str, sources: ColdEvents) -> None:
        self._record, self.on_cold, self._sources = record, on_cold, sources
        self._hits: dict[tuple[Program, ...], _Hits] = {}
        entries = record.by_name()
        self._entries: dict[Program, list[ItemRecord]] = defaultdict(list)
        for item in plan.items:
            if item.program is not None:
                self._entries[item.program].append(entries[item.name])
        sources.taken()  # what happened until now does not count

    def step(self, event: InputBatch | Swaps) -> None:
        """Record a step, or a compaction before one. Raises ColdStep, naming the sources, if something was cold and
        ``on_cold`` is raise.
        """
        if self.on_cold == "off":
            return
        programs = programs_of(event)
        hits = self._hits.get(programs)
        events: list[tuple[str, str]] = []
        if hits is not None:
            hits.steps += 1
        else:
            events += self._first(programs)
        events += self._sources.taken()
        if events:
            self._tell(events)

    @property
    def record(self) -> Record:
        """The record, with all steps counted until now."""
        for hits in self._hits.values():
            for entry in hits.entries:
                entry.hits += hits.steps
            hits.steps = 0
        return self._record

    def report(self) -> bytes:
        return self.record.to_json()

    def _first(self, programs: tuple[Program, ...]) -> list[tuple[str, str]]:
        """The first step of these programs, or one that is not planned. Later ones are only counted."""
        events = [cold for program in programs for cold in self._hit(program)]
        if all(self._entries[program] for program in programs):
            self._hits[programs] = _Hits([entry for program in programs for entry in self._entries[program]])
        return events

    def _hit(self, program: Program) -> list[tuple[str, str]]:
        entries = self._entries[program]
        cold = not any(entry.outcome in DONE for entry in entries)
        for entry in entries:
            entry.hits += 1
            if cold:
                entry.outcome, entry.reason = "ready", "its first run served a request"
        return [(FIRST_RUN, str(program))] if cold else []

    def _tell(self, events: list[tuple[str, str]]) -> None:
        record = self._record
        for source, detail in events:
            record.cold[source] = record.cold.get(source, 0) + 1
            if len(record.events) < MAX_EVENTS:
                record.events.append(ColdEvent(source, detail, time.time()))
        if self.on_cold in ("warn", "raise"):
            said = "; ".join(f"{source}: {detail}" for source, detail in events)
            logger.warning("Cold after ready: %s", said)
            if self.on_cold == "raise":
                raise ColdStep(f"The step ran something cold ({said})")


def programs_of(event: InputBatch | Swaps) -> tuple[Program, ...]:
    """The programs that a step, or a compaction, has run."""
    if isinstance(event, Swaps):
        return (SwapProgram(event.size),)
    if not len(event.sampled_rows):
        return (event.bucket,)
    return event.bucket, SamplerProgram(event.sampling_size, event.sampling.level)
