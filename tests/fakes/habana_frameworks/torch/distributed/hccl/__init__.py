"""The fake of the module that registers the process group ``hccl``.

It is Gloo's group, with the gathering as an operation of the card.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from habana_frameworks.simulator import DEVICE, GraphRefused

LAZY_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"


class Hccl(dist.ProcessGroup):
    """The part of HCCL that preheat uses."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "hccl"

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather; with lazy collectives it accumulates like other operations.

        Otherwise the host waits for it; a graph cannot wait.
        """
        if DEVICE.lazy and os.environ.get(LAZY_COLLECTIVES) != "1":
            if DEVICE.capturing:
                raise GraphRefused(f"a collective within a graph needs {LAZY_COLLECTIVES}=true")
            DEVICE.mark_step()
        found = inputs[0].new_empty(len(outputs[0]), *inputs[0].shape)
        torch.ops.fake_hccl.all_gather(found, inputs[0])
        for output, part in zip(outputs[0], found, strict=True):
            output.copy_(part)
        return Done()


class Done(dist.Work):
    """A finished operation: a card keeps its operations in order."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def all_gather(output: Tensor, given: Tensor) -> Tensor:
    """Gather bytes, since Gloo does not know every type."""
    group = dist.group.WORLD
    group.gloo._allgather_base(_bytes(output), _bytes(given)).wait()
    return output


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


dist.Backend.register_backend("hccl", Hccl, devices=["cpu"])
torch.library.define("fake_hccl::all_gather", "(Tensor(a!) output, Tensor given) -> Tensor(a!)")
torch.library.impl("fake_hccl::all_gather", "CPU", all_gather)
