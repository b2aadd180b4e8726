"""The plan: all that may ever run, worked out from limits alone, before any weight is loaded."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan.buckets import Bucket, Phase, StepSize
from preheat.plan.cost import Costs
from preheat.plan.dispatcher import Dispatcher, OnMiss, PhaseDispatcher, build_phase
from preheat.plan.items import (
    MAX_DETERMINISM_TOKENS,
    SWAP_SIZES,
    Dropped,
    Item,
    SamplerKey,
    item_name,
    sampler_keys,
    sampler_sizes,
)
from preheat.plan.options import PlanOptions
from preheat.plan.padding import Padding, padding_by_phase
from preheat.plan.policy import Candidates, candidates, coarser, max_rows

MAX_PROGRAMS = 2_000


@dataclass(frozen=True, eq=False)
class Plan:
    """Frozen: what is not in it when it is made can never be in it. ``items`` are in the order in which they are to
    run, the largest shapes of each phase first; ``padding`` is by phase.
    """

    limits: Limits
    options: PlanOptions
    phases: tuple[Candidates, ...]
    table: Dispatcher
    items: tuple[Item, ...]
    dropped: tuple[Dropped, ...]
    padding: Mapping[str, Padding] = field(default_factory=dict)

    def fit(self, need: StepSize) -> Bucket:
        """The shape that a step of ``need`` runs in; see `Table.fit`."""
        return self.table.fit(need)

    @cached_property
    def by_name(self) -> Mapping[str, Item]:
        """The items by name."""
        return MappingProxyType({item.name: item for item in self.items})

    @property
    def programs(self) -> int:
        """Distinct runnable programs; several items may exercise one."""
        return count_programs(self.items)

    @property
    def largest(self) -> Bucket:
        """The shape with the most padded tokens: the one whose peak memory is measured before the cache is sized."""
        return max(self.table.shapes, key=lambda shape: (shape.tokens, shape.rows))

    @cached_property
    def sampler_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that sampling is padded to."""
        return _sampler_sizes(self.limits, self.table)

    @property
    def determinism_shape(self) -> Bucket:
        """What the determinism passes run: a step of as many tokens as a usual batch has rows."""
        return _determinism_shape(self.limits, self.table)

    def sampler_rows(self, rows: int) -> int:
        """What the sampling of ``rows`` rows is padded to."""
        return self.sampler_sizes[bisect_left(self.sampler_sizes, rows)]

    def padded(self, rows: int, tokens: int, longest: int) -> int:
        """What a step with prompts in it is padded to, in tokens: what admission counts against the budget."""
        phase: Phase = "mixed" if self.options.bucketing_policy == "unified" else "prompt"
        if longest == 1:
            return tokens  # rows that decode; their number is bounded by the slots
        shape = self.table.find(StepSize(phase, rows, tokens, longest=longest))
        return shape.tokens if shape else max(tokens, self.limits.max_num_batched_tokens)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.options.bucketing_policy,
            "strategy": self.options.bucketing_strategy,
            "programs": self.programs,
            "estimated_seconds": round(sum(item.estimated_seconds for item in self.items), 3),
            "estimated_bytes": max(item.estimated_bytes for item in self.items),
            "padding": {phase: padding.to_dict() for phase, padding in self.padding.items()},
            "items": [item.to_dict() for item in self.items],
            "dropped": [dropped.to_dict() for dropped in self.dropped],
        }


def make_plan(
    limits: Limits,
    options: PlanOptions,
    costs: Costs | None = None,
    *,
    checks: Sequence[str] = (),
    on_miss: OnMiss | None = None,
) -> Plan:
    """The plan for these limits. Without ``costs`` nothing is estimated.

    ``checks`` name the cross-checks that run last; ``on_miss`` is told of every step that took a fallback (None: a
    warning, once for each configuration). Raises SettingsError for options that make no sense and for a plan of more
    than 2,000 programs, unless ``allow_large_plan``.
    """
    with _without_collections():
        return _make_plan(limits, options, costs, checks, on_miss)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector: a plan allocates up to millions of objects and drops none, so that collections would
    find nothing and make the time grow faster than the plan.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _make_plan(
    limits: Limits, options: PlanOptions, costs: Costs | None, checks: Sequence[str], on_miss: OnMiss | None
) -> Plan:
    phases = candidates(limits, options)
    parts = [build_phase(phase.region, phase.shapes, phase.fallback) for phase in phases]
    table = Dispatcher(parts, on_miss)
    items = _forwards(parts, costs)
    items += [_sampler(key, costs) for key in sampler_keys(_sampler_sizes(limits, table))]
    if options.bucketing_policy == "unified":
        items += [_swap(size, costs) for size in SWAP_SIZES]
    if options.batch_invariant:
        items += _determinism(limits, table, options.determinism_warmup_iterations, costs)
    items += [Item("check", name, "last") for name in checks]
    if not options.allow_large_plan:
        _refuse_large(items, phases)
    dropped = [Dropped(shape.phase, shape, reason) for phase in phases for shape, reason in phase.over]
    dropped += [Dropped(s.phase, s, _shadow_reason(s, w)) for part in parts for s, w in part.shadowed]
    return Plan(limits, options, phases, table, tuple(items), tuple(dropped), padding_by_phase(table))


def count_programs(items: Sequence[Item]) -> int:
    """Distinct programs among ``items``."""
    return len({item.program for item in items} - {None})


def _forwards(parts: Sequence[PhaseDispatcher], costs: Costs | None) -> list[Item]:
    """Phase by phase, largest first; the fallback, which is larger than all, before them."""
    items: list[Item] = []
    for part in parts:
        if part.fallback:
            items.append(_forward(part.fallback, costs, fallback=True))
        items += [_forward(shape, costs) for shape in reversed(part.shapes)]
    return items


def _forward(shape: Bucket, costs: Costs | None, *, fallback: bool = False) -> Item:
    cost = costs.forward(str(shape), shape) if costs else (0.0, 0)
    return Item(shape.phase, shape, "after_cache", *cost, fallback=fallback)


def _sampler(key: SamplerKey, costs: Costs | None) -> Item:
    cost = costs.sampling(item_name("sampler", key), key.rows) if costs else (0.0, 0)
    return Item("sampler", key, "after_cache", *cost)


def _sampler_sizes(limits: Limits, table: Dispatcher) -> tuple[int, ...]:
    decode = table.phases["decode"]
    shapes = (*decode.shapes, *filter(None, [decode.fallback]))
    return sampler_sizes(shapes, max_rows(limits))


def _swap(size: int, costs: Costs | None) -> Item:
    cost = costs.swap(item_name("swap", size), size) if costs else (0.0, 0)
    return Item("swap", size, "after_cache", *cost)


def _determinism(limits: Limits, table: Dispatcher, passes: int, costs: Costs | None) -> list[Item]:
    """Passes over a program that serves, run again."""
    shape = _determinism_shape(limits, table)
    cost = costs.forward(str(shape), shape) if costs else (0.0, 0)
    return [Item("determinism", number + 1, "last", *cost) for number in range(passes)]


def _determinism_shape(limits: Limits, table: Dispatcher) -> Bucket:
    rows = min(max_rows(limits), MAX_DETERMINISM_TOKENS)
    return table.peek(StepSize("decode", rows, rows, longest=1, blocks=rows))


def _shadow_reason(shape: Bucket, winner: Bucket | None) -> str:
    if winner is not None:
        return f"shadowed: every step that it could hold runs cheaper in {winner}"
    return "shadowed: no step within the limits needs it, a smaller shape holds all that it could be asked for"


def _refuse_large(items: Sequence[Item], phases: Sequence[Candidates]) -> None:
    programs = count_programs(items)
    if programs <= MAX_PROGRAMS:
        return
    by_phase = Counter(item.kind for item in items if isinstance(item.key, Bucket))
    worst = max(phases, key=lambda phase: by_phase[phase.phase])
    knob = "list fewer buckets in --bucketing-from-file"
    if worst.axes:
        knob = coarser(worst.axes)
    raise SettingsError(
        f"the plan has {programs:,} programs, {by_phase[worst.phase]:,} of them for {worst.phase} steps; at most"
        f" {MAX_PROGRAMS:,} are run by default: {knob}, or give --allow-large-plan"
    )
