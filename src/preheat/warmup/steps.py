"""The steps of a boot, measured: the time and the memory of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from preheat.backends.base.backend import Backend
from preheat.plan import lines
from preheat.utils import memory
from preheat.utils.trace import Span, no_span
from preheat.warmup.record import BootStep

logger = logging.getLogger(__name__)


class Steps:
    """The measured steps of a boot.

    ``with steps("Initializing cache engine"): ...`` logs a step and adds it to ``done``. The used bytes of a device are
    this process's; the total adds the bytes that it may still allocate. The used bytes of the host are those of all
    processes, out of all its memory. A device that shares the host's memory is left out of the line. Lines of a
    ``detail`` step are logged at ``level``. ``span`` puts each step into the trace.
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
        self.span = span

    @property
    def elapsed(self) -> float:
        """The seconds since the boot began."""
        return time.monotonic() - self._started

    @contextmanager
    def __call__(self, name: str, *, detail: bool = False, in_total: bool = False) -> Iterator[None]:
        began = time.monotonic()
        with self.log(name, detail=detail, in_total=in_total) as before, self.span(name):
            yield
        self._keep(name, began, self._device.used_memory() - before)

    @contextmanager
    def log(self, name: str, *, detail: bool = False, in_total: bool = False) -> Iterator[int]:
        """Only log the memory of the block.

        ``in_total`` says that it has several steps. Yields the device's used bytes.
        """
        device, host = self._device.used_memory(), memory.used_memory()
        yield device
        self._log(name, device, host, in_total=in_total, level=self.level if detail else logging.INFO)

    def peak(self, name: str, measure: Callable[[], int]) -> int:
        """Log a step and return its peak.

        ``measure`` keeps nothing and returns the most bytes held on the device.
        """
        began, device, host = time.monotonic(), self._device.used_memory(), memory.used_memory()
        with self.span(name):
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
        """Log the newly used memory.

        Or log that ``held`` bytes of the device were used and given back.
        """
        if not logger.isEnabledFor(level):  # a measurement of free memory reads many files of the kernel
            return
        total, on_host = memory.total_memory(), self._device.facts.on_host
        host_taken, host_used = memory.used_memory() - host, total - memory.free_memory()
        if held is not None and on_host:
            host_taken, host_used = held, host_used + held
        on_device = None
        if not on_host:
            now = self._device.used_memory()
            taken = now - device if held is None else held
            on_device = taken, device + taken, now + self._device.free_memory()
        line = lines.memory_step(name, on_device, (host_taken, host_used, total), in_total=in_total)
        logger.log(level, "%s", line)
