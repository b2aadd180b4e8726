"""The settings that decide the contents of the plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from preheat.backends.base.facts import Facts
from preheat.configs.speculation import WITH_WEIGHTS
from preheat.configs.structured import preloads_of
from preheat.plan.functions import Function
from preheat.settings.warm_up import BucketSettings

DIMENSIONS = ("prompt_bs", "prompt_seq", "decode_bs", "decode_block", "decode_seq")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(BucketSettings):
    """The settings of a plan, with the names and meanings of Settings.

    A part of a bucket range that is None takes the policy's default. ``pads_context`` and ``host_sampler`` are no
    settings but facts of the backend. ``verify_widths`` are the padded tokens of a row in a verify step; empty if
    nothing drafts. With ``draft_model`` a model or a head drafts. With ``measures_drafts`` steps are timed, to choose
    how many tokens are drafted. ``grammars`` are the names of the grammars that the boot compiles, ``functions`` the
    functions of layers. With ``pools`` nothing is drawn from hidden states.
    """

    bucketing_policy: str = "unified"
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
    functions: tuple[Function, ...] = ()
    enable_lora: bool = False
    kv_offloading_size: float | None = None

    @classmethod
    def of(
        cls, settings: Any, facts: Facts, *, pools: bool = False, functions: tuple[Function, ...] = ()
    ) -> PlanOptions:
        """Return the options taken from the attributes of ``settings``, for the backend of ``facts``."""
        speculates = settings.speculation
        told: dict[str, Any] = {
            "host_sampler": facts.host_sampler,
            "pads_context": facts.pads_context,
            "verify_widths": speculates.widths if speculates else (),
            "draft_model": speculates is not None and speculates.method in WITH_WEIGHTS,
            "measures_drafts": speculates is not None and speculates.auto,
        }
        told["grammars"] = () if pools else tuple(preloads_of(settings))
        told["pools"], told["functions"] = pools, functions
        return cls(
            **told, **{field.name: getattr(settings, field.name) for field in fields(cls) if field.name not in told}
        )

    def asked(self, name: str) -> tuple[int | None, int | None, int | None]:
        """Return the (min, step, max) asked for a dimension such as "prompt_bs"."""
        low, step, high = (getattr(self, f"{name}_bucket_{part}") for part in ("min", "step", "max"))
        return low, step, high

    def is_asked(self, name: str) -> bool:
        """Whether any part of the range of a dimension is set."""
        return any(part is not None for part in self.asked(name))

    def pads(self, name: str) -> tuple[int | None, int | None]:
        """Return the (pad_max, pad_percent) asked for a dimension, or for all of them."""
        pad_max, percent = getattr(self, f"{name}_bucket_pad_max"), getattr(self, f"{name}_bucket_pad_percent")
        return (
            self.bucket_pad_max if pad_max is None else pad_max,
            self.bucket_pad_percent if percent is None else percent,
        )

    def strategy(self, name: str, usual: str) -> str:
        """Return the strategy of a dimension.

        It is the strategy that is set, else the one to which the dimension's own settings belong, else ``usual``.
        """
        if self.bucketing_strategy != "auto":
            return self.bucketing_strategy
        if self.pads(name) != (None, None):
            return "padding_aware"
        return "linear" if self.is_asked(name) else usual
