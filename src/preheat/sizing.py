"""What is possible: limits from what is asked, what the model was made for, and the memory that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.errors import SettingsError
from preheat.limits import Limits, mixes
from preheat.model.specs import ModelSpec
from preheat.settings import Settings

if TYPE_CHECKING:
    from preheat.backends.base import Backend


def resolve_limits(settings: Settings, spec: ModelSpec, platform: Backend, bytes_per_block: int, usable: int) -> Limits:
    """The model's length, and the blocks that fit into the ``usable`` bytes of memory."""
    length = settings.max_model_len or spec.max_position_embeddings
    if length > spec.max_position_embeddings:
        raise SettingsError(
            f"max_model_len {length} exceeds the {spec.max_position_embeddings} positions that the model was made for",
            param="max_model_len",
        )
    if settings.max_num_mixed_tokens is not None and not mixes(settings):
        raise SettingsError(
            "max_num_mixed_tokens bounds steps in which prompts are cut for others: leave it unset, or use the unified "
            "bucketing policy with enable_chunked_prefill",
            param="max_num_mixed_tokens",
        )
    return Limits(
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_prefill_seqs=settings.max_num_prefill_seqs,
        block_size=settings.block_size,
        num_blocks=_num_blocks(settings, platform, bytes_per_block, length, usable),
    )


def _num_blocks(settings: Settings, platform: Backend, bytes_per_block: int, length: int, usable: int) -> int:
    """Blocks of the cache, the pad block included; never more than all sequences at full length could hold."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    asked = settings.kv_cache_memory_bytes or min(platform.kv_cache_memory() or usable, usable)
    if asked > usable:
        raise SettingsError(
            f"kv_cache_memory_bytes {asked} is more than the {usable} bytes that gpu_memory_utilization "
            f"{settings.gpu_memory_utilization} of the free memory, less what graphs reserve, allows",
            param="kv_cache_memory_bytes",
        )
    most = settings.max_num_seqs * -(-length // settings.block_size) + 1
    return min(asked // bytes_per_block, most)
