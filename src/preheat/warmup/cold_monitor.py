"""The guard: after ready it looks at every step, counts what each item served, and tells when something was cold."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from preheat.core import Swaps
from preheat.errors import ColdStep
from preheat.execution.pack import Batch
from preheat.execution.sampling import Level
from preheat.plan.items import SAMPLER_SETTINGS, SamplerKey, level
from preheat.plan.plan import Plan
from preheat.warmup.record import DONE, MAX_EVENTS, ColdEvent, Entry, Record

logger = logging.getLogger(__name__)

FIRST_RUN = "first run"


class Source(Protocol):
    """One origin of cold events, such as a compiler."""

    name: str

    def taken(self) -> Sequence[str]:
        """What happened since the last call, in words; empty when nothing did. Called after every step."""


@dataclass(slots=True)
class _Tally:
    """How often steps of a kind have run whose programs are warm, since that was booked in the items' ``entries``."""

    entries: list[Entry]
    steps: int = 0


class ColdMonitor:
    """The loop's observer. ``on_cold``: off, count, warn or raise (see docs/warm-up.md)."""

    def __init__(self, record: Record, plan: Plan, on_cold: str, sources: Sequence[Source] = ()) -> None:
        self._record, self.on_cold, self._sources = record, on_cold, sources
        self._tallies: dict[object, _Tally] = {}
        entries = {entry.name: entry for entry in record.entries}
        self._entries: dict[object, list[Entry]] = defaultdict(list)
        for item in plan.items:
            if item.program is not None:
                self._entries[_program(item.key, item.program)].append(entries[item.name])
        for source in sources:  # what happened until now is no news
            source.taken()

    def step(self, event: Batch | Swaps) -> None:
        """Book a step, or a compaction before one. Raises ColdStep, naming the sources, if something was cold and
        ``on_cold`` is raise.
        """
        if self.on_cold == "off":
            return
        kind = _kind(event)
        tally = self._tallies.get(kind)
        events = []
        if tally is not None:
            tally.steps += 1
        else:
            events += self._first(kind, _programs(event))
        for source in self._sources:
            if taken := source.taken():
                events += [(source.name, detail) for detail in taken]
        if events:
            self._tell(events)

    @property
    def record(self) -> Record:
        """The record, with everything booked that was seen until now."""
        for tally in self._tallies.values():
            for entry in tally.entries:
                entry.hits += tally.steps
            tally.steps = 0
        return self._record

    def report(self) -> bytes:
        return self.record.to_json()

    def _first(self, kind: object, programs: list[object]) -> list[tuple[str, str]]:
        """The first step of its kind, or one that nobody planned. Those that follow are only counted."""
        events = [cold for program in programs for cold in self._hit(program)]
        if all(self._entries[program] for program in programs):
            self._tallies[kind] = _Tally([entry for program in programs for entry in self._entries[program]])
        return events

    def _hit(self, program: object) -> list[tuple[str, str]]:
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


def _kind(event: Batch | Swaps) -> object:
    """What tells steps apart that run different programs."""
    if isinstance(event, Swaps):
        return event.size
    return event.shape, event.sampling_size if len(event.sampled_rows) else 0, event.sampling.level


def _programs(event: Batch | Swaps) -> list[object]:
    """What ran."""
    if isinstance(event, Swaps):
        return [("swap", event.size)]
    if not len(event.sampled_rows):
        return [event.shape]
    return [event.shape, ("sampler", event.sampling_size, Level(event.sampling.level).name.lower())]


def _program(key: object, program: tuple[object, ...]) -> object:
    """What a step says of itself when it has run ``program``."""
    if isinstance(key, SamplerKey):
        return ("sampler", key.rows, level(SAMPLER_SETTINGS[key.setting]))
    return key if program[0] != "swap" else program
