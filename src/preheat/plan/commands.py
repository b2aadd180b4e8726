"""The bodies of ``preheat buckets`` and ``preheat plan``: what they print, from plain values. No torch."""

from __future__ import annotations

import argparse
import json

from preheat.backends.base import Facts
from preheat.limits import resolve_limits
from preheat.plan.bucket_sizes import PAD_PERCENT, STRATEGIES, bucket_sizes
from preheat.plan.cost import Costs, ModelSizes, SpecLike
from preheat.plan.options import PlanOptions
from preheat.plan.plan import make_plan
from preheat.plan.render import render
from preheat.settings import Settings


def add_bucket_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``preheat buckets``."""
    parser.add_argument("--strategy", default="linear", choices=STRATEGIES, help="rule that spaces the values")
    parser.add_argument("--min", type=int, required=True, help="smallest value")
    parser.add_argument("--step", type=int, required=True, help="distance of values, or what they are multiples of")
    parser.add_argument("--max", type=int, required=True, help="largest value; always one of the sizes")
    parser.add_argument("--count", type=int, help="points of the exponential strategy (default: one a doubling)")
    parser.add_argument("--pad-max", type=int, help="most padding, for padding_aware (default: a quarter of max)")
    parser.add_argument("--pad-percent", type=int, help=f"the same in percent, at most 50 (default: {PAD_PERCENT})")
    parser.add_argument("--json", action="store_true", help="print a list of integers")


def buckets(args: argparse.Namespace) -> str:
    """What ``preheat buckets`` prints: the sizes of one dimension. SettingsError for a range that makes no sense."""
    values = bucket_sizes(
        args.strategy,
        args.min,
        args.step,
        args.max,
        count=args.count,
        pad_max=args.pad_max,
        pad_percent=args.pad_percent,
    )
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
    as_json: bool = False,
) -> str:
    """What ``preheat plan`` prints for the model of ``spec``, made for ``max_positions`` tokens, in ``dtype``."""
    sizes = ModelSizes.of(spec, 4 if dtype == "float32" else 2)
    limits = resolve_limits(settings, max_positions, settings.block_size * sizes.kv_bytes_per_token)
    made = make_plan(limits, PlanOptions.of(settings), Costs(sizes, facts.machine, limits.block_size))
    return json.dumps(made.to_dict(), indent=2) if as_json else render(made)
