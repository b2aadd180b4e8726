"""The other ranks of a host, started before torch is imported. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.parallel.world import world_size
from preheat.settings import Settings

if TYPE_CHECKING:
    from preheat.parallel.ranks import Children


def waiting_ranks(settings: Settings) -> Children | None:
    """Start the other ranks of this host, if there are any: they import torch while this process does."""
    world = world_size(settings)
    if world == 1 or settings.distributed_executor_backend != "mp":
        return None
    from preheat.parallel.ranks import Children

    return Children(world, settings.device)
