"""The steps of a boot, measured: the time and the memory that each took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from preheat.backends.base import Backend
from preheat.plan import lines
from preheat.utils import memory
from preheat.utils.trace import Span, no_span
from preheat.warmup.record import BootStep

logger = logging.getLogger(__name__)


class Steps:
    """``with steps("Initializing cache engine"): ...`` logs what the block took and keeps it in ``done``.

    What is used of a device is what this process holds there; its total adds what it may still allocate. Of the host it
    is what all processes use, out of all that it has. A device whose memory is the host's is left out of the line.
    Lines of a ``detail``, which matters to few, are logged at ``level``. ``span`` puts each step into the trace.
    """

    def __init__(
        self,
        backend: Backend,
        started: float | None = None,
        span: Span = no_span,
        *,
        level: int = logging.DEBUG,
    ) -> None:
        self.done: list[BootStep] = []
        self._device, self.level = backend, level
        self._started = time.monotonic() if started is None else started
        self._span = span

    @contextmanager
    def __call__(self, name: str, *, detail: bool = False, in_total: bool = False) -> Iterator[None]:
        began = time.monotonic()
        with self.log(name, detail=detail, in_total=in_total) as before, self._span(name):
            yield
        self._keep(name, began, self._device.used_memory() - before)

    @contextmanager
    def log(self, name: str, *, detail: bool = False, in_total: bool = False) -> Iterator[int]:
        """Only log what the block took, ``in_total`` if it has several steps. Gives what the device held before."""
        device, host = self._device.used_memory(), memory.used_memory()
        yield device
        self._log(name, device, host, in_total=in_total, level=self.level if detail else logging.INFO)

    def peak(self, name: str, measure: Callable[[], int]) -> int:
        """``measure`` runs something that leaves nothing and returns the most bytes that it held on the device."""
        began, device, host = time.monotonic(), self._device.used_memory(), memory.used_memory()
        with self._span(name):
            taken = measure()
        self._log(name, device, host, held=taken)
        self._keep(name, began, taken)
        return taken

    def _keep(self, name: str, began: float, taken: int) -> None:
        self.done.append(BootStep(name, began - self._started, time.monotonic() - began, taken))

    def _log(
        self,
        name: str,
        device: int,
        host: int,
        *,
        in_total: bool = False,
        level: int = logging.INFO,
        held: int | None = None,
    ) -> None:
        """Log what is used now and was not before, or that ``held`` bytes of the device were used and given back."""
        now, total = self._device.used_memory(), memory.total_memory()
        capacity, host_used = now + self._device.free_memory(), total - memory.free_memory()
        taken, host_taken = now - device, memory.used_memory() - host
        on_host = self._device.facts.on_host
        if held is not None:
            taken = held
            if on_host:
                host_taken, host_used = held, host_used + held
        on_device = None if on_host else (taken, device + taken, capacity)
        line = lines.memory_step(name, on_device, (host_taken, host_used, total), in_total=in_total)
        logger.log(level, "%s", line)
