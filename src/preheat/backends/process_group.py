"""A process group of torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from preheat.backends.meeting import Meeting
from preheat.errors import SettingsError

LOOK_SECONDS = 0.02


def join_group(kind: str, meeting: Meeting, check: Callable[[], None], *, device: torch.device | None = None) -> None:
    """Be a rank in the group of a ``kind`` ("nccl", "hccl"), whose ranks find each other as ``meeting`` says.

    While one waits for the others ``check`` is called, which raises where a rank has died. Raises SettingsError if this
    process is in a group already.
    """
    if dist.is_initialized():
        raise SettingsError(
            "this process is in a process group already: give each engine of several ranks a process of its own",
            param="tensor_parallel_size",
        )
    store, world = meeting.store(), meeting.world
    store.add("present", 1)
    while store.add("present", 0) < world:
        check()
        time.sleep(LOOK_SECONDS)
    dist.init_process_group(kind, store=store, rank=meeting.rank, world_size=world, device_id=device)
