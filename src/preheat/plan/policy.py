"""The bucketing policies.

A policy sets the phases of a plan and the ranges of their bucket sizes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from preheat.configs.bucketing import DEFAULT_POLICY
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan.buckets import Bucket, Phase, StepSize
from preheat.plan.options import PlanOptions
from preheat.plan.regions import DecodeByBlocks, DecodeByLength, DecodeRegion, MixedRegion, PromptRegion, Region
from preheat.settings import Settings

Span = tuple[int, int, int]
"""A range of bucket sizes: (min, step, max)."""


class Policy(ABC):
    """The phases of a plan and the default ranges of their bucket sizes.

    ``prefill`` is the phase of steps with prompts in them; with ``mixed_steps`` such a step also holds decoding rows.
    With ``compacts`` the KV cache is defragmented. With ``pads_length`` the length of rows is part of the buckets.
    ``strategy`` spaces bucket sizes by default. ``per_doubling`` gives, by dimension, the number of exponential sizes
    in each doubling.
    """

    name: ClassVar[str]
    prefill: ClassVar[Phase]
    mixed_steps: ClassVar[bool]
    compacts: ClassVar[bool]
    pads_length: ClassVar[bool]
    strategy: ClassVar[str]
    per_doubling: ClassVar[Mapping[str, int]] = MappingProxyType({})

    @abstractmethod
    def step_size(self, rows: int, tokens: int, *, decodes: bool, longest: int = 0, blocks: int = 0) -> StepSize:
        """Return the size of a step of ``rows`` rows and ``tokens`` tokens.

        With ``decodes`` each row computes one token. ``longest`` and ``blocks`` are as in StepSize and matter only if
        the policy ``pads_length``.
        """

    @abstractmethod
    def regions(self, limits: Limits, options: PlanOptions) -> tuple[Region, ...]:
        """Return the steps that may arise within ``limits``, phase by phase.

        Raises SettingsError for bucket ranges that contradict each other.
        """

    @abstractmethod
    def default_span(self, name: str, limits: Limits, options: PlanOptions) -> Span:
        """Return the default range of a dimension such as "prompt_bs"."""

    def count(self, name: str, high: int) -> int | None:
        """Return the number of exponential sizes of a dimension up to ``high``.

        None means one a doubling.
        """
        return None

    def beyond(self, name: str, high: int, most: int) -> tuple[int, ...]:
        """Return the sizes of a dimension beyond ``high``, its usual maximum, up to ``most``.

        ``most`` is the largest size that a step can need. Returns nothing where the fallback serves such steps.
        """
        return ()

    @abstractmethod
    def file_bucket(self, region: Region, rows: int, query: int, blocks: int) -> Bucket:
        """Return the bucket of a line of a bucket file.

        The line is (rows, query, blocks); ``blocks`` is 0 if the line has none. Raises ValueError for an incomplete
        line.
        """


class UnifiedPolicy(Policy):
    """Phases decode (rows) and mixed (tokens x rows).

    Context length is not part of any program. A mixed step pays for every padding token, a decode step hardly, so mixed
    buckets lie closer: mean padding is under 5 and 10 %. Sizes lie at powers of two, their halves and quarters, where
    tiles of kernels end: 32 rows padded to 34 would do the work of 64.
    """

    name, prefill, mixed_steps, compacts, pads_length = "unified", "mixed", True, True, False
    strategy = "exponential"
    per_doubling = MappingProxyType({"prompt_seq": 8, "decode_bs": 4})

    def step_size(self, rows: int, tokens: int, *, decodes: bool, longest: int = 0, blocks: int = 0) -> StepSize:
        return StepSize("decode" if decodes else "mixed", rows, tokens)

    def regions(self, limits: Limits, options: PlanOptions) -> tuple[Region, ...]:
        rows = limits.max_rows
        return MixedRegion(limits.max_num_batched_tokens, rows, limits.max_model_len), DecodeRegion(rows)

    def default_span(self, name: str, limits: Limits, options: PlanOptions) -> Span:
        rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        strategy = options.strategy(name, self.strategy)
        spans: dict[str, Span] = {
            "prompt_seq": (8, 8 if strategy == "exponential" else max(limits.block_size, tokens // 32), tokens),
            "decode_bs": (1, min(rows, 32 if strategy == "linear" else 2), rows),
        }
        return spans[name]

    def file_bucket(self, region: Region, rows: int, query: int, blocks: int) -> Bucket:
        """``query`` counts the step's tokens."""
        return region.bucket(rows if region.phase == "decode" else query)


class SplitPolicy(Policy):
    """Phases prompt (rows x longest) and decode (rows x blocks), as in vLLM on Gaudi.

    Decode buckets are rows x longest if a ``VLLM_DECODE_SEQ_BUCKET_*`` is set. Decode buckets of equal rows are one
    program where contexts are no part of it.
    """

    name, prefill, mixed_steps, compacts, pads_length = "split", "prompt", False, False, True
    strategy = "linear"

    def step_size(self, rows: int, tokens: int, *, decodes: bool, longest: int = 0, blocks: int = 0) -> StepSize:
        if decodes:
            return StepSize("decode", rows, tokens, longest=longest, blocks=blocks)
        return StepSize("prompt", rows, tokens, longest=longest)

    def regions(self, limits: Limits, options: PlanOptions) -> tuple[Region, ...]:
        rows, blocks = limits.max_rows, limits.num_blocks - 1
        shared = rows * limits.max_blocks_per_seq if options.enable_prefix_caching else blocks
        prompts = min(rows, limits.max_num_prefill_seqs or rows)
        prompt = PromptRegion(prompts, limits.max_model_len, limits.max_num_batched_tokens)
        if not options.is_asked("decode_seq"):
            return prompt, DecodeByBlocks(rows, limits.max_blocks_per_seq, shared)
        if options.is_asked("decode_block"):
            raise SettingsError("set either VLLM_DECODE_BLOCK_BUCKET_* or VLLM_DECODE_SEQ_BUCKET_*, not both")
        return prompt, DecodeByLength(rows, limits.max_model_len, limits.block_size, blocks)

    def default_span(self, name: str, limits: Limits, options: PlanOptions) -> Span:
        """Return the defaults of vLLM on Gaudi.

        There are at most as many blocks as the cache has.
        """
        rows, block, length = limits.max_num_seqs, limits.block_size, limits.max_model_len
        step = min(rows, 2 if options.strategy(name, self.strategy) == "padding_aware" else 32)
        most = max(128, rows * limits.max_blocks_per_seq)
        spans: dict[str, Span] = {
            "prompt_bs": (1, step, min(rows, 64)),
            "prompt_seq": (block, block, length),
            "decode_bs": (1, step, rows),
            "decode_block": (block, block, min(most, limits.num_blocks - 1)),
            "decode_seq": (block, block, length),
        }
        return spans[name]

    def beyond(self, name: str, high: int, most: int) -> tuple[int, ...]:
        """Return sizes of blocks that double from ``high`` up to ``most``.

        Each row counts the blocks of a shared prefix. A step can therefore need many times the blocks of the cache.
        """
        if name != "decode_block" or high >= most:
            return ()
        return (min(2 * high, most), *self.beyond(name, 2 * high, most))

    def count(self, name: str, high: int) -> int | None:
        """Return the count of vLLM on Gaudi.

        It has one point less for the length of prompts.
        """
        return max(1, math.ceil(math.log2(high))) if name == "prompt_seq" and high > 1 else None

    def file_bucket(self, region: Region, rows: int, query: int, blocks: int) -> Bucket:
        """Return the bucket of a line.

        A prompt's blocks are its context and no part of its program here.
        """
        if region.phase == "prompt":
            return region.bucket(rows, query)
        if blocks < 1 and len(region.dimensions) > 1:
            raise ValueError("a decode bucket of the split policy is (rows, 1, blocks), blocks above 0")
        return region.bucket(rows, blocks)


POLICIES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in (UnifiedPolicy(), SplitPolicy())})


def policy_of(settings: Settings) -> Policy:
    """Return the policy of ``settings``, or the default one if none is set."""
    return policy_named(settings.bucketing_policy or DEFAULT_POLICY)


def policy_named(name: str) -> Policy:
    """Return the policy that ``bucketing_policy`` names. Raises SettingsError for an unknown name."""
    if name not in POLICIES:
        raise SettingsError(f"bucketing_policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]
