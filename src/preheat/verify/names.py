"""The names of a boot's cross-checks in the plan, from settings and limits alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from preheat.backends.base.facts import Facts, Mode
from preheat.configs.structured import preloads_of
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.model.kv_scales import FP8
from preheat.plan.policy import policy_of
from preheat.settings import OPTIONS, Settings

BEHIND_WINDOW = 8
"""The least tokens of a sequence beyond a checked window."""

READ = 5
"""Tokens that a check of windows reads in one step, where they do not decode."""

BEFORE_IMAGE, AFTER_IMAGE = 3, 4
"""Tokens around the image of a checked context."""


class Asked(NamedTuple):
    """The facts that decide the checks of an engine.

    ``windows`` are the model's; ``pools``: it has no head. ``encodes``: each text is read in one step.
    ``states``: layers keep a state of each sequence.
    """

    settings: Settings
    limits: Limits
    mode: Mode
    facts: Facts
    pools: bool
    windows: Collection[int]
    encodes: bool = False
    states: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return context_lengths(self.limits, self.facts)[0]

    @property
    def neighbours(self) -> bool:
        return self.limits.max_num_seqs > 1

    @property
    def room(self) -> int:
        """Number of tokens that all blocks hold."""
        return self.limits.columns * self.limits.block_size

    @property
    def images(self) -> bool:
        """Whether an image fits into a checked context.

        A piece of embeddings counts as one. The cache must hold two such sequences.
        """
        return bool(self.limits.image_tokens) and image_context(self.limits) <= _room(self.limits)

    @property
    def windowed(self) -> bool:
        """Whether a sequence can be longer than a window."""
        most = min(self.limits.max_model_len - 1, self.room)
        return any(window + BEHIND_WINDOW <= most for window in self.windows)


class Check(NamedTuple):
    """A check, and whether an engine runs it."""

    name: str
    needs: Callable[[Asked], object] = lambda asked: True


CHECKS: tuple[Check, ...] = (
    Check("finite"),
    Check("later run"),
    Check("co-batched", lambda asked: asked.neighbours),
    Check("next bucket", lambda asked: asked.neighbours and asked.settings.boot_check == "quick"),
    Check("every bucket", lambda asked: asked.neighbours and asked.settings.boot_check == "full"),
    Check("chunked", lambda asked: asked.settings.enable_chunked_prefill and asked.longest > 1),
    Check("prefix hit", lambda asked: asked.settings.enable_prefix_caching and asked.longest > asked.limits.block_size),
    Check("offloaded", lambda asked: asked.settings.kv_offloading_size and asked.longest > asked.limits.block_size),
    Check("decode", lambda asked: asked.longest > 1 and not asked.encodes),
    Check("poisoned"),
    Check("states", lambda asked: asked.states and asked.settings.enable_chunked_prefill and asked.neighbours),
    Check("resumed", lambda asked: asked.longest > 1),
    Check("fp8 cache", lambda asked: asked.settings.kv_cache_dtype in FP8 and asked.longest > 1
          and not asked.encodes),
    Check("long context", lambda asked: asked.settings.enable_chunked_prefill
          and long_context(asked.limits, asked.facts) is not None),
    Check("full step", lambda asked: asked.neighbours),
    Check("drafts", lambda asked: asked.settings.speculation is not None and asked.longest > 1),
    Check("sampler", lambda asked: not asked.pools),
    Check("logprobs", lambda asked: not asked.pools),
    Check("pooled", lambda asked: asked.pools and asked.longest > 1 and not asked.encodes),
    Check("whole texts", lambda asked: asked.encodes and asked.neighbours),
    Check("embeds", lambda asked: asked.images and asked.settings.enable_prompt_embeds),
    Check("images", lambda asked: asked.images and not asked.settings.enable_prompt_embeds),
    Check("adapters", lambda asked: asked.settings.enable_lora),
    Check("grammar", lambda asked: not asked.pools and preloads_of(asked.settings)),
    Check("compaction", lambda asked: policy_of(asked.settings).compacts and asked.longest > 1
          and asked.limits.columns > 1 and not asked.encodes),
    Check("windows", lambda asked: not asked.pools and asked.windowed),
    Check("given back", lambda asked: not asked.pools and given_back_ends(asked.limits)),
    Check("eager", lambda asked: asked.mode not in ("eager", "llvm")),
)  # fmt: skip
"""The checks in the order in which they run; :data:`preheat.verify.boot.CHECKS` has their functions."""


def check_names(
    settings: Settings,
    limits: Limits,
    *,
    mode: Mode,
    facts: Facts,
    pools: bool = False,
    windows: Collection[int] = (),
    encodes: bool = False,
    states: bool = False,
) -> tuple[str, ...]:
    """Return the checks of a boot, in order; none with ``boot_check`` off.

    Without invariance paths may differ, so the boot only checks that logits are finite and compares repeated runs of
    the same path. ``windows`` are the model's.
    """
    if settings.boot_check == "off":
        return ()
    if not settings.batch_invariant:
        return ("finite", "later run")
    asked = Asked(settings, limits, mode, facts, pools, windows, encodes, states)
    return tuple(check.name for check in CHECKS if check.needs(asked))


def context_lengths(limits: Limits, facts: Facts) -> tuple[int, ...]:
    """Return the lengths in tokens of the checked contexts.

    They lie across a KV split, across a block or two, and within one block. Each is at most half of a step's tokens and
    half of the blocks, to leave room for other rows and a second copy. Each has at least one token.
    """
    lengths = (facts.split + 44, 70, 5)
    longest = max(min(limits.max_model_len - 1, limits.max_num_batched_tokens // 2), 1)
    blocks = max(limits.columns // 2, 1)
    return tuple(dict.fromkeys(min(length, longest, blocks * limits.block_size) for length in lengths))


def long_context(limits: Limits, facts: Facts) -> int | None:
    """Return the length in tokens of a context of three KV splits.

    Returns None if no sequence can have it. Three is the least number of splits with an order of merging.
    """
    length = 2 * facts.split + 44
    fits = length < limits.max_model_len and -(-length // limits.block_size) <= limits.columns
    return length if fits else None


def given_back_ends(limits: Limits) -> list[int]:
    """Return for each window the tokens of a sequence behind which a token reads the last one of its oldest block.

    The block before is given back by then. Windows that leave no room for such a sequence are left out.
    """
    most = min(limits.max_model_len - 1, limits.columns * limits.block_size)
    windows = {each.window for each in limits.groups if each.window}
    ends = (window + 2 * limits.block_size - 2 for window in sorted(windows))
    return [end for end in ends if end + READ <= most]


def image_context(limits: Limits) -> int:
    """Return the length in tokens of a context with one image.

    A piece of embeddings counts as one.
    """
    return BEFORE_IMAGE + limits.checked_image + AFTER_IMAGE


def _room(limits: Limits) -> int:
    """Return the most tokens of a sequence that fits twice into the cache."""
    return min(limits.max_model_len - 1, limits.columns // 2 * limits.block_size)


def check_required(settings: Settings) -> None:
    """Raise SettingsError, naming all settings that make ``require_invariance`` impossible."""
    if not settings.require_invariance:
        return
    loose = {
        "batch_invariant": not settings.batch_invariant and "lets bits depend on the other requests in a batch",
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
