"""The limits of an engine, resolved once from the settings, the model and the memory."""

from __future__ import annotations

from dataclasses import dataclass

from preheat.errors import SettingsError
from preheat.settings import Settings


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
        """The most rows of a step: each takes a token of the budget and a block of its own."""
        return min(self.max_num_seqs, self.max_num_batched_tokens, self.num_blocks - 1)


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
