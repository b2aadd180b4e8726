"""The candidates of each phase: every bucket that the options ask for."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan.bucket_file import parse_bucket_file
from preheat.plan.bucket_sizes import bucket_sizes
from preheat.plan.buckets import Bucket, Phase
from preheat.plan.options import DIMENSIONS, PlanOptions
from preheat.plan.policy import Policy, Span, policy_named
from preheat.plan.regions import Dimension, Region, VerifyRegion
from preheat.utils.files import read_text, shown, why_unread

logger = logging.getLogger(__name__)

MAX_CANDIDATES = 1_000_000


@dataclass(frozen=True)
class Axis:
    """One dimension of a phase, with its range and bucket sizes.

    The range is (min, step, max) within the limits. ``strategy`` spaces the sizes; ``knob`` is the prefix of the
    variables that set the range.
    """

    label: str
    knob: str
    low: int
    step: int
    high: int
    values: tuple[int, ...]
    strategy: str


@dataclass(frozen=True)
class Candidates:
    """A phase before its dispatcher is built.

    ``over`` are the buckets that exceed a limit, each with the reason.
    """

    region: Region
    axes: tuple[Axis, ...]
    buckets: tuple[Bucket, ...]
    over: tuple[tuple[Bucket, str], ...]
    fallback: Bucket

    @property
    def phase(self) -> Phase:
        return self.region.phase


def candidates(limits: Limits, options: PlanOptions) -> tuple[Candidates, ...]:
    """Return every bucket that the options ask for, phase by phase.

    Warn of ranges without effect. Raises SettingsError, with the change to make, for a policy, strategy or range that
    makes no sense.
    """
    if limits.num_blocks < 2:
        raise SettingsError(
            f"a KV cache of {limits.num_blocks} blocks holds nothing: at least 2 are needed, as one of them is for "
            "padding"
        )
    policy = policy_named(options.bucketing_policy)
    regions = policy.regions(limits, options)
    if options.bucketing_strategy == "file" and options.bucketing_from_file is None:
        raise SettingsError("--bucketing-strategy file needs the file: give --bucketing-from-file too")
    _warn_of_unused(options, regions, policy)
    if options.bucketing_from_file is not None:
        named = _from_file(limits, regions, Path(options.bucketing_from_file), policy)
        return _with_drafts(limits, options, named)
    return _with_drafts(limits, options, tuple(_from_sizes(limits, options, region, policy) for region in regions))


def _with_drafts(limits: Limits, options: PlanOptions, phases: tuple[Candidates, ...]) -> tuple[Candidates, ...]:
    """Return ``phases`` and, if anything drafts, the verify phase.

    Its buckets are the rows of decode buckets by width.
    """
    if not options.verify_widths:
        return phases
    if options.verify_widths[-1] > limits.max_num_batched_tokens:
        raise SettingsError(
            f"a row of {options.verify_widths[-1]} tokens, drafts included, exceeds max_num_batched_tokens "
            f"{limits.max_num_batched_tokens}: lower num_speculative_tokens, or raise max_num_batched_tokens",
            param="num_speculative_tokens",
        )
    decode = next(phase for phase in phases if phase.phase == "decode")
    region = VerifyRegion(limits.max_rows, options.verify_widths, limits.max_num_batched_tokens)
    rows = sorted({bucket.rows for bucket in decode.buckets} | {limits.max_rows})
    buckets = (region.bucket(size, width) for size in rows for width in region.widths)
    return (*phases, _candidates(limits, region, decode.axes, buckets))


def _warn_of_unused(options: PlanOptions, regions: Sequence[Region], policy: Policy) -> None:
    """Warn of bucket settings that the plan cannot follow."""
    if options.bucketing_from_file is not None and options.bucketing_strategy not in ("auto", "file"):
        logger.warning("bucketing strategy %s has no effect: a file names the buckets", options.bucketing_strategy)
    used = {dimension.name for region in regions for dimension in region.dimensions}
    for name in DIMENSIONS:
        what, pads = f"VLLM_{name.upper()}_BUCKET_*", options.pads(name) != (None, None)
        if not options.is_asked(name) and not pads:
            continue
        if options.bucketing_from_file is not None:
            logger.warning("%s has no effect: --bucketing-from-file names the buckets", what)
        elif name not in used and options.is_asked(name):
            context = "the length of contexts is not part of a program; " if name.startswith("decode") else ""
            logger.warning("%s has no effect: %s%s buckets are %s", what, context, policy.name, _sizes_of(regions))
        elif name in used and pads and options.strategy(name, policy.strategy) != "padding_aware":
            logger.warning("%s: its padding has no effect: only padding_aware sizes have padding", what)


def _sizes_of(regions: Sequence[Region]) -> str:
    return ", ".join(f"{region.phase} by {' and '.join(d.label for d in region.dimensions)}" for region in regions)


def coarser(axes: Sequence[Axis]) -> str:
    """Return the advice for fewer buckets.

    It is to raise the step of the dimension with the most sizes.
    """
    axis = max(axes, key=lambda axis: len(axis.values))
    return f"raise {axis.knob}_STEP (now {axis.step}, for {len(axis.values):,} sizes)"


def _from_sizes(limits: Limits, options: PlanOptions, region: Region, policy: Policy) -> Candidates:
    """Return the product of the bucket sizes of the region's dimensions."""
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
    if asked[2] is None:
        high = max(low, high)
    try:
        bucket_sizes("linear", low, step, high)  # checks the range as given; steps do not go beyond ``bound``
        if not dimension.by_row:
            low, high = min(low, bound), min(high, bound)
        values = _values(options, policy, name, (low, step, high))
        if asked[2] is None:
            values += policy.beyond(name, values[-1], bound)
    except SettingsError as error:
        message = f"{knob}_MIN, _STEP and _MAX are {low}, {step} and {high}: {error.message}"
        if not options.skip_warmup:
            raise SettingsError(f"{message}, or skip warm-up (VLLM_SKIP_WARMUP=true)") from None
        logger.warning("%s; the defaults are used, as warm-up is skipped", message)
        low, step, high = defaults
        values = _values(options, policy, name, defaults)
    return Axis(dimension.label, knob, low, step, high, values, options.strategy(name, policy.strategy))


def _values(options: PlanOptions, policy: Policy, name: str, span: Span) -> tuple[int, ...]:
    strategy = options.strategy(name, policy.strategy)
    more: dict[str, Any] = {}
    if strategy == "exponential":
        per_doubling = policy.per_doubling.get(name)
        more = {"per_doubling": per_doubling, "count": None if per_doubling else policy.count(name, span[2])}
    elif strategy == "padding_aware":
        more = dict(zip(("pad_max", "pad_percent"), options.pads(name), strict=True))
    return bucket_sizes(strategy, *span, **more)


def _from_file(limits: Limits, regions: tuple[Region, ...], path: Path, policy: Policy) -> tuple[Candidates, ...]:
    """Return the candidates of a bucket file.

    Its lines are ``(rows, query)`` or ``(rows, query, blocks)``. A query of 1 is a decode bucket. Lines that cannot be
    a bucket are skipped with a warning.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--bucketing-from-file {shown(path)} cannot be read: {why_unread(error)}") from None
    found: dict[Phase, list[Bucket]] = {region.phase: [] for region in regions}
    by_phase = {region.phase: region for region in regions}
    for line in parse_bucket_file(text, str(path)):
        rows, query, blocks = (*line, 0)[:3]
        phase: Phase = "decode" if query == 1 else policy.prefill
        try:
            if rows < 1 or query < 1:
                raise ValueError("rows and query must be at least 1")
            found[phase].append(policy.file_bucket(by_phase[phase], rows, query, blocks))
        except ValueError as error:
            logger.warning("%s: bucket %s is skipped: %s", path, line, error)
    made = tuple(_candidates(limits, region, (), found[region.phase]) for region in regions)
    for bucket, reason in (entry for phase in made for entry in phase.over):
        logger.warning("%s: bucket %s is dropped: %s", path, bucket, reason)
    return made


def _candidates(limits: Limits, region: Region, axes: tuple[Axis, ...], buckets: Iterable[Bucket]) -> Candidates:
    good, over = [], []
    for bucket in dict.fromkeys(buckets):
        if reason := _over_budget(limits, bucket):
            over.append((bucket, reason))
        else:
            good.append(bucket)
    return Candidates(region, axes, tuple(good), tuple(over), _fallback(limits, region))


def _over_budget(limits: Limits, bucket: Bucket) -> str | None:
    """Return the reason why a bucket exceeds the token budget.

    Its region has bounded each size by itself.
    """
    budget = limits.max_num_batched_tokens
    if bucket.tokens > budget:
        return f"over budget: {bucket.tokens:,} tokens exceed --max-num-batched-tokens {budget:,}"
    return None


def _fallback(limits: Limits, region: Region) -> Bucket:
    """Return one bucket that holds every step of the region.

    It stays within every budget. For prompts it is flat: a rectangle for every mix of rows and lengths would exceed the
    token budget.
    """
    if region.phase == "decode":
        return region.bucket(*region.bounds)
    return Bucket.mixed(limits.max_num_batched_tokens, limits.max_rows)
