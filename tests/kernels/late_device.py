"""A device as late as can be: a copy happens at the moment the host waits for it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.backend import InterpretedCuda

GARBAGE = 0x5A


class LateDevice(TorchDispatchMode):
    """Follow the copies that are asked for without waiting, of tensors in ``host``: host copies by their address.

    Host copies are kept after their engine's end: otherwise another tensor could get the address of one.

    Memory that the device reads must stay as it was when the copy was asked for, until the host has waited for an
    event behind the copy: :attr:`rewritten` counts host copies that changed before. Memory that the device writes is
    garbage until then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, Tensor] = {}
        self.rewritten, self.copies, self._asked = 0, 0, 0
        self._reads: deque[tuple[int, Tensor, Tensor]] = deque()
        self._writes: deque[tuple[int, Tensor, Tensor]] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[2:] == (True,):
            target, source = args[0], args[1]
            if source.untyped_storage().data_ptr() in self.host:
                self.look()
                self._reads.append((self._ask(), source, source.clone()))
            elif target.untyped_storage().data_ptr() in self.host:
                self._writes.append((self._ask(), target, source.clone()))
                return target.view(torch.uint8).fill_(GARBAGE)
        return func(*args, **(kwargs or {}))

    def _ask(self) -> int:
        self._asked, self.copies = self._asked + 1, self.copies + 1
        return self._asked

    def look(self) -> None:
        """Count host copies that changed before the device had read them, once each."""
        changed = [read for read in self._reads if not torch.equal(read[1], read[2])]
        self.rewritten += len(changed)
        self._reads = deque(read for read in self._reads if all(read is not each for each in changed))

    def event(self) -> LateEvent:
        return LateEvent(self)

    def done(self, asked: int) -> None:
        """Make the first ``asked`` copies of the device."""
        self.look()
        while self._reads and self._reads[0][0] <= asked:
            self._reads.popleft()
        while self._writes and self._writes[0][0] <= asked:
            _, target, values = self._writes.popleft()
            target.copy_(values)

    def finish(self) -> None:
        """Wait for everything."""
        self.done(self._asked)


class LateEvent:
    """See :class:`preheat.backends.base.device.DeviceEvent`."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._at = device, 0

    def record(self) -> None:
        self._at = self._device._asked

    def wait(self) -> None:
        self._device.done(self._at)


class LateCuda(InterpretedCuda):
    """The interpreted backend on a late device."""

    def __init__(self) -> None:
        super().__init__()
        self.late = LateDevice()

    def host_copy(self, tensor: Tensor) -> Tensor:
        copy = super().host_copy(tensor)
        self.late.host[copy.untyped_storage().data_ptr()] = copy
        return copy

    def event(self) -> LateEvent:
        return self.late.event()

    def synchronize(self) -> None:
        self.late.finish()
