"""Meeting of the ranks that share a model on CPUs.

Each rank is a process.
"""

from __future__ import annotations

from collections.abc import Callable

from preheat.backends.base import Collective
from preheat.backends.cpu.collective import SharedMemory, Sockets
from preheat.backends.meeting import Meeting, OneNode


class CpuSharing:
    """See :class:`preheat.backends.base.Sharing`."""

    def join(self, meeting: Meeting, check: Callable[[], None]) -> Collective:
        return SharedMemory(meeting, check) if isinstance(meeting, OneNode) else Sockets(meeting, check)
