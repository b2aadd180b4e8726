"""Warm-up: every item of the plan runs once, through the packer and the executor that serve requests.

Only the work is made up (:mod:`preheat.warmup.dummy_batch`); what runs it is what will serve. Nothing of it stays
behind: the slots are given back, the sampler forgets, and keys and values went to the pad block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from preheat.backends.base import Backend
from preheat.core import Progress, Schedule, StepResult, Swaps
from preheat.errors import NotInvariant
from preheat.execution.kv_cache import KVCache
from preheat.model.decoder import Attended, Decoder
from preheat.plan import lines
from preheat.plan.buckets import Bucket
from preheat.plan.items import GAUDI_SETTINGS, SAMPLER_SETTINGS, Item, SamplerKey
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots
from preheat.utils.trace import Span, no_span
from preheat.warmup.determinism import run_determinism_warmup
from preheat.warmup.dummy_batch import DummyBatches, rows_of
from preheat.warmup.record import Entry, Record
from preheat.warmup.swaps import SwapRuns

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
SAY_SECONDS = 0.1  # between two messages of progress


class NothingToRun(Exception):
    """An item has no work within the limits; it says so in its reason."""


class StepExecutor(Protocol):
    """A platform's executor. A batch is whatever its packer makes."""

    decoder: Decoder
    sampler: Any
    cache: KVCache

    def execute(self, batch: Any) -> StepResult: ...

    def finish(self, attended: Attended, batch: Any) -> StepResult: ...

    def swap(self, swaps: Swaps) -> None: ...


class Check(Protocol):
    """The cross-check (:class:`preheat.verify.boot.BootCheck`)."""

    def begin(self) -> None:
        """What everything is compared with: the first run of the process."""

    def run(self, name: str) -> None:
        """The check of this name; raises NotInvariant, or NothingToRun."""


class StepPacker(Protocol):
    """Its packer."""

    slots: Slots

    def pack(self, schedule: Schedule) -> Any: ...


@dataclass
class WarmUp:
    """One warm-up. ``say`` is told of progress; ``compiled`` gives the seconds spent compiling since the start of the
    process, ``span`` puts an item into the trace; ``reused`` are items that an earlier boot with the same fingerprint
    has compiled. ``capture`` makes graphs once all shapes have run, before what runs last; where it does, ``prepare``
    is what a forward item runs until then, in place of the executor's whole step, and ``keep`` makes a graph of what a
    sampler item has run, which others run too. ``check`` is the cross-check, which begins before anything has run.
    """

    plan: Plan
    packer: StepPacker
    executor: StepExecutor
    platform: Backend
    record: Record
    check: Check
    say: Callable[[Progress], None] = lambda _: None
    compiled: Callable[[], float] = lambda: 0.0
    span: Span = no_span
    reused: frozenset[str] = frozenset()
    prepare: Callable[[Any], object] | None = None
    keep: Callable[[SamplerKey], object] = lambda _: None
    capture: Callable[[], object] = lambda: None
    _started: float = field(default=0.0, init=False)
    _said: float = field(default=0.0, init=False)
    _memory: int = field(default=0, init=False)  # in use after the last item

    def __post_init__(self) -> None:
        self._swaps = SwapRuns(self.executor)
        self._feed = DummyBatches(self.packer.slots, self.plan.limits, self.executor.decoder.spec.vocab_size)
        self._states = Attended(torch.empty(0, 0), torch.empty(0, 0))

    def run(self) -> None:
        """Run every item, in the plan's order; what becomes of each is in the record."""
        self._started = time.monotonic()
        memory = self._memory = self.platform.used_memory()
        entries = {entry.name: entry for entry in self.record.entries}
        kinds: dict[str, list[Item]] = {}
        for item in self.plan.items:
            kinds.setdefault(item.kind, []).append(item)
        if "check" in kinds:
            self._begin_check()
        done, captured = 0, False
        for kind, items in kinds.items():
            if items[0].stage == "last" and not captured:
                self.capture()
                captured, self._memory = True, self.platform.used_memory()
            self._begin(kind, items)
            self._kind(
                kind,
                [
                    partial(self._turn, item, entries[item.name], (number, len(items)), done)
                    for number, item in enumerate(items, 1)
                ],
            )
            done += len(items)
            self._end(kind)
        if not captured:
            self.capture()
        self.executor.sampler.forget()
        self.record.seconds = time.monotonic() - self._started
        logger.info("%s", lines.finished(self.record.seconds, self.platform.used_memory() - memory))

    def _begin_check(self) -> None:
        try:
            self.check.begin()
        except Exception as error:
            logger.exception("The first run, with which others are compared, failed; a later one takes its place")
            self.record.notes.append(f"the checks saw no first run, which failed: {type(error).__name__}: {error}")

    def _kind(self, kind: str, turns: Sequence[Callable[[], None]]) -> None:
        """Every turn; what one raises is booked already."""
        if kind == "determinism":
            passes = iter(turns)

            def one() -> None:
                next(passes)()

            run_determinism_warmup(one, len(turns), batch_invariant=True, synchronize=self.platform.synchronize)
            return
        for turn in turns:
            with suppress(Exception):
                turn()

    def _turn(self, item: Item, entry: Entry, place: tuple[int, int], done: int) -> None:
        """Run an item, the n-th of so many of its kind, and book what it took, then raise what it raised.

        Out of memory drops it; any other error is loud. Either way the rest go on.
        """
        self._say(done + place[0] - 1, item)
        if isinstance(item.key, Bucket):
            logger.info("%s", lines.running(item.key.phase, item.key, *place, self.platform.free_memory()))
        memory, compiled, start = self._memory, self.compiled(), time.monotonic()
        entry.started = start - self._started
        try:
            with self.span(item.name, kind=item.kind):
                self._run(item)
                self.platform.synchronize()
            entry.outcome = "reused" if item.name in self.reused else "ready"
        except OUT_OF_MEMORY as error:
            entry.outcome, entry.reason = "dropped", f"out of memory: {error}"
            logger.warning("%s was dropped: %s", item.name, entry.reason)
            raise
        except NothingToRun as error:
            entry.outcome, entry.reason = "ready", str(error)
        except NotInvariant as error:
            entry.outcome, entry.reason = "failed", error.message
            logger.error("The bits of a request depend on how it is run: %s", error)
            raise
        except Exception as error:
            entry.outcome, entry.reason = "failed", f"{type(error).__name__}: {error}"
            logger.exception("%s failed; a step that needs it will be cold", item.name)
            raise
        finally:
            entry.compile_seconds = self.compiled() - compiled
            entry.touch_seconds = time.monotonic() - start - entry.compile_seconds
            self._memory = self.platform.used_memory()
            entry.bytes = self._memory - memory

    def _run(self, item: Item) -> None:
        match item.key:
            case Bucket() as shape:
                self.forward(shape, self.prepare)
            case SamplerKey() as key:
                self._sample(key)
            case int() as size if item.kind == "swap":
                self._swaps.run(size)
            case _ if item.kind == "determinism":
                self.forward(self.plan.determinism_shape)
            case str() as name:
                self.check.run(name)

    def forward(self, shape: Bucket, run: Callable[[Any], Any] | None = None) -> Any:
        """A step of ``shape``, through the packer; ``run`` takes the batch in the executor's place. What it returns."""
        run = run or self.executor.execute
        rows = rows_of(self.plan.table.example(shape), self.plan.limits)
        with self._feed.work(rows) as schedule:
            batch = self.packer.pack(schedule)
            if batch.bucket != shape:
                raise RuntimeError(f"the work for {shape} runs as {batch.bucket}")
            return run(batch)

    def _sample(self, key: SamplerKey) -> None:
        """Tokens from where rows stand; the second time, what the sampler keeps of the rows is theirs already."""
        params = SAMPLER_SETTINGS[key.setting]
        with self._feed.work(self._feed.sampled(key.rows, params), params) as schedule:
            if not schedule.rows:
                return
            batch = self.packer.pack(schedule)
            attended = self._attended(batch.padded_tokens)
            for _ in range(1 if key.batch_changed else 2):
                self.executor.finish(attended, batch)
        self.keep(key)

    def _attended(self, tokens: int) -> Attended:
        """Random states of ``tokens``, with randomness of their own; the same ones for all who ask."""
        if len(self._states.out) < tokens:
            decoder, device = self.executor.decoder, self.platform.device
            chance = torch.Generator(device).manual_seed(0)
            count = max(tokens, 2 * self.plan.sampler_sizes[-1])
            widths = decoder.spec.layers[-1].attention.o.inputs, decoder.spec.hidden_size
            random = (torch.randn(count, width, generator=chance, device=device) for width in widths)
            self._states = Attended(*(states.to(decoder.dtype) for states in random))
        return Attended(*(states[:tokens] for states in self._states))

    def _begin(self, kind: str, items: Sequence[Item]) -> None:
        if kind == "swap":
            self._swaps.begin()
        if kind == "sampler":
            settings = [(name, changed) for changed in (True, False) for name in GAUDI_SETTINGS]
            for line in lines.sampler_start(self.plan.sampler_sizes, settings):
                logger.info("%s", line)

    def _end(self, kind: str) -> None:
        if kind == "swap":
            self._swaps.end()
        if kind == "sampler":
            logger.info("%s", lines.sampler_finished())

    def _say(self, done: int, item: Item) -> None:
        """Tell of progress, not too often; the time left is estimated in the plan's proportions."""
        now = time.monotonic()
        if done and now - self._said < SAY_SECONDS:
            return
        self._said, items = now, self.plan.items
        before = sum(i.estimated_seconds for i in items[:done])
        after = sum(i.estimated_seconds for i in items[done:])
        eta = (now - self._started) / before * after if before else after or None
        self.say(Progress(done, len(items), item.name, eta))
