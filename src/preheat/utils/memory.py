"""Memory of the host, in bytes."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BLOCK = 1 << 18
RESET_PEAK = "5"
"""What the kernel takes, written to clear_refs, as "forget the peak of the resident set"."""


CGROUPS = Path("/sys/fs/cgroup")
MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller, "" in version 2: files with a group's limit and use, and the line of memory.stat that says how much of
the use is a file cache that the kernel drops when memory is short."""


def free_memory() -> int:
    """What the kernel says is available without swapping, and no more than a container may have."""
    size = _kib(Path("/proc/meminfo"), "MemAvailable:")
    if size is None:
        raise OSError("/proc/meminfo has no MemAvailable line; set --kv-cache-memory-bytes")
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    return min([size, *left_in_groups(groups, CGROUPS)])


def left_in_groups(groups: str, mount: Path) -> list[int]:
    """Bytes that each control group with a limit has left; ``groups`` as in /proc/self/cgroup. A container may see its
    own group as the root of ``mount``, so every folder from there to the group counts.
    """
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in MEMORY_FILES:
            continue
        group = mount / controller / path.lstrip("/")
        found += [
            _left(each, *MEMORY_FILES[controller]) for each in (group, *group.parents) if mount in (each, *each.parents)
        ]
    return [left for left in found if left is not None]


def _left(group: Path, limit: str, used: str, cached: str) -> int | None:
    """Bytes that ``group`` has left; None without a limit."""
    try:
        most, now = int((group / limit).read_text()), int((group / used).read_text())
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return max(most - now + int(lines.get(cached, 0)), 0)


def total_memory() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def used_memory() -> int:
    """Return the resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def give_back_large_blocks() -> None:
    """Let the C library give each large block back to the kernel when it is freed.

    It would keep them, up to 32 MB each,
    once some were freed.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def trim() -> None:
    """Let the C library give the kernel what it holds unused, where it can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory(run: Callable[[], None]) -> int:
    """Run ``run``; by how much the resident set of this process exceeded meanwhile what it was before, at most.

    The kernel keeps the peak. Where it does not let a process begin a new one, the peak is that of the whole life of
    the process, which is not less.
    """
    before = used_memory()
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError:
        pass
    run()
    peak = _kib(Path("/proc/self/status"), "VmHWM:")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(peak - before, 0)


def _kib(path: Path, name: str) -> int | None:
    """Return the line ``name`` of a file of the kernel, which counts in KiB, in bytes; None if there is none."""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
