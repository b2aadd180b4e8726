"""Which cross-checks a boot runs: their names in the plan, from settings and limits alone."""

from __future__ import annotations

from collections.abc import Collection

from preheat.backends.base import Facts, Mode
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.model.kv_scales import FP8
from preheat.plan.policy import policy_of
from preheat.settings import OPTIONS, Settings
from preheat.utils.structured import preloads_of

BEHIND_WINDOW = 8
"""How many tokens a sequence must be longer than a window, so that the window is checked."""

BEFORE_IMAGE, AFTER_IMAGE = 3, 4
"""Tokens around the image of a checked context."""


def check_names(
    settings: Settings,
    limits: Limits,
    *,
    mode: Mode,
    facts: Facts,
    pools: bool = False,
    windows: Collection[int] = (),
) -> tuple[str, ...]:
    """The checks of a boot, in order; none with ``boot_check`` off. Without invariance paths may differ, so only
    repeated runs of the same path are compared, and whether logits are finite. ``windows`` are the model's.
    """
    if settings.boot_check == "off":
        return ()
    if not settings.batch_invariant:
        return ("finite", "later run")
    longest, neighbours = context_lengths(limits, facts)[0], limits.max_num_seqs > 1
    compacts, most = policy_of(settings).compacts, (limits.num_blocks - 1) * limits.block_size
    possible = {
        "finite": True,
        "later run": True,
        "co-batched": neighbours,
        "next bucket": neighbours and settings.boot_check == "quick",
        "every bucket": neighbours and settings.boot_check == "full",
        "chunked": settings.enable_chunked_prefill and longest > 1,
        "prefix hit": settings.enable_prefix_caching and longest > limits.block_size,
        "offloaded": bool(settings.kv_offloading_size) and longest > limits.block_size,
        "decode": longest > 1,
        "poisoned": True,
        "resumed": longest > 1,
        "fp8 cache": settings.kv_cache_dtype in FP8 and longest > 1,
        "long context": settings.enable_chunked_prefill and long_context(limits, facts) is not None,
        "full step": neighbours,
        "drafts": settings.speculation is not None and longest > 1,
        "sampler": not pools,
        "logprobs": not pools,
        "pooled": pools and longest > 1,
        "embeds" if settings.enable_prompt_embeds else "images": bool(limits.image_tokens)
        and image_context(limits) <= _room(limits),
        "adapters": settings.enable_lora,
        "grammar": not pools and bool(preloads_of(settings)),
        "compaction": compacts and longest > 1 and limits.num_blocks > 2,
        "windows": not pools
        and any(window + BEHIND_WINDOW <= min(limits.max_model_len - 1, most) for window in windows),
        "eager": mode != "eager",
    }
    return tuple(name for name, can_run in possible.items() if can_run)


def context_lengths(limits: Limits, facts: Facts) -> tuple[int, ...]:
    """The lengths in tokens of the checked contexts: across a KV split, across a block or two, within one block.

    At most half of a step's tokens and half of the blocks, which leaves room for neighbours and a second copy; at
    least one token.
    """
    lengths = (facts.split + 44, 70, 5)
    longest = max(min(limits.max_model_len - 1, limits.max_num_batched_tokens // 2), 1)
    blocks = max((limits.num_blocks - 1) // 2, 1)
    return tuple(dict.fromkeys(min(length, longest, blocks * limits.block_size) for length in lengths))


def long_context(limits: Limits, facts: Facts) -> int | None:
    """The length in tokens of a context of three KV splits, the least whose merge has an order; None if no sequence
    can have it.
    """
    length = 2 * facts.split + 44
    fits = length < limits.max_model_len and -(-length // limits.block_size) < limits.num_blocks
    return length if fits else None


def image_context(limits: Limits) -> int:
    """The length in tokens of a context with one image, or one piece of embeddings."""
    return BEFORE_IMAGE + limits.image_tokens + AFTER_IMAGE


def _room(limits: Limits) -> int:
    """The most tokens of a sequence of which there can be two."""
    return min(limits.max_model_len - 1, (limits.num_blocks - 1) // 2 * limits.block_size)


def check_required(settings: Settings) -> None:
    """Raise SettingsError, naming all settings that make ``require_invariance`` impossible."""
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
