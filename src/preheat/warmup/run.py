"""Warm-up: every item of the plan runs once on dummy requests, through the packer and the executor that serve."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from preheat.backends.base import Backend
from preheat.core import Progress, SamplingParams, Swaps
from preheat.errors import NotInvariant
from preheat.plan import lines
from preheat.plan.buckets import Bucket
from preheat.plan.items import Item, NothingToRun, Stage
from preheat.plan.plan import Plan
from preheat.plan.programs import SamplerProgram
from preheat.utils.trace import Span, no_span
from preheat.warmup.determinism import run_determinism_warmup
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.graphs import NoGraphs
from preheat.warmup.record import ItemRecord, Record

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
PROGRESS_SECONDS = 0.1  # between two messages of progress

SWAPPED_PAIR = (1, 0)
"""The blocks that warm-up swaps: two swaps leave the cache unchanged."""


class Check(Protocol):
    """The cross-check (:class:`preheat.verify.boot.BootCheck`)."""

    def begin(self) -> None:
        """Compute what all checks compare with: the first run of the process."""

    def run(self, name: str) -> None:
        """Run a check; raises NotInvariant or NothingToRun."""


@dataclass(kw_only=True)
class WarmUp:
    """One warm-up. ``reused`` are items that an earlier boot with the same fingerprint compiled. ``report`` receives
    progress; ``compiled`` gives the seconds of compiling since the process began; ``span`` traces an item.
    """

    plan: Plan
    record: Record
    backend: Backend
    steps: DummySteps
    graphs: NoGraphs
    check: Check
    reused: frozenset[str] = frozenset()
    report: Callable[[Progress], None] = lambda _: None
    compiled: Callable[[], float] = lambda: 0.0
    span: Span = no_span
    _entries: dict[str, ItemRecord] = field(init=False)
    _done: int = field(default=0, init=False)  # items that have run
    _started: float = field(default=0.0, init=False)
    _reported: float = field(default=0.0, init=False)
    _memory: int = field(default=0, init=False)  # in use after the last item

    def __post_init__(self) -> None:
        self._entries = self.record.by_name()

    def run(self) -> None:
        """Run every item in the plan's order and record its outcome."""
        self._started = time.monotonic()
        memory = self._memory = self.backend.used_memory()
        if self.plan.checks:
            self._begin_check()
        self._run_stage("after_cache")
        self.graphs.capture()
        self._memory = self.backend.used_memory()
        self._run_stage("last")
        self.steps.executor.sampler.forget()
        self.record.seconds = time.monotonic() - self._started
        logger.info("%s", lines.finished(self.record.seconds, self.backend.used_memory() - memory))

    def _begin_check(self) -> None:
        try:
            self.check.begin()
        except Exception as error:
            logger.exception("The first run, with which others are compared, failed; a later one takes its place")
            self.record.notes.append(f"the checks saw no first run, which failed: {type(error).__name__}: {error}")

    def _run_stage(self, stage: Stage) -> None:
        staged = [item for item in self.plan.items if item.stage == stage]
        for _, items in itertools.groupby(staged, lambda item: item.kind):
            self._run_kind(list(items))

    def _run_kind(self, items: Sequence[Item]) -> None:
        numbers = itertools.count(1)
        type(items[0]).run_kind(items, lambda item: self._run_item(item, next(numbers), len(items)), self)

    def _run_item(self, item: Item, number: int, total: int) -> None:
        """Run item ``number`` of the ``total`` of its kind and record its outcome, then raise what it raised. Out of
        memory drops the item; any other error is logged.
        """
        self._report_progress(item)
        self._done += 1
        if line := item.log_line(number, total, self.backend.free_memory()):
            logger.info("%s", line)
        entry = self._entries[item.name]
        memory, compiled, start = self._memory, self.compiled(), time.monotonic()
        entry.started = start - self._started
        try:
            with self.span(item.name, kind=item.kind):
                item.run(self)
                self.backend.synchronize()
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
            self._memory = self.backend.used_memory()
            entry.bytes = self._memory - memory

    def _report_progress(self, item: Item) -> None:
        """At most every `PROGRESS_SECONDS`; the time left follows from the plan's estimates."""
        now, done = time.monotonic(), self._done
        if done and now - self._reported < PROGRESS_SECONDS:
            return
        self._reported, items = now, self.plan.items
        before = sum(item.estimate.seconds for item in items[:done])
        after = sum(item.estimate.seconds for item in items[done:])
        eta = (now - self._started) / before * after if before else after or None
        self.report(Progress(done, len(items), item.name, eta))

    # See preheat.plan.items.ItemRunner.

    @property
    def num_blocks(self) -> int:
        return int(self.steps.executor.cache.data.shape[1])

    def first_run(self, bucket: Bucket) -> None:
        self.graphs.first_run(bucket)

    def forward(self, bucket: Bucket) -> None:
        self.steps.run(bucket, self.steps.executor.execute)

    def sample(self, program: SamplerProgram, params: SamplingParams, times: int) -> None:
        if self.steps.sample(program.rows, params, times):
            self.graphs.after_sampling(program)

    def swap(self, pairs: int) -> None:
        """All pairs are the same, because padding would swap block 0 with itself, which contradicts swapping it."""
        self.steps.executor.swap(Swaps(np.full((pairs, 2), SWAPPED_PAIR, np.int32), pairs))

    def determinism_passes(self, run: Callable[[], None], count: int) -> None:
        run_determinism_warmup(run, count, batch_invariant=True, synchronize=self.backend.synchronize)

    def run_check(self, name: str) -> None:
        self.check.run(name)
