"""A process group of torch.distributed, whose ranks meet in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from preheat.errors import SettingsError

LOOK_SECONDS = 0.02


def join_group(
    kind: str, folder: Path, rank: int, world: int, check: Callable[[], None], *, device: torch.device | None = None
) -> None:
    """Be rank ``rank`` of ``world`` in the group of a ``kind`` ("nccl", "hccl"), whose ranks meet in ``folder``.

    While one waits for the others ``check`` is called, which raises where a rank has died. Raises SettingsError if this
    process is in a group already.
    """
    if dist.is_initialized():
        raise SettingsError(
            "this process is in a process group already: give each engine of several ranks a process of its own",
            param="tensor_parallel_size",
        )
    store = dist.FileStore(str(folder / "group"), world)  # type: ignore[attr-defined]
    store.add("present", 1)
    while store.add("present", 0) < world:
        check()
        time.sleep(LOOK_SECONDS)
    dist.init_process_group(kind, store=store, rank=rank, world_size=world, device_id=device)
