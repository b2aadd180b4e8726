"""The two policies: which phases there are, what their ladders are, and the candidates that respect every budget.

``split`` has the phases prompt (rows x longest) and decode (rows x blocks, or rows x longest where a
``VLLM_DECODE_SEQ_BUCKET_*`` is set), as bucketing in vLLM on Gaudi. ``unified`` has decode (rows) and mixed
(tokens x rows): context length is no part of any program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan.bucket_file import parse_bucket_file
from preheat.plan.bucket_sizes import ladder
from preheat.plan.buckets import Bucket, Phase
from preheat.plan.options import PlanOptions
from preheat.plan.regions import DecodeByBlocks, DecodeByLength, DecodeNeeds, MixedNeeds, PromptNeeds, Region

PER_DOUBLING = {"prompt_seq": 8, "prompt_bs": 1, "decode_bs": 4}
"""Values from one doubling to the next in the unified policy's exponential ladders: a mixed step pays for every token
that pads, a decoding one hardly. Mean padding stays under 5 and 10 %. They lie where tiles of kernels end, at powers of
two and their halves and quarters: 32 rows that are padded to 34 do the work of 64, 190 padded to 196 that of 256.
"""

MAX_CANDIDATES = 1_000_000

POLICIES = ("unified", "split")


@dataclass(frozen=True)
class Axis:
    """One dimension of a phase: the range (min, step, max) as it is used, and the ladder that it gives.

    ``knob`` begins the names of the variables that set it.
    """

    label: str
    knob: str
    low: int
    step: int
    high: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Candidates:
    """A phase before its table is built: ``over`` are the shapes that break a budget, with the budget's name."""

    region: Region
    axes: tuple[Axis, ...]
    shapes: tuple[Bucket, ...]
    over: tuple[tuple[Bucket, str], ...]
    fallback: Bucket

    @property
    def phase(self) -> Phase:
        return self.region.phase


def candidates(limits: Limits, options: PlanOptions) -> tuple[Candidates, ...]:
    """Every shape that the options ask for, phase by phase, within ``limits``.

    Raises SettingsError for a policy, strategy or range that makes no sense, saying what to change.
    """
    if options.bucketing_policy not in POLICIES:
        raise SettingsError(f"bucketing_policy must be one of {', '.join(POLICIES)}, got {options.bucketing_policy!r}")
    if limits.num_blocks < 2:
        raise SettingsError(
            f"a cache of {limits.num_blocks} blocks holds nothing: at least 2 are needed, one of them pads"
        )
    regions = _unified_regions(limits) if options.bucketing_policy == "unified" else _split_regions(limits, options)
    _refuse_unused(options)
    if (options.bucketing_strategy == "file") != (options.bucketing_from_file is not None):
        raise SettingsError("--bucketing-strategy file and --bucketing-from-file belong together: give both or none")
    if options.bucketing_from_file is not None:
        return _from_file(limits, regions, Path(options.bucketing_from_file), options.bucketing_policy)
    return tuple(_from_ladders(limits, options, region) for region in regions)


def _unified_regions(limits: Limits) -> tuple[Region, ...]:
    rows = max_rows(limits)
    return MixedNeeds(limits.max_num_batched_tokens, rows, limits.max_model_len), DecodeNeeds(rows)


def _split_regions(limits: Limits, options: PlanOptions) -> tuple[Region, ...]:
    rows, blocks = max_rows(limits), limits.num_blocks - 1
    shared = rows * limits.max_blocks_per_seq if options.enable_prefix_caching else blocks
    prompts = min(rows, limits.max_num_prefill_seqs or rows)
    prompt = PromptNeeds(prompts, limits.max_model_len, limits.max_num_batched_tokens)
    if any(part is not None for part in options.asked("decode_seq")):
        return prompt, DecodeByLength(rows, limits.max_model_len, limits.block_size, blocks)
    return prompt, DecodeByBlocks(rows, limits.max_blocks_per_seq, shared)


def max_rows(limits: Limits) -> int:
    """The most rows of a step: each takes a token of the budget, and a block for it that nobody else has."""
    return min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_blocks - 1)


def _refuse_unused(options: PlanOptions) -> None:
    """A range for a dimension that the policy does not have is refused, not ignored."""
    asked = {name: any(part is not None for part in options.asked(name)) for name in ("decode_block", "decode_seq")}
    for name, given in asked.items():
        if given and options.bucketing_policy == "unified":
            raise SettingsError(
                f"VLLM_{name.upper()}_BUCKET_* needs --bucketing-policy split: unified decode is by rows alone"
            )
    if all(asked.values()):
        raise SettingsError("set either VLLM_DECODE_BLOCK_BUCKET_* or VLLM_DECODE_SEQ_BUCKET_*, not both")


def _from_ladders(limits: Limits, options: PlanOptions, region: Region) -> Candidates:
    axes = tuple(
        _axis(limits, options, region, axis, bound)
        for axis, bound in zip(region.axes, region.bounds, strict=True)
        if not (isinstance(region, DecodeNeeds) and axis == "blocks")
    )
    values = [axis.values for axis in axes]
    count = math.prod(map(len, values))
    if count > MAX_CANDIDATES:
        raise SettingsError(f"{count:,} {region.phase} buckets are too many to plan: {coarser(axes)}")
    return _candidates(limits, region, axes, (_shape(region, pair) for pair in itertools.product(*values)))


def coarser(axes: Sequence[Axis]) -> str:
    """What to change for fewer buckets: the step of the dimension with the most sizes."""
    axis = max(axes, key=lambda axis: len(axis.values))
    return f"raise {axis.knob}_STEP (now {axis.step}, which makes {len(axis.values):,} sizes)"


def _axis(limits: Limits, options: PlanOptions, region: Region, field: str, bound: int) -> Axis:
    name, label = _dimension(region, field)
    asked = options.asked(name)
    defaults = _defaults(limits, options, region, name)
    low, step, high = (given if given is not None else usual for given, usual in zip(asked, defaults, strict=True))
    if asked[0] is None:
        low = min(low, high)
    try:
        # What the range asks for is checked as it stands; then no value above what a step can need is any use.
        ladder("linear", low, step, high)
        low, high = min(low, bound), min(high, bound)
        values = _values(options, name, (low, step, high))
    except SettingsError as error:
        raise SettingsError(f"VLLM_{name.upper()}_BUCKET_{{MIN,STEP,MAX}}: {error.message}") from None
    return Axis(label, f"VLLM_{name.upper()}_BUCKET", low, step, high, values)


def _dimension(region: Region, field: str) -> tuple[str, str]:
    """The settings' name of an axis, and its label in the log."""
    if region.phase == "decode":
        names = {"rows": ("decode_bs", "bs"), "blocks": ("decode_block", "block"), "longest": ("decode_seq", "seq")}
    else:
        names = {"rows": ("prompt_bs", "bs"), "longest": ("prompt_seq", "seq"), "tokens": ("prompt_seq", "tokens")}
    return names[field]


def _values(options: PlanOptions, name: str, span: tuple[int, int, int]) -> tuple[int, ...]:
    """The ladder over ``span``: (min, step, max)."""
    strategy = options.bucketing_strategy
    dense = strategy == "exponential" and options.bucketing_policy == "unified"
    return ladder(
        strategy,
        *span,
        per_doubling=PER_DOUBLING[name] if dense else None,
        pad_max=options.bucket_pad_max,
        pad_percent=options.bucket_pad_percent,
    )


def _defaults(limits: Limits, options: PlanOptions, region: Region, name: str) -> tuple[int, int, int]:
    """(min, step, max): those of vLLM on Gaudi for split (batch steps of 32 are for its linear ladders), our own for
    unified.
    """
    rows, block, tokens = limits.max_num_seqs, limits.block_size, limits.max_num_batched_tokens
    step = min(rows, 32 if options.bucketing_strategy == "linear" else 2)
    if options.bucketing_policy == "unified":
        if region.phase == "mixed":
            exponential = options.bucketing_strategy == "exponential"
            return {
                "prompt_seq": (8, 8 if exponential else max(block, tokens // 32), tokens),
                "prompt_bs": (rows, rows, rows),  # they size index arrays and no arithmetic
            }[name]
        return 1, step, rows
    blocks = limits.max_num_seqs * limits.max_blocks_per_seq
    return {
        "prompt_bs": (1, step, min(rows, 64)),
        "prompt_seq": (block, block, limits.max_model_len),
        "decode_bs": (1, step, rows),
        "decode_block": (block, block, max(128, blocks)),
        "decode_seq": (block, block, limits.max_model_len),
    }[name]


def _shape(region: Region, pair: tuple[int, ...]) -> Bucket:
    if region.phase == "prompt":
        return Bucket.prompt(*pair)
    if region.phase == "mixed":
        return Bucket.mixed(*pair)
    if len(pair) == 1:
        return Bucket.decode(pair[0])
    return Bucket.decode(pair[0], **{region.axes[1]: pair[1]})


def _candidates(limits: Limits, region: Region, axes: tuple[Axis, ...], shapes: Iterable[Bucket]) -> Candidates:
    good, over = [], []
    for shape in shapes:
        reason = _over_budget(limits, region, shape)
        if reason:
            over.append((shape, reason))
        else:
            good.append(shape)
    return Candidates(region, axes, tuple(good), tuple(over), _fallback(limits, region))


def _over_budget(limits: Limits, region: Region, shape: Bucket) -> str | None:
    if shape.tokens > limits.max_num_batched_tokens:
        return f"over budget: {shape.tokens:,} tokens exceed --max-num-batched-tokens {limits.max_num_batched_tokens:,}"
    if shape.rows > limits.max_num_seqs:
        return f"over budget: {shape.rows:,} rows exceed --max-num-seqs {limits.max_num_seqs:,}"
    if shape.longest > limits.max_model_len:
        return f"over budget: {shape.longest:,} tokens a row exceed --max-model-len {limits.max_model_len:,}"
    if shape.blocks > region.bounds[1]:
        return f"over budget: {shape.blocks:,} blocks exceed the {region.bounds[1]:,} that a step can refer to"
    return None


def _fallback(limits: Limits, region: Region) -> Bucket:
    """One shape that holds every need of the region and stays within every budget.

    For prompts it is flat: a rectangle that held every mix of rows and lengths would exceed the token budget.
    """
    if isinstance(region, DecodeByBlocks):
        return Bucket.decode(region.bounds[0], blocks=region.bounds[1])
    if isinstance(region, DecodeByLength):
        return Bucket.decode(region.bounds[0], longest=region.bounds[1])
    if region.phase == "decode":
        return Bucket.decode(region.bounds[0])
    return Bucket.mixed(limits.max_num_batched_tokens, max_rows(limits))


def _from_file(limits: Limits, regions: tuple[Region, ...], path: Path, policy: str) -> tuple[Candidates, ...]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--bucketing-from-file {path} cannot be read: {error}") from None
    found: dict[Phase, list[Bucket]] = {region.phase: [] for region in regions}
    by_phase = {region.phase: region for region in regions}
    prefill: Phase = "mixed" if policy == "unified" else "prompt"
    for bucket in parse_bucket_file(text, str(path)):
        phase: Phase = "decode" if bucket[1] == 1 else prefill
        found[phase].append(_file_shape(by_phase[phase], bucket, policy))
    return tuple(_candidates(limits, region, (), dict.fromkeys(found[region.phase])) for region in regions)


def _file_shape(region: Region, bucket: tuple[int, ...], policy: str) -> Bucket:
    """``(rows, query)`` or ``(rows, query, blocks)``: a query of 1 decodes; unified counts the step's tokens in query.

    The blocks of a prompt are the context that it attends to, which is no part of its program here.
    """
    rows, query, *blocks = bucket
    if rows < 1 or query < 1:
        raise SettingsError(f"bucket {bucket}: rows and query must be at least 1")
    if region.phase == "mixed":
        return Bucket.mixed(query, rows)
    if region.phase == "prompt":
        return Bucket.prompt(rows, query)
    if policy == "unified":
        return Bucket.decode(rows)
    if not blocks or blocks[0] < 1:
        raise SettingsError(
            f"bucket {bucket}: under the split policy a decode bucket is (rows, 1, blocks), blocks above 0"
        )
    return Bucket.decode(rows, **{region.axes[1]: blocks[0]})
