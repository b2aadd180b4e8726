"""The protocols of a device's memory, events and programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

HOST_COPIES = 2
"""Host copies of data for the device: the host writes one while the device may still read the other."""

K_contra = TypeVar("K_contra", contravariant=True)

R_co = TypeVar("R_co", covariant=True)


class GraphDriver(Protocol[K_contra, R_co]):
    """Runs ``body(key)``: directly, or as its captured graph."""

    def __contains__(self, key: K_contra) -> bool:
        """Return whether a graph runs ``key``."""

    def run(self, key: K_contra, *, eager: bool = False) -> R_co:
        """Launch the program of ``key``; return the result of its body, overwritten in place by a graph."""

    def capture(self, key: K_contra) -> None:
        """Make a graph of ``key``; all its kernels have run before."""

    def forget(self, key: K_contra) -> None:
        """Give up the graph of ``key``, if there is one."""


StepCounter = Callable[[], tuple[int, float | None]]
"""Returns a number that only grows, and the seconds spent on its events; None where nobody counts seconds."""


class DeviceEvent(Protocol):
    """A point in the device's work that the host can wait for."""

    def record(self) -> None:
        """Move the event behind all work launched so far."""

    def wait(self) -> None:
        """Return once the device has done the work before the event; at once if it was never recorded."""


class HostEvent:
    """The event of a device whose calls return when their work is done."""

    def record(self) -> None:
        """Do nothing: the work is done."""

    def wait(self) -> None:
        """Return at once."""


class SleepMemory(Protocol):
    """Memory of the device that can be given back and taken again at the same addresses, by tag."""

    def taking(self, tag: str) -> AbstractContextManager[None]:
        """Let this thread's allocations inside sleep under ``tag``."""

    def pin(self, tag: str) -> int:
        """Take memory on the host for the contents of ``tag``, ahead of sleep; return its bytes."""

    def sleep(self, tag: str, *, keep: bool) -> None:
        """Give the memory back; ``keep``: its contents go to the host, else they are lost."""

    def wake(self, tag: str) -> None:
        """Take memory again; contents that were not kept are undefined."""
