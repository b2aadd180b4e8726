"""The settings that decide what is in the plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Names and meanings are those of Settings. A part of a bucket range that is None takes the policy's default."""

    bucketing_policy: str = "unified"
    bucketing_strategy: str = "exponential"
    bucketing_from_file: str | None = None
    bucket_pad_max: int | None = None
    bucket_pad_percent: int | None = None
    prompt_bs_bucket_min: int | None = None
    prompt_bs_bucket_step: int | None = None
    prompt_bs_bucket_max: int | None = None
    prompt_seq_bucket_min: int | None = None
    prompt_seq_bucket_step: int | None = None
    prompt_seq_bucket_max: int | None = None
    decode_bs_bucket_min: int | None = None
    decode_bs_bucket_step: int | None = None
    decode_bs_bucket_max: int | None = None
    decode_block_bucket_min: int | None = None
    decode_block_bucket_step: int | None = None
    decode_block_bucket_max: int | None = None
    decode_seq_bucket_min: int | None = None
    decode_seq_bucket_step: int | None = None
    decode_seq_bucket_max: int | None = None
    allow_large_plan: bool = False
    enable_prefix_caching: bool = True
    batch_invariant: bool = True
    determinism_warmup_iterations: int = 3

    @classmethod
    def of(cls, settings: Any) -> PlanOptions:
        """The options of this class taken from the attributes of ``settings``."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def asked(self, name: str) -> tuple[int | None, int | None, int | None]:
        """The (min, step, max) asked for a dimension such as "prompt_bs"."""
        low, step, high = (getattr(self, f"{name}_bucket_{part}") for part in ("min", "step", "max"))
        return low, step, high

    def is_asked(self, name: str) -> bool:
        """Whether any part of the range of a dimension is set."""
        return any(part is not None for part in self.asked(name))
