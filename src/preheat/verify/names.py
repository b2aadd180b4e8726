"""Which cross-checks a boot runs: their names in the plan, from settings and limits alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from preheat.backends.base import Facts, Mode
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.plan.policy import policy_named
from preheat.settings import OPTIONS, Settings


@dataclass(frozen=True)
class CheckOptions:
    """What determines which checks run."""

    settings: Settings
    limits: Limits
    mode: Mode
    lengths: tuple[int, ...]


CHECKS: Mapping[str, Callable[[CheckOptions], bool]] = MappingProxyType(
    {
        "later run": lambda given: True,
        "co-batched": lambda given: given.limits.max_num_seqs > 1,
        "next bucket": lambda given: given.limits.max_num_seqs > 1 and given.settings.boot_check == "quick",
        "every bucket": lambda given: given.limits.max_num_seqs > 1 and given.settings.boot_check == "full",
        "chunked": lambda given: given.settings.enable_chunked_prefill and given.lengths[0] > 1,
        "prefix hit": lambda given: given.settings.enable_prefix_caching and given.lengths[0] > given.limits.block_size,
        "decode": lambda given: given.lengths[0] > 1,
        "compaction": lambda given: (
            policy_named(given.settings.bucketing_policy).compacts
            and given.lengths[0] > 1
            and given.limits.num_blocks > 2
        ),
        "eager": lambda given: given.mode != "eager",
    }
)
"""Every check, and whether it can run: a lone slot has no neighbours, what is not captured or compiled is eager."""


def check_names(settings: Settings, limits: Limits, mode: Mode, facts: Facts) -> tuple[str, ...]:
    """The checks of a boot, in their order; none with ``boot_check`` off. Without invariance paths may differ, and the
    same path again is all that is compared.
    """
    if settings.boot_check == "off":
        return ()
    if not settings.batch_invariant:
        return ("later run",)
    options = CheckOptions(settings, limits, mode, context_lengths(limits, facts))
    return tuple(name for name, runs in CHECKS.items() if runs(options))


def context_lengths(limits: Limits, facts: Facts) -> tuple[int, ...]:
    """Tokens of the contexts that are checked: across a KV split, across a block or two, and within one.

    All within the limits: half a step's tokens and half of the blocks at most, so that there is room for neighbours and
    for a second copy; one token at least.
    """
    lengths = (facts.split + 44, 70, 5)
    longest = max(min(limits.max_model_len - 1, limits.max_num_batched_tokens // 2), 1)
    blocks = max((limits.num_blocks - 1) // 2, 1)
    return tuple(dict.fromkeys(min(length, longest, blocks * limits.block_size) for length in lengths))


def check_required(settings: Settings) -> None:
    """Raise SettingsError, naming them all, for settings with which ``require_invariance`` cannot be kept."""
    if not settings.require_invariance:
        return
    loose = {
        "batch_invariant": not settings.batch_invariant and "lets bits depend on what shares a batch",
        "boot_check": settings.boot_check == "off" and "leaves it unproved",
        "skip_warmup": settings.skip_warmup and "skips the proof with the rest of the warm-up",
    }
    found = [
        f"{OPTIONS[name].flag} {str(getattr(settings, name)).lower()} {reason}"
        for name, reason in loose.items()
        if reason
    ]
    if found:
        raise SettingsError(f"require_invariance refuses to start: {'; '.join(found)}", param="require_invariance")
