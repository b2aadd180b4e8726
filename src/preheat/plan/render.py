"""A plan as text for people."""

from __future__ import annotations

from collections import Counter, defaultdict

from preheat.plan.items import ForwardItem, Item, SamplerItem
from preheat.plan.lines import format_bytes
from preheat.plan.plan import Plan

MOST_REASONS = 8


def render(plan: Plan) -> str:
    """Items by kind, padding by phase, and what was dropped and why."""
    return "\n".join([*_head(plan), "", *_items(plan), "", *_padding(plan), *_dropped(plan)])


def _head(plan: Plan) -> list[str]:
    limits = plan.limits
    seconds = sum(item.estimate.seconds for item in plan.items)
    size = f"{limits.max_num_seqs} sequences x {limits.max_model_len:,} tokens"
    step = f"{limits.max_num_batched_tokens:,} tokens a step, blocks of {limits.block_size}"
    how = f"{plan.policy.name} policy, {plan.options.bucketing_strategy} bucket sizes"
    return [
        f"{size}, {step}",
        f"{how}: {len(plan.items):,} items, {plan.programs:,} programs, about {seconds:.1f} s",
    ]


def _items(plan: Plan) -> list[str]:
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in plan.items:
        groups[item.kind].append(item)
    lines = [f"{'kind':<12}{'items':>7}  {'seconds':>8}  {'most memory':>12}  sizes"]
    for kind, items in groups.items():
        seconds = sum(item.estimate.seconds for item in items)
        memory = format_bytes(max(item.estimate.bytes for item in items))
        lines.append(f"{kind:<12}{len(items):>7,}  {seconds:>8.2f}  {memory:>12}  {_sizes(plan, items)}")
    return lines


def _sizes(plan: Plan, items: list[Item]) -> str:
    if isinstance(items[0], ForwardItem):
        text = f"{items[-1].name} ... {items[0].name}"
        return text + "".join(f", fallback {item.name}" for item in items if item.fallback)
    if isinstance(items[0], SamplerItem):
        sizes = plan.sampler_sizes
        return f"{len(sizes)} batch sizes x {len(items) // len(sizes)} settings"
    return ", ".join(str(value) for item in items for value in item.shape.values())


def _padding(plan: Plan) -> list[str]:
    return [
        f"padding of {phase}: {padding.mean:.1%} on average ({padding.spread}), at most {padding.worst:.0%} at"
        f" {padding.worst_need}"
        for phase, padding in plan.padding.items()
    ]


def _dropped(plan: Plan) -> list[str]:
    if not plan.dropped:
        return []
    counts = Counter(dropped.reason.partition(":")[0] for dropped in plan.dropped)
    lines = ["", f"{len(plan.dropped):,} candidates dropped:"]
    lines += [f"  {count:>6,}  {reason}" for reason, count in counts.most_common(MOST_REASONS)]
    hidden = len(counts) - MOST_REASONS
    return lines + ([f"          and {hidden} more reasons; --json lists them all"] if hidden > 0 else [])
