"""Warm-up: every item of the plan runs once.

Items run on dummy requests, through the packer and the executor that serve.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.core import Progress, SamplingParams, Transfer
from preheat.errors import CheckFailed, NotInvariant
from preheat.execution.offload import HostTier
from preheat.grammar.service import Grammars
from preheat.plan import lines
from preheat.plan.buckets import Bucket
from preheat.plan.functions import Function
from preheat.plan.item import Item, NothingToRun, Stage
from preheat.plan.plan import Plan
from preheat.plan.programs import Program
from preheat.schedule.blocks import PAD_BLOCK
from preheat.utils.trace import Span, no_span
from preheat.warmup.determinism import run_determinism_warmup
from preheat.warmup.draft import DraftWarmUp
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.graphs import NoGraphs
from preheat.warmup.record import ItemRecord, Record
from preheat.warmup.time_left import TimeLeft

logger = logging.getLogger(__name__)

PACE_RUNS = 4
"""How often a step is timed; the shortest time counts."""
PACE_TOGETHER = 8
"""Steps that are timed together, each launched while the one before it runs."""

LATER_RUN = "later run"
"""The check that compares with the first run of the process."""

REPEATED = "an earlier boot ran it; its program runs as another item"
"""The reason of items that a later boot leaves out."""

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
PROGRESS_SECONDS = 0.1  # between two messages of progress
LOG_SECONDS = 10.0  # between two log lines on progress


class Check(Protocol):
    """The cross-check (:class:`preheat.verify.boot.BootCheck`)."""

    def begin(self) -> None:
        """Compute the reference of all checks: the first run of the process."""

    def run(self, name: str) -> None:
        """Run a check.

        Raises NotInvariant if it fails and NothingToRun if it does not apply.
        """


@dataclass(kw_only=True)
class WarmUp:
    """One warm-up of an engine.

    ``reused`` are items that an earlier boot with the same fingerprint compiled. ``report`` receives progress.
    ``compiled`` gives the seconds of compiling since the process began. ``span`` traces an item. ``level`` is the log
    level of the lines on every item. ``draft_steps`` run the items of the draft model. ``seconds`` gets the measured
    times of steps, by model ("target" or "draft") and by bucket; with ``overlap`` steps without drafts are launched
    ahead of each other, as in serving. ``first_logits`` gives the logits of the process's first step, see
    :meth:`DummySteps.logits`, and may run the step; the check of a later run compares them too.
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
    level: int = logging.DEBUG
    first_logits: Callable[[], Tensor | None] = lambda: None
    draft_steps: DraftWarmUp | None = None
    offload: HostTier | None = None
    overlap: bool = False
    seconds: dict[tuple[str, Bucket], float] = field(default_factory=dict)
    grammars: Grammars | str = "structured outputs are off"
    _entries: dict[str, ItemRecord] = field(init=False)
    _ran: dict[Program[Bucket], Bucket] = field(default_factory=dict, init=False)  # the first bucket of each program
    _functions: dict[str, Function] = field(default_factory=dict, init=False)  # the first of each name in the code
    _first_logits: Tensor | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)  # items that have run
    _started: float = field(default=0.0, init=False)
    _reported: float = field(default=0.0, init=False)
    _logged: float = field(default=0.0, init=False)
    _time_left: TimeLeft = field(init=False)
    _memory: int = field(default=0, init=False)  # in use after the last item

    def __post_init__(self) -> None:
        self._entries = self.record.by_name()
        self._time_left = TimeLeft(self.plan.items)

    def run(self) -> None:
        """Run every item in the plan's order and record its outcome."""
        memory = self.build()
        self._first_logits = self.first_logits()
        if self.plan.checks:
            self._begin_check()
        self._run_stage("after_cache")
        self.graphs.capture()
        self._memory = self.backend.used_memory()
        self._run_stage("last")
        self.steps.executor.sampler.forget()
        self.record.seconds = time.monotonic() - self._started
        place = "host" if self.backend.facts.on_host else "device"
        logger.info("%s", lines.finished(self.record.seconds, self.backend.used_memory() - memory, place=place))

    def build(self) -> int:
        """Compile all functions, which no step may do. Return the used memory before."""
        self._started = self._logged = time.monotonic()
        memory = self._memory = self.backend.used_memory()
        self._run_stage("first")
        return memory

    def _begin_check(self) -> None:
        try:
            self.check.begin()
        except Exception as error:
            logger.exception("The first run of the check failed; later runs are compared with the next one")
            self.record.notes.append(f"the first run of the check failed: {type(error).__name__}: {error}")

    def _run_stage(self, stage: Stage) -> None:
        staged = [item for item in self.plan.items if item.stage == stage]
        for _, items in itertools.groupby(staged, lambda item: item.kind):
            self._run_kind(list(items))

    def _run_kind(self, items: Sequence[Item]) -> None:
        numbers = itertools.count(1)
        type(items[0]).run_kind(items, lambda item: self._run_item(item, next(numbers), len(items)), self)

    def _run_item(self, item: Item, number: int, total: int) -> None:
        """Run one item and record its outcome.

        It is ``number`` of the ``total`` of its kind. Its error is raised. Out of memory drops the item; any other
        error is logged. An item that repeats another one's program runs only if no earlier boot ran it.
        """
        self._report_progress(item)
        self._done += 1
        if logger.isEnabledFor(self.level) and (line := item.log_line(number, total, self.backend.free_memory())):
            self.tell(line)
        entry = self._entries[item.name]
        if item.repeats and item.name in self.reused:
            entry.outcome, entry.reason = "reused", REPEATED
            self._time_left.left_out(item)
            return
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
        except CheckFailed as error:
            entry.outcome, entry.reason = "failed", error.message
            logger.error("The engine cannot serve: %s", error)
            raise
        except Exception as error:
            entry.outcome, entry.reason = "failed", f"{type(error).__name__}: {error}"
            logger.exception("%s failed; a step that needs it will be cold", item.name)
            raise
        finally:
            entry.compile_seconds = self.compiled() - compiled
            entry.touch_seconds = time.monotonic() - start - entry.compile_seconds
            self._time_left.ran(item, entry.seconds)
            self._memory = self.backend.used_memory()
            entry.bytes = self._memory - memory

    def _report_progress(self, item: Item) -> None:
        """Report progress at most every `PROGRESS_SECONDS`, and log it every `LOG_SECONDS`."""
        now, done, total = time.monotonic(), self._done, len(self.plan.items)
        if done and now - self._reported < PROGRESS_SECONDS:
            return
        self._reported, left = now, self._time_left.seconds()
        self.report(Progress(done, total, item.name, left or None))
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.info("%s", lines.progress(done, total, item.name, left))

    # See preheat.plan.item.ItemRunner.

    def tell(self, line: str) -> None:
        logger.log(self.level, "%s", line)

    @property
    def num_blocks(self) -> int:
        return int(self.steps.executor.cache.data.shape[1])

    def first_run(self, program: Program[Bucket]) -> None:
        if program.draft:
            self._drafting().first_run(program._replace(draft=False))
            return
        shared = self.plan.program_of(program)
        if shared in self._ran:
            raise NothingToRun(f"the same program as {self._ran[shared]}")
        self.graphs.first_run(program)
        self._ran[shared] = program.size

    def forward(self, bucket: Bucket) -> None:
        self.steps.run(Program("forward", bucket), self.steps.executor.execute)

    def sample(self, program: Program[int], params: SamplingParams, times: int) -> None:
        if program.draft:
            self._drafting().sample(program._replace(draft=False), params, times)
        elif self.steps.sample(program, params, times):
            self.graphs.after_sampling(program)

    def encode(self, images: int, cells: int = 0) -> None:
        self.steps.encode(images, cells)

    def swap(self, pairs: int) -> None:
        self.steps.swap(pairs)

    def transfer(self, transfer: Transfer) -> None:
        if self.offload is None:
            raise NothingToRun("nothing is kept on the host")
        self.offload.copy(transfer, PAD_BLOCK, 0)

    def determinism_passes(self, run: Callable[[], None], count: int) -> None:
        run_determinism_warmup(run, count, batch_invariant=True, synchronize=self.backend.synchronize)

    def _drafting(self) -> DraftWarmUp:
        if self.draft_steps is None:
            raise NothingToRun("there is no draft model")
        return self.draft_steps

    def pace(self, bucket: Bucket, *, draft: bool) -> None:
        steps = self._drafting().steps if draft else self.steps
        together = PACE_TOGETHER if self.overlap and not draft and bucket.phase == "decode" else 1
        program = Program("forward", bucket)
        took = [self._timed(lambda: steps.run_ahead(program, together)) / together for _ in range(PACE_RUNS)]
        self.seconds["draft" if draft else "target", bucket] = min(took)

    def _timed(self, run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        self.backend.synchronize()
        return time.perf_counter() - began

    def build_function(self, function: Function) -> None:
        found = self.steps.executor.build_function(*function)
        if not found:
            raise NothingToRun("the layers run as operations of torch")
        if (other := self._functions.setdefault(found, function)) is not function:
            raise NothingToRun(f"the same function as {other}")

    def build_grammar(self, name: str) -> None:
        if isinstance(self.grammars, str):
            raise NothingToRun(self.grammars)
        self.grammars.preload(name)

    def run_check(self, name: str) -> None:
        if name == LATER_RUN and self._first_logits is not None:
            now = self.steps.logits()
            if not torch.equal(now.view(torch.int32), self._first_logits.view(torch.int32)):
                raise NotInvariant(f"{name}: the first step of the process gave other logits than the same step now")
        self.check.run(name)
