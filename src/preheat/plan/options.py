"""The settings that decide what is in the plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from preheat.backends.base import Facts
from preheat.utils.speculation import WITH_MODEL
from preheat.utils.structured import preloads_of

DIMENSIONS = ("prompt_bs", "prompt_seq", "decode_bs", "decode_block", "decode_seq")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Names and meanings are those of Settings. A part of a bucket range that is None takes the policy's default.

    ``pads_context`` and ``host_sampler`` are no settings but facts of the backend. ``verify_widths`` are the tokens of
    a row that steps with drafts are padded to; none: nothing drafts. With ``draft_model`` a model or a head does; with
    ``measures_drafts`` steps are timed, to choose how many tokens are drafted.
    ``grammars`` are the names of those that the boot compiles. With ``pools`` nothing is drawn from hidden states.
    """

    bucketing_policy: str = "unified"
    bucketing_strategy: str = "auto"
    bucketing_from_file: str | None = None
    bucket_pad_max: int | None = None
    bucket_pad_percent: int | None = None
    prompt_bs_bucket_min: int | None = None
    prompt_bs_bucket_step: int | None = None
    prompt_bs_bucket_max: int | None = None
    prompt_bs_bucket_pad_max: int | None = None
    prompt_bs_bucket_pad_percent: int | None = None
    prompt_seq_bucket_min: int | None = None
    prompt_seq_bucket_step: int | None = None
    prompt_seq_bucket_max: int | None = None
    prompt_seq_bucket_pad_max: int | None = None
    prompt_seq_bucket_pad_percent: int | None = None
    decode_bs_bucket_min: int | None = None
    decode_bs_bucket_step: int | None = None
    decode_bs_bucket_max: int | None = None
    decode_bs_bucket_pad_max: int | None = None
    decode_bs_bucket_pad_percent: int | None = None
    decode_block_bucket_min: int | None = None
    decode_block_bucket_step: int | None = None
    decode_block_bucket_max: int | None = None
    decode_block_bucket_pad_max: int | None = None
    decode_block_bucket_pad_percent: int | None = None
    decode_seq_bucket_min: int | None = None
    decode_seq_bucket_step: int | None = None
    decode_seq_bucket_max: int | None = None
    decode_seq_bucket_pad_max: int | None = None
    decode_seq_bucket_pad_percent: int | None = None
    allow_large_plan: bool = False
    skip_warmup: bool = False
    enable_prefix_caching: bool = True
    batch_invariant: bool = True
    determinism_warmup_iterations: int = 3
    pads_context: bool = True
    host_sampler: bool = False
    verify_widths: tuple[int, ...] = ()
    draft_model: bool = False
    measures_drafts: bool = False
    grammars: tuple[str, ...] = ()
    pools: bool = False
    enable_lora: bool = False
    kv_offloading_size: float | None = None

    @classmethod
    def of(cls, settings: Any, facts: Facts, *, pools: bool = False) -> PlanOptions:
        """The options of this class taken from the attributes of ``settings``, for the backend of ``facts``."""
        speculates = settings.speculation
        told: dict[str, Any] = {
            "host_sampler": facts.host_sampler,
            "pads_context": facts.pads_context,
            "verify_widths": speculates.widths if speculates else (),
            "draft_model": speculates is not None and speculates.method in WITH_MODEL,
            "measures_drafts": speculates is not None and speculates.auto,
        }
        told["grammars"] = () if pools else tuple(preloads_of(settings))
        told["pools"] = pools
        return cls(
            **told, **{field.name: getattr(settings, field.name) for field in fields(cls) if field.name not in told}
        )

    def asked(self, name: str) -> tuple[int | None, int | None, int | None]:
        """The (min, step, max) asked for a dimension such as "prompt_bs"."""
        low, step, high = (getattr(self, f"{name}_bucket_{part}") for part in ("min", "step", "max"))
        return low, step, high

    def is_asked(self, name: str) -> bool:
        """Whether any part of the range of a dimension is set."""
        return any(part is not None for part in self.asked(name))

    def pads(self, name: str) -> tuple[int | None, int | None]:
        """The (pad_max, pad_percent) asked for a dimension, or for all of them."""
        pad_max, percent = getattr(self, f"{name}_bucket_pad_max"), getattr(self, f"{name}_bucket_pad_percent")
        return (
            self.bucket_pad_max if pad_max is None else pad_max,
            self.bucket_pad_percent if percent is None else percent,
        )

    def strategy(self, name: str, usual: str) -> str:
        """The strategy of a dimension: the one that is set; else that to which its own settings belong, else
        ``usual``.
        """
        if self.bucketing_strategy != "auto":
            return self.bucketing_strategy
        if self.pads(name) != (None, None):
            return "padding_aware"
        return "linear" if self.is_asked(name) else usual
