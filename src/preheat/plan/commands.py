"""The output of ``preheat buckets`` and ``preheat plan``. No torch."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from preheat.backends.base.facts import Facts
from preheat.cache_groups import WHOLE
from preheat.limits import Limits, more_states, resolve_limits
from preheat.plan.bucket_sizes import PAD_PERCENT, STRATEGIES, bucket_sizes
from preheat.plan.cost import Costs, ModelSizes, SpecLike
from preheat.plan.functions import functions_of
from preheat.plan.groups import Grouping, choose
from preheat.plan.item import Item
from preheat.plan.lines import format_bytes
from preheat.plan.modes import resolve, with_defaults
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.plan.repeat_items import PaceItem
from preheat.plan.sampler_settings import LEVEL_SETTINGS
from preheat.plan.step_items import DraftItem, ForwardItem, SamplerItem
from preheat.pooling.encoders import SPARE
from preheat.settings import Settings

MOST_REASONS = 8


def add_bucket_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``preheat buckets``."""
    parser.add_argument("--strategy", default="linear", choices=STRATEGIES, help="rule that spaces the sizes")
    parser.add_argument("--min", type=int, required=True, help="smallest value")
    parser.add_argument(
        "--step", type=int, required=True, help="step between sizes, or the number that they are multiples of"
    )
    parser.add_argument("--max", type=int, required=True, help="largest size; always in the list")
    parser.add_argument("--count", type=int, help="number of sizes, for exponential (default: one for each doubling)")
    parser.add_argument("--pad-max", type=int, help="maximum padding, for padding_aware (default: a quarter of max)")
    parser.add_argument(
        "--pad-percent",
        type=int,
        help=f"maximum padding in percent, for padding_aware, at most 50 (default: {PAD_PERCENT})",
    )
    parser.add_argument("--json", action="store_true", help="print a list of integers")


def buckets(args: argparse.Namespace) -> str:
    """Return the output of ``preheat buckets``: the sizes of one dimension.

    Raises SettingsError for a bad range.
    """
    optional = {"count": args.count, "pad_max": args.pad_max, "pad_percent": args.pad_percent}
    values = bucket_sizes(args.strategy, args.min, args.step, args.max, **optional)
    if args.json:
        return json.dumps(list(values))
    return f"{len(values)} buckets: {', '.join(map(str, values))}"


def plan(
    settings: Settings,
    spec: SpecLike,
    max_positions: int,
    *,
    dtype: str = "bfloat16",
    facts: Facts,
    weights: Mapping[str, int] | None = None,
    as_json: bool = False,
) -> str:
    """Return the output of ``preheat plan`` for a model.

    The model has the sizes of ``spec``, was made for ``max_positions`` tokens, and runs in ``dtype``. ``weights`` are
    the bytes of its weights by quantization.
    """
    settings, sizes = with_defaults(settings, facts), ModelSizes.of(spec, 4 if dtype == "float32" else 2)
    mode = resolve(facts, settings)
    grouping, functions = choose(settings, facts, spec, mode), functions_of(spec, facts.in_mode(mode))
    block_bytes = grouping.of_bytes((settings.block_size or facts.block_size) * sizes.kv_bytes_per_token)
    limits = resolve_limits(
        settings,
        max_positions,
        block_bytes,
        image_tokens=spec.image_tokens,
        any_size=spec.any_size,
        spare=SPARE * spec.encodes,
        groups=grouping.groups,
        states=more_states(settings) if spec.has_states else 0,
    )
    limits = replace(limits, pools=spec.head is None)
    options = PlanOptions.of(settings, facts, pools=spec.head is None, functions=functions)
    made = make_plan(limits, options, Costs(sizes, facts.machine, limits.block_size))
    if as_json:
        return json.dumps(made.to_dict() | ({"weights": dict(weights)} if weights else {}), indent=2)
    return "\n".join(
        [
            *_head(made, sizes.kv_bytes_per_token, block_bytes),
            *_groups(made.limits, grouping, block_bytes),
            *_states(made.limits, spec.state_bytes(4 if dtype == "float32" else 2)),
            *_weights(weights or {}, dtype),
            "",
            *_items(made),
            "",
            *_padding(made),
            *_dropped(made),
        ]
    )  # fmt: skip


def _head(plan: Plan, token_bytes: int, block_bytes: int) -> list[str]:
    limits = plan.limits
    seconds = sum(item.estimate.seconds for item in plan.items)
    size = f"{limits.max_num_seqs} sequences x {limits.max_model_len:,} tokens"
    step = f"{limits.max_num_batched_tokens:,} tokens a step, blocks of {limits.block_size}"
    how = f"{plan.policy.name} policy, {plan.strategy} bucket sizes"
    most = format_bytes(limits.num_blocks * block_bytes)
    cache = f"KV cache: {format_bytes(token_bytes)} a token, at most {limits.num_blocks:,} blocks, {most}"
    return [
        f"{size}, {step}",
        cache,
        f"{how}: {len(plan.items):,} items, {plan.programs:,} programs, about {seconds:.1f} s",
    ]


def _groups(limits: Limits, grouping: Grouping, block_bytes: int) -> list[str]:
    """Return lines on the memory of each kind of cache group, and on the sequences that fit; none for one group."""
    if grouping.reason:
        return [f"cache groups are off: {grouping.reason}"]
    if grouping.groups == WHOLE:
        return []
    size, length, found = limits.block_size, limits.max_model_len, []
    for window in dict.fromkeys(group.window for group in grouping.groups):
        of_kind = [group for group in grouping.groups if group.window == window]
        layers = sum(len(group.layers) for group in of_kind)
        kind = "all tokens" if window is None else f"a window of {window:,}, at most {limits.in_flight:,} in flight"
        held = sum(group.columns(length, size, limits.in_flight) for group in of_kind) * block_bytes
        token = format_bytes(len(of_kind) * block_bytes // size)
        sequence = f"{format_bytes(held)} a sequence of {length:,} tokens"
        found.append(f"  {layers} layers, {kind}: {token} a token, {sequence}")
    need = limits.need(length, limits.in_flight)
    whole = -(-length // size) * block_bytes * grouping.total // grouping.room
    each = f"each takes {format_bytes(need * block_bytes)}, and {format_bytes(whole)} without cache groups"
    return [*found, f"  {(limits.num_blocks - 1) // need:,} such sequences fit; {each}"]


def _states(limits: Limits, state_bytes: int) -> list[str]:
    """Return a line on the memory of states of ``state_bytes``; none for a model without states."""
    if not state_bytes:
        return []
    slots = f"{limits.max_num_seqs:,} of sequences, {limits.states:,} for kept states and drafts, one for padding"
    return [f"states: {limits.state_slots:,} slots of {format_bytes(state_bytes)} ({slots})"]


def _weights(weights: Mapping[str, int], dtype: str) -> list[str]:
    """Return a line on the bytes of the weights, if they are known."""
    if not weights:
        return []
    parts = [f"{format_bytes(size)} {dtype if name == 'not quantized' else name}" for name, size in weights.items()]
    return [f"weights: {'; '.join(parts)}"]


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
        if plan.options.host_sampler:
            return f"{len(sizes)} batch sizes x {len(LEVEL_SETTINGS)} levels, all settings for one row"
        return f"{len(sizes)} batch sizes x {len(items) // len(sizes)} settings"
    if isinstance(items[0], DraftItem | PaceItem):
        return f"{items[0].name} ... {items[-1].name}"
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
