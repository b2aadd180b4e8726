"""The cost of a step with padding.

Also the check that every sequence can run within the limits.
"""

from __future__ import annotations

from collections.abc import Callable

from preheat.errors import SettingsError
from preheat.limits import Limits

Padded = Callable[[int, int, int], int]
"""(rows, tokens, longest row) of a step -> its padded tokens, monotonic in all three."""


def unpadded(rows: int, tokens: int, longest: int) -> int:
    """Return the cost without padding."""
    return tokens


def check_limits(limits: Limits, padded: Padded) -> None:
    """Raise SettingsError for limits under which a sequence cannot run.

    Every sequence must run alone, and every slot must advance by a token in one step.
    """
    if limits.num_blocks - 1 < (needed := limits.need(limits.max_model_len)):
        raise SettingsError(
            f"max_model_len {limits.max_model_len} needs {needed} blocks of {limits.block_size} "
            f"tokens, but the cache has {limits.num_blocks - 1}: lower max_model_len or give the cache more memory "
            f"(gpu_memory_utilization, kv_cache_memory_bytes, num_gpu_blocks_override)"
        )
    seqs, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if padded(seqs, seqs, 1) > budget:
        raise SettingsError(
            f"max_num_batched_tokens {budget} is too small: one token for each of max_num_seqs {seqs} sequences takes "
            f"{padded(seqs, seqs, 1)} with padding; raise max_num_batched_tokens or lower max_num_seqs"
        )
    if limits.max_num_prefill_seqs is not None and limits.max_num_prefill_seqs < 1:
        raise SettingsError(f"max_num_prefill_seqs must be 1 or more, or unset; got {limits.max_num_prefill_seqs}")
