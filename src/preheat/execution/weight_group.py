"""A process group of a trainer and engines for new weights.

Both ends are here. The ranks meet at a TCP store that the trainer, rank 0, serves. It broadcasts tensors one after the
other, as bytes, in the order that it has announced. The group is separate from any other of the process, such as the
group of a trainer's ranks. Nothing is pickled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from preheat.backends.names import HOST
from preheat.configs.weight_transfer import TIMEOUT, Announced

PREFIX = "preheat weights"
TRAINER = 0
POLL_SECONDS = 2e-4


class WeightGroup:
    """Member of the group: rank ``rank`` of ``world_size``.

    The ranks meet at ``address``, where the trainer listens. Each rank waits for the others, and later for any tensor,
    ``timeout`` seconds at most. ``backend`` is gloo, through the host's memory, or nccl, between GPUs; by default the
    usual one of ``device``. The device is the host unless named. Raises RuntimeError if the ranks do not meet.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: str | None = None,
        device: torch.device | str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        own = torch.device(HOST if device is None else device)
        usual = dist.get_default_backend_for_device(own)
        self.backend, self._timeout = backend or usual, timeout
        if self.backend not in ("gloo", usual):
            raise RuntimeError(f"backend {self.backend} does not support this device: write {usual}")
        self._device = own if self.backend == usual else torch.device(HOST)
        patience = timedelta(seconds=timeout)
        self._store = TCPStore(address, port, world_size, rank == TRAINER, patience, wait_for_workers=False)
        self._group = _group(self.backend, PrefixStore(PREFIX, self._store), rank, world_size, patience)

    def announce(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Return the ``update_info`` of ``/update_weights``, to be posted before :meth:`send`."""
        listed = list(tensors)
        return {
            "names": [name for name, _ in listed],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in listed],
            "shapes": [list(tensor.shape) for _, tensor in listed],
        }

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast ``tensors``, in the announced order. Raises TimeoutError or RuntimeError."""
        for _, tensor in tensors:
            self._broadcast(_bytes(tensor.detach().to(self._device).contiguous()))

    def receive(self, announced: Iterable[Announced]) -> dict[str, Tensor]:
        """Receive the trainer's tensors, on the host.

        Raises TimeoutError or RuntimeError, with the number of tensors received.
        """
        found: dict[str, Tensor] = {}
        for each in announced:
            tensor = torch.empty(tuple(each.shape), dtype=getattr(torch, each.dtype), device=self._device)
            try:
                self._broadcast(_bytes(tensor))
            except (RuntimeError, TimeoutError) as error:
                raise type(error)(f"after {len(found)} tensors, at {each.name}: {_first_line(error)}") from error
            found[each.name] = tensor.cpu()
        return found

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one get an error."""
        self._group.abort()

    def _broadcast(self, data: Tensor) -> None:
        if not len(data):
            return
        work = self._group.broadcast(data, TRAINER)
        end = time.monotonic() + self._timeout
        while not work.is_completed():  # wait() has no time limit for a GPU's work
            if time.monotonic() > end:
                raise TimeoutError(f"no data for {self._timeout:g} s")
            time.sleep(POLL_SECONDS)
        work.wait()


def _group(backend: str, store: PrefixStore, rank: int, world: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world, timeout)
    if backend != "nccl":
        raise RuntimeError(f"weights travel by gloo or nccl, not by {backend}")
    kept = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else its watchdog ends the process when the trainer dies
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        if kept is not None:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = kept


def _bytes(tensor: Tensor) -> Tensor:
    """Return uint8 [bytes], the same memory."""
    return tensor.view(-1).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(". This is typically")[0]
