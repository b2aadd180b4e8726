"""A process group of torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from preheat.backends.rendezvous import Rendezvous
from preheat.errors import SettingsError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

LOOK_SECONDS = 0.02
LOOK_TIMEOUT = timedelta(seconds=2)
"""Time limit of one look at the store.

A store of a file waits for its file, and the file disappears when a rank dies.
"""


def join_group(
    kind: str, rendezvous: Rendezvous, check: Callable[[], None], *, device: torch.device | None = None
) -> None:
    """Join the group of ranks of a ``kind`` ("nccl", "hccl"); they meet by ``rendezvous``.

    While this rank waits for the others, ``check`` is called; it raises if a rank has died. Raises SettingsError if
    this process is in a group already.
    """
    if dist.is_initialized():
        raise SettingsError(
            "this process is in a process group already: give each engine of several ranks a process of its own",
            param="tensor_parallel_size",
        )
    check()
    store, world = rendezvous.store(), rendezvous.world
    patience = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(LOOK_TIMEOUT)
    mine = 1
    while _present(store, mine, check) < world:
        mine = 0
        time.sleep(LOOK_SECONDS)
    store.set_timeout(patience)
    dist.init_process_group(kind, store=store, rank=rendezvous.rank, world_size=world, device_id=device)


def _present(store: Store, mine: int, check: Callable[[], None]) -> int:
    """Add ``mine`` to the number of present ranks, and return the number.

    Raises any error of ``check``.
    """
    check()
    try:
        return int(store.add("present", mine))
    except (RuntimeError, OSError):
        check()  # without the store of a dead rank's group, the reason is the better error
        raise
