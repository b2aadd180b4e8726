"""Graph capture at boot: drives the memory budget, tells of every step and books the outcome.

The rules are in :mod:`preheat.plan.budget`. How a graph is captured, and what it took, is the platform's affair; on a
CPU, which has no graphs, `Twin` pads the same, counts the buffers that a graph would keep, and captures nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

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
from preheat.plan.items import SamplerKey
from preheat.plan.plan import Plan
from preheat.settings import OPTIONS, Settings
from preheat.warmup.record import Entry, Record

if TYPE_CHECKING:
    from preheat.execution.executor import Executor, LaunchedStep
    from preheat.warmup.run import WarmUp

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
FALLBACK = "runs without a graph: it is for steps beyond the ladders"
INDEX_BYTES, TABLE_BYTES, LOGIT_BYTES = 8, 4, 4

CaptureOne = Callable[[Bucket], int]
"""Captures one shape and returns the bytes that it took. MemoryError passes the shape over."""


@dataclass(frozen=True)
class Captures:
    """What became of the graphs' ``pool`` of bytes, phase by phase."""

    pool: int
    phases: dict[Phase, PhaseCaptures]

    @property
    def used(self) -> int:
        return sum(done.used for done in self.phases.values())

    @property
    def left(self) -> int:
        """Bytes that nobody took; negative where estimates were too low."""
        return self.pool - self.used


def divide_memory(settings: Settings, mode: str, free: int, block_bytes: int) -> MemorySplit:
    """What the ``free`` bytes are for in an execution mode, told in the log. Raises SettingsError if no cache fits."""
    reserved = settings.graph_reserved_mem if mode == GRAPHS else 0.0
    if mode != GRAPHS:
        given = [OPTIONS[name].flag for name in GRAPH_OPTIONS if getattr(settings, name) != OPTIONS[name].default]
        if given:
            logger.warning("Execution mode %s captures no graphs: %s without effect", mode, ", ".join(given))
    split = split_memory(free, block_bytes, utilization=settings.gpu_memory_utilization, reserved=reserved)
    logger.info("%s", lines.free_memory(split, settings.gpu_memory_utilization, reserved))
    return split


def capture(
    plan: Plan, record: Record, settings: Settings, *, pool: int, capture_one: CaptureOne, free: Callable[[], int]
) -> Captures:
    """Capture what fits into ``pool`` bytes of the plan's forward shapes; ``free`` tells the bytes free at a moment.

    A captured item's entry says so, with the bytes; one that runs without a graph says why.
    """
    entries = {entry.name: entry for entry in record.entries}
    expected = {item.key: item.estimated_bytes for item in plan.items if isinstance(item.key, Bucket)}
    queues = _queues(plan, entries, settings)
    prefill, decode = queues
    shares = graph_shares(pool, prefill, decode, settings.graph_prompt_ratio)
    logger.info("%s", lines.graph_shares(pool, free(), shares, settings.graph_prompt_ratio))

    def one(phase: Phase, shape: Bucket, number: int) -> int:
        logger.info("%s", lines.running(phase, shape, number, len(queues[phase]), free(), graph=True))
        entry, started = entries[str(shape)], time.monotonic()
        used = capture_one(shape)
        entry.graph, entry.bytes = True, entry.bytes + used
        entry.compile_seconds += time.monotonic() - started
        return used

    phases = capture_graphs(pool, queues, one, expected=expected, prompt_ratio=settings.graph_prompt_ratio)
    for phase, done in phases.items():
        logger.info("%s", lines.captured(phase, list(done.captured), done.total, done.used))
        _book(done, entries, record)
    captures = Captures(pool, phases)
    record.memory |= {"graph_pool": pool, "graphs": captures.used}
    return captures


@dataclass(frozen=True)
class Budget:
    """How memory was divided before the cache was there, and what a block of the cache takes."""

    split: MemorySplit
    block_bytes: int

    def pool(self, free: int) -> int:
        """Bytes for graphs, now that ``free`` ones are left."""
        return graph_pool(self.split, self.block_bytes, free)


def capture_twin(plan: Plan, record: Record, settings: Settings, budget: Budget, sizes: ModelSizes) -> Captures:
    """`capture` on a CPU, where nothing is captured and the bytes of each graph are counted."""
    if settings.config_hidden_layers is not None:
        logger.warning("A CPU's graphs are counted, whole: --config-hidden-layers without effect")
    limits = plan.limits
    free = budget.split.free - limits.num_blocks * budget.block_bytes
    twin = Twin(sizes, limits.max_blocks_per_seq, free)
    return capture(plan, record, settings, pool=budget.pool(free), capture_one=twin.capture_one, free=twin.free)


def capture_programs(warm: WarmUp, executor: Executor, settings: Settings, budget: Budget) -> Captures:
    """`capture` of the programs of a device, with the bytes that they really take. Each graph runs once, on work that
    ``warm`` feeds, while the next one is captured.

    All graphs work in one pool, which the largest makes as large as any needs: it comes first. Then what is missing of
    the sampler's, few and small, for which every item of theirs is marked; what their items took counts. The rest is
    divided by the budget's rules.
    """
    plan, record, free = warm.plan, warm.record, warm.platform.free_memory
    entries = {entry.name: entry for entry in record.entries}
    items = [item for item in plan.items if entries[item.name].outcome not in NOT_RUN]
    before = free() + sum(entries[item.name].bytes for item in items if isinstance(item.key, SamplerKey))
    pool = budget.pool(before)
    running: list[LaunchedStep] = []

    def settle() -> None:
        while running:
            running.pop().result()

    def capture_one(shape: Bucket) -> int:
        was = free()
        if not executor.is_captured(shape):
            if entries[str(shape)].outcome == "pending":
                warm.forward(shape, executor.prepare)
            try:
                executor.capture(shape)
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from None
            settle()
            running.append(warm.forward(shape, executor.launch))
        return max(was - free(), 0)

    shapes = [item.key for item in items if isinstance(item.key, Bucket)]
    if shapes:
        capture_one(max(shapes, key=lambda shape: (shape.tokens, shape.rows)))
    for item in items:
        if isinstance(item.key, SamplerKey) and item.key.rows:
            entries[item.name].graph = True
            executor.capture_sampling(item.key)
    left = max(pool - (before - free()), 0)
    done = capture(plan, record, settings, pool=left, capture_one=capture_one, free=free)
    settle()
    executor.sampler.forget()
    return done


def _queues(plan: Plan, entries: dict[str, Entry], settings: Settings) -> dict[Phase, list[Bucket]]:
    """Each phase's shapes in the order of capture, the phase that prefills first. What warm-up could not run is left
    out, what it was told to skip is not, as in the source.
    """
    prefill: Phase = "mixed" if plan.options.bucketing_policy == "unified" else "prompt"
    strategies: dict[Phase, str] = {prefill: settings.graph_prompt_strategy, "decode": settings.graph_decode_strategy}
    runs = []
    for item in plan.items:
        if isinstance(item.key, Bucket) and entries[item.name].outcome not in NOT_RUN:
            if item.fallback:
                entries[item.name].reason = FALLBACK
            else:
                runs.append(item.key)
    queues: dict[Phase, list[Bucket]] = {}
    for phase, name in strategies.items():
        strategy: Strategy = "max_bs" if name == "max_bs" else "min_tokens"
        queues[phase] = capture_order([shape for shape in runs if shape.phase == phase], strategy)
    return queues


def _book(done: PhaseCaptures, entries: dict[str, Entry], record: Record) -> None:
    """Write down what runs without a graph, and shares that were exceeded."""
    for skipped in done.skipped:
        entries[str(skipped.shape)].reason = f"runs without a graph: {skipped.reason}"
    record.notes += done.notes
    if done.skipped:
        record.notes.append(
            f"{len(done.skipped)} of {done.total} {done.phase} shapes run without a graph: --graph-reserved-mem makes"
            " room for more, --graph-prompt-ratio divides it"
        )


class Twin:
    """The memory of a device with graphs, on a CPU: ``capture_one`` takes bytes off a number."""

    def __init__(self, sizes: ModelSizes, blocks_per_row: int, free: int) -> None:
        self._sizes, self._blocks, self._free = sizes, blocks_per_row, free

    def capture_one(self, shape: Bucket) -> int:
        used = graph_bytes(shape, self._sizes, self._blocks)
        if used > self._free:
            raise MemoryError(f"{shape} needs {used:,} bytes and {self._free:,} are free")
        self._free -= used
        return used

    def free(self) -> int:
        return self._free


def graph_bytes(shape: Bucket, sizes: ModelSizes, blocks_per_row: int) -> int:
    """Bytes that a graph of ``shape`` keeps to itself: its inputs, the widest layer's work, hidden states, and logits.

    Each token brings its id, its position and one cache row for each key and value head; each row its block table
    (at most ``blocks_per_row`` blocks) and the position that is sampled.
    """
    a_token = INDEX_BYTES * (2 + 2 * sizes.kv_heads)
    a_row = INDEX_BYTES + TABLE_BYTES * (-(-shape.blocks // shape.rows) or blocks_per_row)
    states = sizes.hidden * sizes.dtype_bytes + sizes.activation_bytes_per_token
    return shape.tokens * (a_token + states) + shape.rows * (a_row + LOGIT_BYTES * sizes.vocab)
