"""The candidates of each phase: every bucket that the options ask for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan.bucket_file import parse_bucket_file
from preheat.plan.bucket_sizes import bucket_sizes
from preheat.plan.buckets import Bucket, Phase
from preheat.plan.options import PlanOptions
from preheat.plan.policy import Policy, policy_named
from preheat.plan.regions import Dimension, Region

MAX_CANDIDATES = 1_000_000


@dataclass(frozen=True)
class Axis:
    """One dimension of a phase: its range (min, step, max) within the limits, and the bucket sizes in it. ``knob`` is
    the prefix of the variables that set it.
    """

    label: str
    knob: str
    low: int
    step: int
    high: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Candidates:
    """A phase before its dispatcher is built. ``over`` are the buckets that exceed a limit, each with the reason."""

    region: Region
    axes: tuple[Axis, ...]
    buckets: tuple[Bucket, ...]
    over: tuple[tuple[Bucket, str], ...]
    fallback: Bucket

    @property
    def phase(self) -> Phase:
        return self.region.phase


def candidates(limits: Limits, options: PlanOptions) -> tuple[Candidates, ...]:
    """Every bucket that the options ask for, phase by phase. Raises SettingsError, saying what to change, for a policy,
    strategy or range that makes no sense.
    """
    if limits.num_blocks < 2:
        raise SettingsError(
            f"a cache of {limits.num_blocks} blocks holds nothing: at least 2 are needed, one of them pads"
        )
    policy = policy_named(options.bucketing_policy)
    regions = policy.regions(limits, options)
    if (options.bucketing_strategy == "file") != (options.bucketing_from_file is not None):
        raise SettingsError("--bucketing-strategy file and --bucketing-from-file belong together: give both or none")
    if options.bucketing_from_file is not None:
        return _from_file(limits, regions, Path(options.bucketing_from_file), policy)
    return tuple(_from_sizes(limits, options, region, policy) for region in regions)


def coarser(axes: Sequence[Axis]) -> str:
    """What to change for fewer buckets: the step of the dimension with the most sizes."""
    axis = max(axes, key=lambda axis: len(axis.values))
    return f"raise {axis.knob}_STEP (now {axis.step}, which makes {len(axis.values):,} sizes)"


def _from_sizes(limits: Limits, options: PlanOptions, region: Region, policy: Policy) -> Candidates:
    """The product of the bucket sizes of the region's dimensions."""
    bounds = zip(region.dimensions, region.bounds, strict=False)
    axes = tuple(_axis(limits, options, dimension, bound, policy) for dimension, bound in bounds)
    values = [axis.values for axis in axes]
    count = math.prod(map(len, values))
    if count > MAX_CANDIDATES:
        raise SettingsError(f"{count:,} {region.phase} buckets are too many to plan: {coarser(axes)}")
    return _candidates(limits, region, axes, (region.bucket(*sizes) for sizes in itertools.product(*values)))


def _axis(limits: Limits, options: PlanOptions, dimension: Dimension, bound: int, policy: Policy) -> Axis:
    name, knob = dimension.name, f"VLLM_{dimension.name.upper()}_BUCKET"
    asked, defaults = options.asked(name), policy.default_span(name, limits, options)
    low, step, high = (usual if given is None else given for given, usual in zip(asked, defaults, strict=True))
    if asked[0] is None:
        low = min(low, high)
    strategy = options.bucketing_strategy
    try:
        bucket_sizes("linear", low, step, high)  # checks the range as given; steps do not go beyond ``bound``
        low, high = min(low, bound), min(high, bound)
        values = bucket_sizes(
            *(strategy, low, step, high),
            per_doubling=policy.per_doubling.get(name) if strategy == "exponential" else None,
            pad_max=options.bucket_pad_max,
            pad_percent=options.bucket_pad_percent,
        )
    except SettingsError as error:
        raise SettingsError(f"{knob}_{{MIN,STEP,MAX}}: {error.message}") from None
    return Axis(dimension.label, knob, low, step, high, values)


def _from_file(limits: Limits, regions: tuple[Region, ...], path: Path, policy: Policy) -> tuple[Candidates, ...]:
    """Lines are ``(rows, query)`` or ``(rows, query, blocks)``; a query of 1 decodes."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--bucketing-from-file {path} cannot be read: {error}") from None
    found: dict[Phase, list[Bucket]] = {region.phase: [] for region in regions}
    by_phase = {region.phase: region for region in regions}
    for line in parse_bucket_file(text, str(path)):
        rows, query, blocks = (*line, 0)[:3]
        if rows < 1 or query < 1:
            raise SettingsError(f"bucket {line}: rows and query must be at least 1")
        phase: Phase = "decode" if query == 1 else policy.prefill
        found[phase].append(policy.file_bucket(by_phase[phase], rows, query, blocks))
    return tuple(_candidates(limits, region, (), dict.fromkeys(found[region.phase])) for region in regions)


def _candidates(limits: Limits, region: Region, axes: tuple[Axis, ...], buckets: Iterable[Bucket]) -> Candidates:
    good, over = [], []
    for bucket in buckets:
        if reason := _over_budget(limits, region, bucket):
            over.append((bucket, reason))
        else:
            good.append(bucket)
    return Candidates(region, axes, tuple(good), tuple(over), _fallback(limits, region))


def _over_budget(limits: Limits, region: Region, bucket: Bucket) -> str | None:
    budget = limits.max_num_batched_tokens
    if bucket.tokens > budget:
        return f"over budget: {bucket.tokens:,} tokens exceed --max-num-batched-tokens {budget:,}"
    if bucket.rows > limits.max_num_seqs:
        return f"over budget: {bucket.rows:,} rows exceed --max-num-seqs {limits.max_num_seqs:,}"
    if bucket.longest > limits.max_model_len:
        return f"over budget: {bucket.longest:,} tokens a row exceed --max-model-len {limits.max_model_len:,}"
    if bucket.blocks > region.bounds[1]:
        return f"over budget: {bucket.blocks:,} blocks exceed the {region.bounds[1]:,} that a step can refer to"
    return None


def _fallback(limits: Limits, region: Region) -> Bucket:
    """One bucket that holds every step of the region and stays within every budget. For prompts it is flat: a rectangle
    for every mix of rows and lengths would exceed the token budget.
    """
    if region.phase == "decode":
        return region.bucket(*region.bounds)
    return Bucket.mixed(limits.max_num_batched_tokens, limits.max_rows)
