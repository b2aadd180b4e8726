"""Rendezvous of the ranks that share a model on CPUs.

Each rank is a process.
"""

from __future__ import annotations

from collections.abc import Callable

from preheat.backends.base.collective import Collective
from preheat.backends.cpu.collective import SharedMemory, Sockets
from preheat.backends.rendezvous import OneNode, Rendezvous


class CpuSharing:
    """See :class:`preheat.backends.base.collective.Sharing`."""

    def join(self, rendezvous: Rendezvous, check: Callable[[], None]) -> Collective:
        return SharedMemory(rendezvous, check) if isinstance(rendezvous, OneNode) else Sockets(rendezvous, check)
