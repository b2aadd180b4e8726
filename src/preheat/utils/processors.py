"""Processors of the host: cores that this process may use, and nodes of memory."""

from __future__ import annotations

import os
from pathlib import Path

PROCESSORS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
_FOLDER = "cpu{}/topology"
_TOPOLOGY = ("physical_package_id", "core_id")


def usable() -> set[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(allowed: set[int] | None = None, root: Path = PROCESSORS) -> int:
    """Return the physical cores of the ``allowed`` processors, by default the usable ones.

    Two processors of one core count once. Where the kernel does not tell cores apart, each processor is a core.
    """
    allowed = usable() if allowed is None else allowed
    found = set()
    for number in allowed:
        folder = root / _FOLDER.format(number)
        try:
            found.add(tuple((folder / name).read_text().strip() for name in _TOPOLOGY))
        except OSError:
            return len(allowed)
    return max(len(found), 1)


def memory_nodes(root: Path = NODES) -> int:
    """Return the number of NUMA nodes, 1 where the kernel names none."""
    return max(sum(1 for each in root.glob("node[0-9]*")), 1)
