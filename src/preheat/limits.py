"""The bounds that everything else obeys: resolved once from the settings, the model and the memory, then frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from preheat.errors import SettingsError
from preheat.settings import OPTIONS, Settings


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Blocks are ``block_size`` tokens; ``num_blocks`` counts the pad block."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_seqs: int | None
    block_size: int
    num_blocks: int

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def max_rows(self) -> int:
        """The most rows of a step: each takes a token of the budget, and a block of its own for it."""
        return min(self.max_num_seqs, self.max_num_batched_tokens, self.num_blocks - 1)

    @property
    def answers(self) -> bool:
        """Whether a prompt, of one token at least, leaves room for one more."""
        return self.max_model_len > 1


class BackendOptions(Protocol):
    """What a backend says about the options that it cannot serve."""

    @property
    def name(self) -> str: ...

    @property
    def rejected(self) -> Mapping[str, str]:
        """Options that must stay at their default there, each with the reason."""

    @property
    def split(self) -> int:
        """Tokens of the context that attention reads as one unit."""


def check_options(settings: Settings, backend: BackendOptions, *, mixed_steps: bool) -> None:
    """Raise SettingsError, with the reason, for an option that has no effect on ``backend`` or beside other options.

    ``mixed_steps``: the bucketing policy lets prompts share steps with rows that decode.
    """
    for name, reason in backend.rejected.items():
        default = OPTIONS[name].default
        if bool(getattr(settings, name)) != bool(default):
            turned = "off" if default else "on"
            usual = "unset" if default is None else f"at {str(default).lower()}"
            raise SettingsError(
                f"{name} cannot be turned {turned} on {backend.name}: {reason}; leave it {usual}", param=name
            )
    if settings.contiguous_pa and settings.block_size != backend.split:
        raise SettingsError(
            f"contiguous_pa reads whole blocks of {backend.split} tokens, and block_size is {settings.block_size}: "
            f"set block_size to {backend.split}, or contiguous_pa to false",
            param="contiguous_pa",
        )
    if settings.max_num_mixed_tokens is not None and not (mixed_steps and settings.enable_chunked_prefill):
        raise SettingsError(
            "max_num_mixed_tokens bounds steps in which prompts are cut for others: leave it unset, or use the unified "
            "bucketing policy with enable_chunked_prefill",
            param="max_num_mixed_tokens",
        )


def resolve_limits(
    settings: Settings,
    max_positions: int,
    block_bytes: int,
    *,
    usable: int | None = None,
    cache_bytes: int | None = None,
) -> Limits:
    """The limits for a model made for ``max_positions`` tokens, whose KV cache takes ``block_bytes`` a block.

    ``usable`` is the memory in bytes that the cache may take: None before it is known, when all sequences fit in full.
    ``cache_bytes`` is the backend's default size of the cache, None if that is all that is usable.
    Raises SettingsError for a length or a cache that is not possible.
    """
    length = settings.max_model_len or max_positions
    if length > max_positions:
        raise SettingsError(
            f"max_model_len {length} exceeds the {max_positions} positions that the model was made for",
            param="max_model_len",
        )
    return Limits(
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_prefill_seqs=settings.max_num_prefill_seqs,
        block_size=settings.block_size,
        num_blocks=_num_blocks(settings, length, block_bytes, usable, cache_bytes),
    )


def _num_blocks(settings: Settings, length: int, block_bytes: int, usable: int | None, default: int | None) -> int:
    """Blocks of the cache, the pad block included; never more than all sequences at full length could hold."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    most = settings.max_num_seqs * -(-length // settings.block_size) + 1
    asked = settings.kv_cache_memory_bytes
    if usable is None:
        return most if asked is None else min(most, asked // block_bytes)
    if asked is not None and asked > usable:
        raise SettingsError(
            f"kv_cache_memory_bytes {asked} is more than the {usable} bytes that gpu_memory_utilization "
            f"{settings.gpu_memory_utilization} of the free memory, less what graphs reserve, allows",
            param="kv_cache_memory_bytes",
        )
    return min(most, (asked or min(default or usable, usable)) // block_bytes)
