"""Graph capture at boot, within the memory budget of :mod:`preheat.plan.budget`.

There is one class for each way in which an execution mode handles graphs: `NoGraphs`; `CountedGraphs` for a backend
without graphs, which pads the same and counts the memory that graphs would keep; and `DeviceGraphs`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from preheat.backends.base.backend import Backend
from preheat.execution.launched import LaunchedStep
from preheat.plan import lines
from preheat.plan.buckets import Bucket, Phase
from preheat.plan.budget import MemorySplit, PhaseCaptures, capture_graphs, capture_order, graph_shares, split_memory
from preheat.plan.cost import ModelSizes
from preheat.plan.item import Item
from preheat.plan.plan import Plan, largest
from preheat.plan.programs import Program
from preheat.plan.step_items import ForwardItem
from preheat.settings import OPTIONS, Settings
from preheat.warmup.detail import detail_level
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.record import ItemRecord, Record

logger = logging.getLogger(__name__)

GRAPHS, COMPILE = "graphs", "compile"
"""The execution modes that capture graphs, and that compile layers.

Only the first reserves memory for graphs.
"""

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

Captures = dict[Phase, PhaseCaptures]


def divide_memory(settings: Settings, mode: str, free: int, block_bytes: int) -> MemorySplit:
    """Divide the ``free`` bytes for an execution mode.

    Raises SettingsError if no cache fits.
    """
    reserved = settings.graph_reserved_mem if mode == GRAPHS else 0.0
    return split_memory(free, block_bytes, utilization=settings.gpu_memory_utilization, reserved=reserved)


def log_division(settings: Settings, mode: str, split: MemorySplit, num_blocks: int) -> None:
    """Log the division of memory for a cache of ``num_blocks`` blocks.

    Warn of options that act on graphs alone.
    """
    if mode != GRAPHS:
        given = [OPTIONS[name].flag for name in GRAPH_OPTIONS if getattr(settings, name) != OPTIONS[name].default]
        if given:
            logger.warning("Execution mode %s captures no graphs and ignores %s", mode, ", ".join(given))
    cache = split.cache if num_blocks == split.num_blocks else num_blocks * split.block_bytes
    without = "" if mode == GRAPHS else mode
    utilization, reserved = settings.gpu_memory_utilization, settings.graph_reserved_mem
    logger.info("%s", lines.free_memory(split, cache, utilization, reserved, without))


@dataclass
class NoGraphs:
    """The handling of graphs in warm-up.

    This one captures none, and every program runs as it is.
    """

    steps: DummySteps

    def compile(self, step: Callable[[str], AbstractContextManager[None]]) -> None:
        """Compile kernels before anything runs.

        ``step`` measures a named step of the boot.
        """

    def first_run(self, program: Program[Bucket]) -> None:
        """Run a forward program for the first time.

        One layer of each kind calls everything that the others do.
        """
        self.steps.run(program, self.steps.executor.prepare)

    def after_sampling(self, program: Program[int]) -> None:
        """Do nothing after a sampler item; other modes capture its graph."""

    def capture(self) -> Captures:
        """Capture graphs.

        It is called once all programs have run, or right away if warm-up is skipped.
        """
        return {}


@dataclass
class CompiledLayers(NoGraphs):
    """No graphs, but a first run of all layers.

    Dynamo may compile a region again for each.
    """

    def first_run(self, program: Program[Bucket]) -> None:
        self.steps.run(program, self.steps.executor.execute)


@dataclass
class CountedGraphs(NoGraphs):
    """Captures nothing, but counts the bytes that each graph would keep."""

    record: Record
    settings: Settings
    split: MemorySplit
    sizes: ModelSizes
    level: int = logging.INFO

    def capture(self) -> Captures:
        if self.settings.config_hidden_layers is not None:
            logger.warning("Graphs are only counted here, whole: --config-hidden-layers has no effect")
        plan, split, limits = self.steps.plan, self.split, self.steps.plan.limits
        free = split.free - limits.num_blocks * split.block_bytes
        memory = CountedMemory(self.sizes, limits.max_blocks_per_seq, free)
        captured = set[Program[Bucket]]()

        def capture_one(bucket: Bucket) -> int:
            program = plan.program_of(Program("forward", bucket))
            used = 0 if program in captured else memory.capture_one(bucket)
            captured.add(program)
            return used

        pool = split.graph_pool(free)
        return capture(
            plan, self.record, self.settings, pool=pool, capture_one=capture_one, free=memory.free,
            level=self.level,
        )  # fmt: skip


@dataclass
class DeviceGraphs(NoGraphs):
    """Captures programs on the device and measures the bytes that they take.

    Where all graphs share one memory pool the largest is captured first, so that the pool need not grow later. The
    sampler's graphs follow, which are few and small. The memory of both is subtracted from the pool, and the rest is
    divided by the budget's rules. With adapters a bucket has two graphs, with adapters and without.
    """

    record: Record
    settings: Settings
    split: MemorySplit
    free: Callable[[], int]
    level: int = logging.INFO
    shared: bool = True

    def __post_init__(self) -> None:
        self._executor, self._entries = self.steps.executor, self.record.by_name()
        self._running: list[LaunchedStep] = []

    def compile(self, step: Callable[[str], AbstractContextManager[None]]) -> None:
        with step("Compiling kernels for the cache"):
            plan = self.steps.plan
            programs = (plan.program_of(item.program) for item in plan.items if item.program)
            self._executor.compile(programs, os.cpu_count() or 1)

    def after_sampling(self, program: Program[int]) -> None:
        self._executor.capture(program)

    def capture(self) -> Captures:
        plan, entries = self.steps.plan, self._entries
        items = _runnable(plan, entries)
        own = [(entries[item.name], item.program) for item in items if item.program and not item.program.draft]
        before = self.free() + sum(entry.bytes for entry, program in own if program.kind == "sampler")
        pool = self.split.graph_pool(before)
        buckets = [item.bucket for item in items if isinstance(item, ForwardItem)]
        if buckets and self.shared:
            self._capture_one(largest(buckets))
        for entry, program in own:
            if program.kind in ("encoder", "sampler") and program.size:
                entry.graph = True
                self._executor.capture(program)
        left = max(pool - (before - self.free()), 0)
        done = capture(
            plan, self.record, self.settings, pool=left, capture_one=self._capture_one, free=self.free,
            level=self.level,
        )  # fmt: skip
        self._wait()
        self._executor.sampler.forget()
        return done

    def _capture_one(self, bucket: Bucket) -> int:
        """Capture a bucket's graph and run it on a dummy step.

        The step ends while the next graph is captured.
        """
        before = self.free()
        self._capture_program(Program("forward", bucket))
        if self.steps.plan.options.enable_lora:
            self._capture_adapted(Program("forward", bucket, adapted=True))
        return max(before - self.free(), 0)

    def _capture_adapted(self, program: Program[Bucket]) -> None:
        """Capture the graph for rows with adapters, if memory is left.

        The graph without adapters stays.
        """
        entry = self._entries[str(program)]
        if entry.outcome not in NOT_RUN:
            try:
                self._capture_program(program)
            except MemoryError as error:
                entry.reason = f"runs without a graph: {error}"

    def _capture_program(self, program: Program[Bucket]) -> None:
        if self._executor.is_captured(program):
            return
        entry = self._entries[str(program)]
        if entry.outcome == "pending":
            self.first_run(program)
        try:
            self._executor.capture(program)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        entry.graph = True
        self._wait()
        self._running.append(self.steps.run(program, self._executor.launch))

    def _wait(self) -> None:
        while self._running:
            self._running.pop().result()


def choose_graphs(
    settings: Settings, backend: Backend, steps: DummySteps, record: Record, *, split: MemorySplit, sizes: ModelSizes
) -> NoGraphs:
    """Return the handling of graphs for the record's execution mode on ``backend``."""
    level = detail_level(settings, backend.facts)
    if record.mode != GRAPHS:
        return CompiledLayers(steps) if record.mode == COMPILE else NoGraphs(steps)
    if not backend.facts.captures:
        return CountedGraphs(steps, record, settings, split, sizes, level)
    shared = not backend.facts.own_graph_memory
    return DeviceGraphs(steps, record, settings, split, backend.free_memory, level, shared)


def capture(
    plan: Plan,
    record: Record,
    settings: Settings,
    *,
    pool: int,
    capture_one: Callable[[Bucket], int],
    free: Callable[[], int],
    level: int = logging.INFO,
) -> Captures:
    """Capture the plan's buckets as far as they fit into ``pool`` bytes.

    ``capture_one`` returns the bytes of one capture, or raises MemoryError, which skips the bucket. ``free`` returns
    the bytes that are free now. ``level`` is the log level of the lines on every graph. The entry of a captured item
    gets its bytes, the entry of an item without a graph the reason.
    """
    entries = record.by_name()
    expected = {item.bucket: item.estimate.bytes for item in plan.items if isinstance(item, ForwardItem)}
    queues = _queues(plan, entries, settings)
    prefill, decode = queues
    shares = graph_shares(pool, prefill, decode, settings.graph_prompt_ratio)
    logger.info("%s", lines.graph_shares(pool, free(), shares, settings.graph_prompt_ratio))

    def one(phase: Phase, bucket: Bucket, number: int) -> int:
        if logger.isEnabledFor(level):
            logger.log(level, "%s", lines.running(phase, bucket, number, len(queues[phase]), free(), graph=True))
        entry, started = entries[str(bucket)], time.monotonic()
        used = capture_one(bucket)
        entry.graph, entry.bytes = True, entry.bytes + used
        entry.compile_seconds += time.monotonic() - started
        return used

    phases = capture_graphs(pool, queues, one, expected=expected, prompt_ratio=settings.graph_prompt_ratio)
    for phase, done in phases.items():
        whole = level >= logging.INFO
        logger.info("%s", lines.captured(phase, list(done.captured), done.total, done.used, whole=whole))
        _write_down(done, entries, record)
    record.memory |= {"graph_pool": pool, "graphs": sum(done.used for done in phases.values())}
    return phases


def _runnable(plan: Plan, entries: dict[str, ItemRecord]) -> list[Item]:
    """Return the items that warm-up ran without an error, or was told to skip."""
    return [item for item in plan.items if entries[item.name].outcome not in NOT_RUN]


def _queues(plan: Plan, entries: dict[str, ItemRecord], settings: Settings) -> dict[Phase, list[Bucket]]:
    """Return each phase's buckets in the order of capture, the phase that prefills first."""
    strategies: dict[Phase, str] = {
        plan.policy.prefill: settings.graph_prompt_strategy,
        "decode": settings.graph_decode_strategy,
    }
    buckets = []
    for item in _runnable(plan, entries):
        if isinstance(item, ForwardItem):
            if item.fallback:
                entries[item.name].reason = FALLBACK
            else:
                buckets.append(item.bucket)
    decodes = ("decode", "verify")  # steps with drafts are decoding steps, too
    return {
        phase: capture_order(
            [each for each in buckets if each.phase == phase or (phase in decodes and each.phase in decodes)], strategy
        )
        for phase, strategy in strategies.items()
    }


def _write_down(done: PhaseCaptures, entries: dict[str, ItemRecord], record: Record) -> None:
    """Record the buckets that run without a graph, and the exceeded shares."""
    for skipped in done.skipped:
        entries[str(skipped.bucket)].reason = f"runs without a graph: {skipped.reason}"
    record.notes += done.notes
    if done.skipped:
        record.notes.append(
            f"{len(done.skipped)} of {done.total} {done.phase} buckets run without a graph: --graph-reserved-mem makes"
            " room for more, --graph-prompt-ratio divides it"
        )


class CountedMemory:
    """The counted memory of a device with graphs: ``capture_one`` subtracts a graph's bytes."""

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
    """Return the bytes that a graph of ``bucket`` would keep.

    They are its inputs, the widest layer's activations, hidden states and logits. A token has its id, its position and
    a cache row for each key and value head. A row has its block table, of at most ``blocks_per_row`` blocks, and the
    sampled position.
    """
    token_inputs = INDEX_BYTES * (2 + 2 * sizes.kv_heads)
    row_inputs = INDEX_BYTES + TABLE_BYTES * (-(-bucket.blocks // bucket.rows) or blocks_per_row)
    states = sizes.hidden * sizes.dtype_bytes + sizes.activation_bytes_per_token
    return bucket.tokens * (token_inputs + states) + bucket.rows * (row_inputs + LOGIT_BYTES * sizes.vocab)
