"""The cold monitor: counts hits and reports cold events after ready.

A hit is a step that an item serves.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from preheat.backends.base.attention import AttentionWork
from preheat.core import Level, Swaps
from preheat.errors import ColdStep
from preheat.execution.input_batch import InputBatch
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.plan.programs import Program, programs_of_images
from preheat.warmup.cold_sources import ColdSources
from preheat.warmup.record import DONE, MAX_EVENTS, ColdEvent, ItemRecord, Record

logger = logging.getLogger(__name__)

FIRST_RUN = "first run"

Programs = tuple[Program[Any], ...]

_OF_THIS_PROCESS: WeakSet[ColdMonitor] = WeakSet()
"""All monitors of the process.

Sources hear of events of the whole process, other engines' boots included.
"""


@dataclass(slots=True)
class _Hits:
    """Steps of the same warm programs that are not yet added to their ``entries``."""

    entries: list[ItemRecord]
    steps: int = 0


@dataclass(slots=True)
class _Last:
    """The last known step of programs of tokens alone: a step of the same rows runs the same programs.

    ``steps`` of the same rows are not yet counted among ``hits``, and in the traffic.
    """

    work: AttentionWork
    bucket: Bucket
    level: Level
    tokens: int
    hits: _Hits
    steps: int = 0

    def goes_on(self, batch: InputBatch) -> bool:
        """Return whether ``batch`` is a step of the same rows."""
        return (
            batch.work is self.work
            and batch.bucket is self.bucket
            and batch.sampling.level is self.level
            and not batch.schedule.transfers
        )


class ColdMonitor:
    """A step listener that counts hits and reports cold events.

    ``on_cold`` is off, count, warn or raise (see docs/warm-up.md). ``drafted`` gives the steps that a draft model ran
    for the step.
    """

    def __init__(
        self,
        record: Record,
        plan: Plan,
        on_cold: str,
        sources: ColdSources,
        drafted: Callable[[], Sequence[InputBatch]] | None = None,
    ) -> None:
        self._drafted = drafted
        self._record, self.on_cold, self._sources = record, on_cold, sources
        self._hits: dict[Programs, _Hits] = {}
        self._last: _Last | None = None
        self._traffic: dict[tuple[str, int], int] = defaultdict(int)  # steps by phase and tokens
        entries = record.by_name()
        self._plan = plan
        self._entries: dict[Program[Any], list[ItemRecord]] = defaultdict(list)
        self._alike: dict[Program[Any], list[ItemRecord]] = defaultdict(list)  # entries of all items of one program
        for item in plan.items:
            if item.program is not None:
                self._entries[item.program].append(entries[item.name])
                self._alike[plan.program_of(item.program)].append(entries[item.name])
        sources.forget()
        for other in _OF_THIS_PROCESS:
            other.forget()  # this boot is no step of another engine
        _OF_THIS_PROCESS.add(self)

    def step(self, event: InputBatch | Swaps) -> None:
        """Count a step, or a compaction before one.

        Raises ColdStep, naming the sources, if anything was cold and ``on_cold`` is raise.
        """
        if self._last is not None and isinstance(event, InputBatch) and self._last.goes_on(event):
            self._last.steps += 1
            events = self._sources.new_events()
        else:
            self._settle()
            if isinstance(event, InputBatch):
                self._traffic[event.bucket.phase, event.schedule.tokens] += 1
            if self.on_cold == "off":
                return
            events = self._looked_up(event)
        if events:
            self._report(events)

    def _settle(self) -> None:
        """Count the steps of the last rows."""
        if (last := self._last) is not None:
            last.hits.steps += last.steps
            self._traffic[last.bucket.phase, last.tokens] += last.steps
            self._last = None

    def _looked_up(self, event: InputBatch | Swaps) -> list[tuple[str, str]]:
        """Count a step by its programs, and return its cold events."""
        programs = programs_of(event)
        if self._drafted is not None:
            programs = (*programs, *_of_drafts(self._drafted()))
        hits = self._hits.get(programs)
        events = self._sources.new_events()
        if hits is None:
            return self._first(programs) + events
        hits.steps += 1
        if isinstance(event, InputBatch) and self._drafted is None and event.schedule.images is None:
            level, tokens = event.sampling.level, event.schedule.tokens
            self._last = _Last(event.work, event.bucket, level, tokens, hits)
        return events

    def forget(self) -> None:
        """Discard the cold events until now, which belong to no step.

        An operator changed something between two steps, or another engine of this process became ready.
        """
        self._sources.forget()

    @property
    def record(self) -> Record:
        """The record, with all steps counted until now."""
        self._settle()
        for hits in self._hits.values():
            for entry in hits.entries:
                entry.hits += hits.steps
            hits.steps = 0
        for (phase, tokens), steps in self._traffic.items():
            self._record.traffic.setdefault(phase, {})[tokens] = steps
        return self._record

    def report(self) -> bytes:
        return self.record.to_json()

    def _first(self, programs: Programs) -> list[tuple[str, str]]:
        """Count the first step of ``programs``.

        A step that is not planned counts each time. Returns its cold events.
        """
        events = [cold for program in programs for cold in self._hit(program)]
        if all(self._entries[program] for program in programs):
            self._hits[programs] = _Hits([entry for program in programs for entry in self._entries[program]])
        return events

    def _hit(self, program: Program[Any]) -> list[tuple[str, str]]:
        entries = self._entries[program]
        cold = not any(entry.outcome in DONE for entry in self._alike[self._plan.program_of(program)])
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
            others = [(source, detail) for source, detail in events if source != FIRST_RUN]
            for _, detail in (event for event in events if event not in others):
                logger.warning("Configuration: %s was not warmed-up!", detail)
            if others:
                logger.warning("Cold after ready: %s", _said(others))
            if self.on_cold == "raise":
                raise ColdStep(f"The step ran something cold ({_said(events)})")


def _said(events: list[tuple[str, str]]) -> str:
    return "; ".join(f"{source}: {detail}" for source, detail in events)


def _of_drafts(batches: Sequence[InputBatch]) -> dict[Program[Any], None]:
    """Return the draft model's programs that ``batches`` ran, each once."""
    return {program._replace(draft=True): None for batch in batches for program in _of_step(batch)}


def programs_of(event: InputBatch | Swaps) -> Programs:
    """Return the programs that a step or a compaction ran."""
    if isinstance(event, Swaps):
        return (Program("swap", event.size),)
    programs = _of_step(event)
    if event.schedule.images is not None:
        programs = *programs, *dict.fromkeys(programs_of_images([image for _, image in event.schedule.images.encode]))
    if event.schedule.transfers:
        programs = *programs, *(Program("offload", transfer) for transfer in event.schedule.transfers)
    return programs


def _of_step(batch: InputBatch) -> Programs:
    """Return the forward program, and the sampler's if the step samples."""
    forward = batch.forward_program
    return (forward, batch.sampler_program) if len(batch.sampled_rows) else (forward,)
