"""Graph capture at boot: follows the memory budget, logs every step and records the outcome.

The rules are in :mod:`preheat.plan.budget`. There is one class for each way in which an execution mode handles graphs:
`NoGraphs`, `CountedGraphs` for a backend without graphs, which pads the same and counts the memory that graphs would
keep, and `DeviceGraphs`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from preheat.backends.base import Backend
from preheat.execution.executor import LaunchedStep
from preheat.plan import lines
from preheat.plan.buckets import Bucket, Phase
from preheat.plan.budget import (
    MemorySplit,
    PhaseCaptures,
    Strategy,
    capture_graphs,
    capture_order,
    graph_pool,
    graph_shares,
    split_memory,
)
from preheat.plan.cost import ModelSizes
from preheat.plan.items import ForwardItem, Item, SamplerItem
from preheat.plan.plan import Plan
from preheat.plan.programs import SamplerProgram
from preheat.settings import OPTIONS, Settings
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.record import ItemRecord, Record

logger = logging.getLogger(__name__)

GRAPHS = "graphs"
"""The execution mode in which graphs are captured; in every other one nothing is reserved for them."""

GRAPH_OPTIONS = (
    "graph_reserved_mem",
    "graph_prompt_ratio",
    "graph_prompt_strategy",
    "graph_decode_strategy",
    "config_hidden_layers",
)
NOT_RUN = ("dropped", "failed")
FALLBACK = "runs without a graph: it is for steps beyond the bucket sizes"
INDEX_BYTES, TABLE_BYTES, LOGIT_BYTES = 8, 4, 4

CaptureOne = Callable[[Bucket], int]
"""Captures one bucket and returns the bytes that it took. MemoryError skips the bucket."""

BootStepContext = Callable[[str], AbstractContextManager[None]]
"""Measures a step of the boot, by its name (:class:`preheat.warmup.steps.Steps`)."""


@dataclass(frozen=True)
class Captures:
    """What became of the graphs' ``pool`` of bytes, phase by phase."""

    pool: int
    phases: dict[Phase, PhaseCaptures]

    @property
    def used(self) -> int:
        return sum(done.used for done in self.phases.values())


def divide_memory(settings: Settings, mode: str, free: int, block_bytes: int) -> MemorySplit:
    """What the ``free`` bytes are for in an execution mode, also in the log. Raises SettingsError if no cache fits."""
    reserved = settings.graph_reserved_mem if mode == GRAPHS else 0.0
    if mode != GRAPHS:
        given = [OPTIONS[name].flag for name in GRAPH_OPTIONS if getattr(settings, name) != OPTIONS[name].default]
        if given:
            logger.warning("Execution mode %s captures no graphs: %s without effect", mode, ", ".join(given))
    split = split_memory(free, block_bytes, utilization=settings.gpu_memory_utilization, reserved=reserved)
    logger.info("%s", lines.free_memory(split, settings.gpu_memory_utilization, reserved))
    return split


@dataclass
class NoGraphs:
    """What an execution mode does about graphs while warm-up runs; here nothing: every program runs as it is."""

    steps: DummySteps

    def compile(self, step: BootStepContext) -> None:
        """Compile kernels before anything runs."""

    def first_run(self, bucket: Bucket) -> None:
        """The first run of a forward program."""
        self.steps.run(bucket, self.steps.executor.execute)

    def after_sampling(self, program: SamplerProgram) -> None:
        """Called after each run of a sampler item."""

    def capture(self) -> Captures | None:
        """Capture graphs; called once all programs have run, or right away where warm-up is skipped."""
        return None


@dataclass(frozen=True)
class Budget:
    """How memory was divided before the cache was allocated, and what a block of the cache takes."""

    split: MemorySplit
    block_bytes: int

    def pool(self, free: int) -> int:
        """Bytes for graphs, now that ``free`` ones are left."""
        return graph_pool(self.split, self.block_bytes, free)


@dataclass
class CountedGraphs(NoGraphs):
    """Nothing is captured; the bytes that each graph would keep are counted."""

    record: Record
    settings: Settings
    budget: Budget
    sizes: ModelSizes

    def capture(self) -> Captures:
        if self.settings.config_hidden_layers is not None:
            logger.warning("Graphs are only counted here, whole: --config-hidden-layers without effect")
        plan, budget, limits = self.steps.plan, self.budget, self.steps.plan.limits
        free = budget.split.free - limits.num_blocks * budget.block_bytes
        memory = CountedMemory(self.sizes, limits.max_blocks_per_seq, free)
        pool = budget.pool(free)
        return capture(plan, self.record, self.settings, pool=pool, capture_one=memory.capture_one, free=memory.free)


@dataclass
class DeviceGraphs(NoGraphs):
    """Captures the programs of a device, with the bytes that they really take.

    All graphs work in one memory pool, which the largest makes as large as any needs: it is captured first. Then the
    sampler's that are missing, few and small; what their items took counts. The rest is divided by the budget's rules.
    """

    record: Record
    settings: Settings
    budget: Budget
    free: Callable[[], int]

    def __post_init__(self) -> None:
        self._executor, self._entries = self.steps.executor, self.record.by_name()
        self._running: list[LaunchedStep] = []

    def compile(self, step: BootStepContext) -> None:
        with step("Compiling kernels"):
            self._executor.compile(self.steps.plan, os.cpu_count() or 1)

    def first_run(self, bucket: Bucket) -> None:
        self.steps.run(bucket, self._executor.prepare)

    def after_sampling(self, program: SamplerProgram) -> None:
        self._executor.capture_sampling(program)

    def capture(self) -> Captures:
        plan, entries = self.steps.plan, self._entries
        items = _that_run(plan, entries)
        sampling = [item for item in items if isinstance(item, SamplerItem)]
        before = self.free() + sum(entries[item.name].bytes for item in sampling)
        pool = self.budget.pool(before)
        buckets = [item.bucket for item in items if isinstance(item, ForwardItem)]
        if buckets:
            self._capture_one(max(buckets, key=lambda bucket: (bucket.tokens, bucket.rows)))
        for item in sampling:
            if item.rows:
                entries[item.name].graph = True
                self._executor.capture_sampling(item.program)
        left = max(pool - (before - self.free()), 0)
        done = capture(plan, self.record, self.settings, pool=left, capture_one=self._capture_one, free=self.free)
        self._wait()
        self._executor.sampler.forget()
        return done

    def _capture_one(self, bucket: Bucket) -> int:
        """The graph then runs once on a dummy step, while the next one is captured."""
        before = self.free()
        if not self._executor.is_captured(bucket):
            if self._entries[str(bucket)].outcome == "pending":
                self.first_run(bucket)
            try:
                self._executor.capture(bucket)
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from None
            self._wait()
            self._running.append(self.steps.run(bucket, self._executor.launch))
        return max(before - self.free(), 0)

    def _wait(self) -> None:
        while self._running:
            self._running.pop().result()


def choose_graphs(
    settings: Settings,
    backend: Backend,
    steps: DummySteps,
    record: Record,
    *,
    budget: Budget,
    sizes: ModelSizes,
) -> NoGraphs:
    """What the record's execution mode does about graphs on a backend."""
    if record.mode != GRAPHS:
        return NoGraphs(steps)
    if not backend.facts.captures:
        return CountedGraphs(steps, record, settings, budget, sizes)
    return DeviceGraphs(steps, record, settings, budget, backend.free_memory)


def capture(
    plan: Plan, record: Record, settings: Settings, *, pool: int, capture_one: CaptureOne, free: Callable[[], int]
) -> Captures:
    """Capture what fits into ``pool`` bytes of the plan's buckets; ``free`` gives the bytes free at a moment.

    A captured item's entry says so, with the bytes; one that runs without a graph says why.
    """
    entries = record.by_name()
    expected = {item.bucket: item.estimate.bytes for item in plan.items if isinstance(item, ForwardItem)}
    queues = _queues(plan, entries, settings)
    prefill, decode = queues
    shares = graph_shares(pool, prefill, decode, settings.graph_prompt_ratio)
    logger.info("%s", lines.graph_shares(pool, free(), shares, settings.graph_prompt_ratio))

    def one(phase: Phase, bucket: Bucket, number: int) -> int:
        logger.info("%s", lines.running(phase, bucket, number, len(queues[phase]), free(), graph=True))
        entry, started = entries[str(bucket)], time.monotonic()
        used = capture_one(bucket)
        entry.graph, entry.bytes = True, entry.bytes + used
        entry.compile_seconds += time.monotonic() - started
        return used

    phases = capture_graphs(pool, queues, one, expected=expected, prompt_ratio=settings.graph_prompt_ratio)
    for phase, done in phases.items():
        logger.info("%s", lines.captured(phase, list(done.captured), done.total, done.used))
        _write_down(done, entries, record)
    captures = Captures(pool, phases)
    record.memory |= {"graph_pool": pool, "graphs": captures.used}
    return captures


def _that_run(plan: Plan, entries: dict[str, ItemRecord]) -> Sequence[Item]:
    """The items that warm-up could run, or was told to skip."""
    return [item for item in plan.items if entries[item.name].outcome not in NOT_RUN]


def _queues(plan: Plan, entries: dict[str, ItemRecord], settings: Settings) -> dict[Phase, list[Bucket]]:
    """Each phase's buckets in the order of capture, the phase that prefills first. What warm-up could not run is left
    out, what it was told to skip is not, as in the source.
    """
    strategies = {plan.policy.prefill: settings.graph_prompt_strategy, "decode": settings.graph_decode_strategy}
    runs = []
    for item in _that_run(plan, entries):
        if isinstance(item, ForwardItem):
            if item.fallback:
                entries[item.name].reason = FALLBACK
            else:
                runs.append(item.bucket)
    queues: dict[Phase, list[Bucket]] = {}
    for phase, name in strategies.items():
        strategy: Strategy = "max_bs" if name == "max_bs" else "min_tokens"
        queues[phase] = capture_order([bucket for bucket in runs if bucket.phase == phase], strategy)
    return queues


def _write_down(done: PhaseCaptures, entries: dict[str, ItemRecord], record: Record) -> None:
    """What runs without a graph, and shares that were exceeded."""
    for skipped in done.skipped:
        entries[str(skipped.bucket)].reason = f"runs without a graph: {skipped.reason}"
    record.notes += done.notes
    if done.skipped:
        record.notes.append(
            f"{len(done.skipped)} of {done.total} {done.phase} buckets run without a graph: --graph-reserved-mem makes"
            " room for more, --graph-prompt-ratio divides it"
        )


class CountedMemory:
    """The memory of a device with graphs, as a number: ``capture_one`` takes bytes off it."""

    def __init__(self, sizes: ModelSizes, blocks_per_row: int, free: int) -> None:
        self._sizes, self._blocks, self._free = sizes, blocks_per_row, free

    def capture_one(self, bucket: Bucket) -> int:
        used = graph_bytes(bucket, self._sizes, self._blocks)
        if used > self._free:
            raise MemoryError(f"{bucket} needs {used:,} bytes and {self._free:,} are free")
        self._free -= used
        return used

    def free(self) -> int:
        return self._free


def graph_bytes(bucket: Bucket, sizes: ModelSizes, blocks_per_row: int) -> int:
    """Bytes that a graph of ``bucket`` keeps to itself: its inputs, the widest layer's work, hidden states, and logits.

    Each token brings its id, its position and one cache row for each key and value head; each row its block table
    (at most ``blocks_per_row`` blocks) and the position that is sampled.
    """
    a_token = INDEX_BYTES * (2 + 2 * sizes.kv_heads)
    a_row = INDEX_BYTES + TABLE_BYTES * (-(-bucket.blocks // bucket.rows) or blocks_per_row)
    states = sizes.hidden * sizes.dtype_bytes + sizes.activation_bytes_per_token
    return bucket.tokens * (a_token + states) + bucket.rows * (a_row + LOGIT_BYTES * sizes.vocab)
