"""The cold monitor: after ready it counts the steps that each item serves and reports what was cold."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass

from preheat.core import Swaps
from preheat.errors import ColdStep
from preheat.execution.input_batch import InputBatch
from preheat.plan.plan import Plan
from preheat.plan.programs import Program, SamplerProgram, SwapProgram
from preheat.warmup.cold_sources import ColdSources
from preheat.warmup.record import DONE, MAX_EVENTS, ColdEvent, ItemRecord, Record

logger = logging.getLogger(__name__)

FIRST_RUN = "first run"


@dataclass(slots=True)
class _Hits:
    """Steps of the same warm programs that are not yet added to their ``entries``."""

    entries: list[ItemRecord]
    steps: int = 0


class ColdMonitor:
    """A step listener. ``on_cold``: off, count, warn or raise (see docs/warm-up.md)."""

    def __init__(self, record: Record, plan: Plan, on_cold: str, sources: ColdSources) -> None:
        self._record, self.on_cold, self._sources = record, on_cold, sources
        self._hits: dict[tuple[Program, ...], _Hits] = {}
        entries = record.by_name()
        self._entries: dict[Program, list[ItemRecord]] = defaultdict(list)
        for item in plan.items:
            if item.program is not None:
                self._entries[item.program].append(entries[item.name])
        sources.taken()  # forget what happened so far

    def step(self, event: InputBatch | Swaps) -> None:
        """Count a step, or a compaction before one. Raises ColdStep, naming the sources, if something was cold and
        ``on_cold`` is raise.
        """
        if self.on_cold == "off":
            return
        programs = programs_of(event)
        hits = self._hits.get(programs)
        events = self._sources.taken()
        if hits is not None:
            hits.steps += 1
        else:
            events = self._first(programs) + events
        if events:
            self._report(events)

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
        """Count the first step of these programs, or one that is not planned; its cold events."""
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

    def _report(self, events: list[tuple[str, str]]) -> None:
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
    """The programs that a step or a compaction ran."""
    if isinstance(event, Swaps):
        return (SwapProgram(event.size),)
    if not len(event.sampled_rows):
        return (event.bucket,)
    return event.bucket, SamplerProgram(event.sampling_size, event.sampling.level)
