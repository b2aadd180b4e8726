"""The plan: everything that may run.

It is derived from the limits alone, before any weight is loaded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan.bucket_sizes import bucket_sizes
from preheat.plan.buckets import Bucket, StepSize
from preheat.plan.build_items import FunctionItem, GrammarItem
from preheat.plan.cache_items import SwapItem, TransferItem
from preheat.plan.candidates import Candidates, candidates, coarser
from preheat.plan.cost import Costs
from preheat.plan.dispatcher import Dispatcher, OnMiss, build_phase
from preheat.plan.item import Dropped, Item
from preheat.plan.options import PlanOptions
from preheat.plan.padding import Padding, padding_by_phase
from preheat.plan.policy import Policy, policy_named
from preheat.plan.programs import Program
from preheat.plan.repeat_items import CheckItem, DeterminismItem, PaceItem
from preheat.plan.step_items import AdapterItem, DraftItem, EncoderItem, ForwardItem, PoolerItem, SamplerItem
from preheat.utils.gc import paused

MAX_PROGRAMS = 2_000

KINDS: tuple[type[Item], ...] = (
    FunctionItem, ForwardItem, EncoderItem, SamplerItem, PoolerItem, AdapterItem, SwapItem, TransferItem, GrammarItem,
    DraftItem, PaceItem, DeterminismItem,
    CheckItem,
)  # fmt: skip
"""The kinds of items, in the order in which they run."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Everything that may run. It is frozen: nothing can be added later.

    ``items`` are in the order in which they run, the largest buckets of each phase first. ``checks`` name the
    cross-checks that run last. ``padding`` is by phase. ``draft`` is the plan of the draft model, if there is one.
    """

    limits: Limits
    options: PlanOptions
    policy: Policy
    dispatcher: Dispatcher
    checks: tuple[str, ...]
    phases: tuple[Candidates, ...]
    dropped: tuple[Dropped, ...]
    padding: Mapping[str, Padding]
    draft: Plan | None = None
    items: tuple[Item, ...] = ()

    def fit(self, size: StepSize) -> Bucket:
        """Return the bucket that a step of ``size`` runs in; see `Dispatcher.fit`."""
        return self.dispatcher.fit(size)

    @cached_property
    def sampler_sizes(self) -> tuple[int, ...]:
        """Padded sizes of sampling in rows, ascending.

        They are 0, 1, the rows of the decode buckets and the most rows of a step. Each draft is one more row: with
        drafts there are also four sizes in each doubling, up to the most rows with drafts. An engine that pools has two
        sizes in each doubling, up to all tokens of a step.
        """
        decode = self.dispatcher.phases["decode"]
        rows = {bucket.rows for bucket in (*decode.buckets, decode.fallback) if bucket is not None}
        rows |= {0, 1, self.limits.max_rows}
        limits = self.limits
        most = min(limits.max_sampled, limits.max_rows * (1 + limits.num_speculative_tokens))
        if self.verifies and most > max(rows):
            rows |= set(bucket_sizes("exponential", max(rows), 2, most, per_doubling=4))
        if limits.pools and limits.max_sampled > max(rows):
            rows |= set(bucket_sizes("exponential", max(rows), 2, limits.max_sampled, per_doubling=2))
        return tuple(sorted(rows))

    @property
    def verifies(self) -> bool:
        """Whether there are steps with drafts."""
        return "verify" in self.dispatcher.phases

    def most_drafts(self, rows: int) -> int:
        """Return the most drafts of a row in a decoding step.

        The step has ``rows`` rows. Returns 0 if no drafts fit.
        """
        region = self.dispatcher.phases["verify"].region
        return int(region.top(np.asarray(rows))) - 1 if rows <= region.bounds[0] else 0

    def sampler_rows(self, rows: int) -> int:
        """Return the padded size of sampling ``rows`` rows."""
        return self.sampler_sizes[bisect_left(self.sampler_sizes, rows)]

    def padded(self, rows: int, tokens: int, longest: int) -> int:
        """Return the padded tokens of a step with prompts in it.

        Admission counts them against the budget.
        """
        if longest == 1:
            return tokens  # decoding rows; their number is bounded by the slots
        bucket = self.dispatcher.find(StepSize(self.policy.prefill, rows, tokens, longest=longest))
        if bucket:
            return bucket.tokens
        budget = self.limits.max_num_batched_tokens
        if rows > 1 and not self.policy.mixed_steps:
            return budget + 1  # prompts that fit no bucket together run one after the other
        return max(tokens, budget)

    @property
    def strategy(self) -> str:
        """The strategy that spaces bucket sizes; several if the dimensions differ."""
        return ", ".join(sorted({axis.strategy for phase in self.phases for axis in phase.axes})) or "file"

    def program_of(self, program: Program[Any]) -> Program[Any]:
        """Return the program that runs.

        Buckets that differ in their context alone may be one program.
        """
        if self.options.pads_context or program.kind != "forward":
            return program
        return program._replace(size=program.size.without_context())

    @property
    def programs(self) -> int:
        """Number of distinct runnable programs; several items may run the same program."""
        return len({self.program_of(item.program) for item in self.items if item.program is not None})

    @cached_property
    def largest(self) -> Bucket:
        """The bucket that needs the most memory, fallbacks included."""
        return largest(item.bucket for item in self.items if isinstance(item, ForwardItem))

    def with_costs(self, costs: Costs) -> Plan:
        """Return the same plan with its items estimated by ``costs``."""
        return replace(self, items=tuple(replace(item, estimate=item.cost(costs)) for item in self.items))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "policy": self.policy.name,
            "strategy": self.strategy,
            "programs": self.programs,
            "estimated_seconds": round(sum(item.estimate.seconds for item in self.items), 3),
            "estimated_bytes": max(item.estimate.bytes for item in self.items),
            "padding": {phase: padding.to_dict() for phase, padding in self.padding.items()},
            "items": [item.to_dict() for item in self.items],
            "dropped": [dropped.to_dict() for dropped in self.dropped],
        }


def largest(buckets: Iterable[Bucket]) -> Bucket:
    """Return the bucket with the most tokens, then rows, then context.

    Memory grows with them in this order.
    """
    return max(buckets, key=lambda bucket: (bucket.tokens, bucket.rows, bucket.blocks, bucket.longest))


def make_plan(
    limits: Limits,
    options: PlanOptions,
    costs: Costs | None = None,
    *,
    checks: Sequence[str] = (),
    on_miss: OnMiss | None = None,
) -> Plan:
    """Return the plan for these limits. Without ``costs`` nothing is estimated.

    ``on_miss`` is called for every step that takes a fallback (None: log a warning, once for each configuration).
    Raises SettingsError for options that make no sense and for a plan of more than 2,000 programs, unless
    ``allow_large_plan``.
    """
    with paused():  # a plan allocates millions of objects and drops none: collections would find nothing
        plan = _make_plan(limits, options, tuple(checks), on_miss)
        if not options.allow_large_plan:
            _refuse_large(plan)
        return plan.with_costs(costs) if costs else plan


def _make_plan(limits: Limits, options: PlanOptions, checks: tuple[str, ...], on_miss: OnMiss | None) -> Plan:
    phases = candidates(limits, options)
    parts = [build_phase(phase.region, phase.buckets, phase.fallback) for phase in phases]
    dispatcher = Dispatcher(parts, on_miss)
    dropped = [Dropped(bucket, reason) for phase in phases for bucket, reason in phase.over]
    dropped += [Dropped(bucket, _shadow_reason(winner)) for part in parts for bucket, winner in part.shadowed]
    plan = Plan(
        limits=limits,
        options=options,
        policy=policy_named(options.bucketing_policy),
        dispatcher=dispatcher,
        checks=checks,
        phases=phases,
        dropped=tuple(dropped),
        padding=padding_by_phase(dispatcher, context=options.pads_context),
        draft=_make_draft_plan(limits, options, on_miss) if options.draft_model else None,
    )
    return replace(plan, items=tuple(item for kind in KINDS for item in kind.of_plan(plan)))


def _make_draft_plan(limits: Limits, options: PlanOptions, on_miss: OnMiss | None) -> Plan:
    """Return the draft model's plan.

    It has the same limits and buckets, without drafts of its own.
    """
    alone = replace(
        options, verify_widths=(), draft_model=False, measures_drafts=False, enable_lora=False, functions=()
    )
    return _make_plan(replace(limits, num_speculative_tokens=0), alone, (), on_miss)


def _shadow_reason(winner: Bucket | None) -> str:
    if winner is not None:
        return f"shadowed: every step that it could hold runs cheaper in {winner}"
    return "shadowed: a smaller bucket holds every step within the limits that could need it"


def _refuse_large(plan: Plan) -> None:
    programs = plan.programs
    if programs <= MAX_PROGRAMS:
        return
    by_phase = Counter(item.kind for item in plan.items if isinstance(item, ForwardItem))
    worst = max(plan.phases, key=lambda phase: by_phase[phase.phase])
    change = coarser(worst.axes) if worst.axes else "list fewer buckets in --bucketing-from-file"
    raise SettingsError(
        f"the plan has {programs:,} programs, {by_phase[worst.phase]:,} of them for {worst.phase} steps; at most"
        f" {MAX_PROGRAMS:,} are run by default: {change}, or give --allow-large-plan"
    )
