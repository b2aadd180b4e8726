"""The steps of a boot, measured: the time and the memory that each took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from preheat.backends.base import Backend
from preheat.plan import lines
from preheat.utils import memory
from preheat.utils.trace import Span, no_span
from preheat.warmup.record import BootStep

logger = logging.getLogger(__name__)


class Steps:
    """``with steps("Loading model weights"): ...`` logs what the block took and keeps it in ``done``.

    Used memory is what this process holds; the total adds what it may still allocate. On a CPU, device and host are the
    same. ``span`` puts each step into the trace.
    """

    def __init__(self, backend: Backend, started: float | None = None, span: Span = no_span) -> None:
        self.done: list[BootStep] = []
        self._device = backend
        self._started = time.monotonic() if started is None else started
        self._span = span

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, device, host = time.monotonic(), self._device.used_memory(), memory.used_memory()
        with self._span(name):
            yield
        taken = self._log(name, device, host)
        self.done.append(BootStep(name, began - self._started, time.monotonic() - began, taken))

    @contextmanager
    def total(self, name: str) -> Iterator[None]:
        """Log what several steps took together."""
        device, host = self._device.used_memory(), memory.used_memory()
        yield
        self._log(name, device, host, in_total=True)

    def _log(self, name: str, device: int, host: int, *, in_total: bool = False) -> int:
        device_now, host_now = self._device.used_memory(), memory.used_memory()
        line = lines.memory_step(
            name,
            (device_now - device, device_now, device_now + self._device.free_memory()),
            (host_now - host, host_now, host_now + memory.free_memory()),
            in_total=in_total,
        )
        logger.info("%s", line)
        return device_now - device
