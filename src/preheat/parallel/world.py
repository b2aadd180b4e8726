"""How many ranks an engine has. No torch here."""

from __future__ import annotations

from preheat.model.shard import sums_k_splits
from preheat.settings import Settings


def world_size(settings: Settings) -> int:
    """Return the number of ranks of an engine."""
    return settings.pipeline_parallel_size * settings.tensor_parallel_size


def has_groups(settings: Settings) -> bool:
    """Whether an engine is divided, or adds as if it was."""
    return sums_k_splits(settings) or settings.pipeline_parallel_size > 1
