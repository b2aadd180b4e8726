"""Memory of the host, in bytes."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BLOCK = 1 << 18
_MADV_DONTNEED = 4  # of mman.h, on Linux and macOS
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
RESET_PEAK = "5"
"""The value that makes the kernel forget the peak of the resident set, written to clear_refs."""


MEMINFO, STATM, STATUS = Path("/proc/meminfo"), Path("/proc/self/statm"), Path("/proc/self/status")
"""Files of Linux; macOS has none of them."""

CGROUPS = Path("/sys/fs/cgroup")
MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller ("" in version 2): the files of a group's limit and use, and a line of memory.stat. The line counts the
part of the use that is file cache; the kernel drops it when memory is short."""


def free_memory() -> int:
    """Return the memory that the kernel calls available, without swapping, within a container's limits."""
    size = _kib(MEMINFO, "MemAvailable:") if MEMINFO.exists() else free_pages(_told("vm_stat"))
    if size is None:
        raise OSError("neither /proc/meminfo nor vm_stat names the free memory; set --kv-cache-memory-bytes")
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    return min([size, *left_in_groups(groups, CGROUPS)])


def free_pages(told: str) -> int | None:
    """Return the bytes that macOS has free, or would free without swapping: ``told`` is the output of vm_stat."""
    size = re.search(r"page size of (\d+) bytes", told)
    counts = dict(re.findall(r"^Pages (free|inactive|speculative|purgeable):\s+(\d+)", told, re.M))
    return int(size[1]) * sum(map(int, counts.values())) if size and "free" in counts else None


def _told(*command: str) -> str:
    """Return the output of a program of the system; empty if there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def left_in_groups(groups: str, mount: Path) -> list[int]:
    """Return the bytes that each control group with a limit has left.

    ``groups`` is as in /proc/self/cgroup. A container may see its own group as the root of ``mount``, so every folder
    from there to the group counts.
    """
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in MEMORY_FILES:
            continue
        group = str(mount / controller / path.lstrip("/"))
        while len(group) >= len(str(mount)):
            found.append(_left(group, *MEMORY_FILES[controller]))
            group = os.path.dirname(group)
    return [left for left in found if left is not None]


def _left(group: str, limit: str, used: str, cached: str) -> int | None:
    """Return the bytes that ``group`` has left; None without a limit."""
    try:
        most, now = int(_read(f"{group}/{limit}")), int(_read(f"{group}/{used}"))
        count = re.search(rf"^{cached} (\d+)$", _read(f"{group}/memory.stat"), re.MULTILINE)
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return max(most - now + (int(count[1]) if count else 0), 0)


def _read(path: str) -> str:
    """Return a small file of the kernel."""
    with open(path, "rb", 0) as file:
        return file.read().decode()


def total_memory() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def used_memory() -> int:
    """Return the resident set of this process."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * PAGE_BYTES
    told = _told("ps", "-o", "rss=", "-p", str(os.getpid())).strip()
    return int(told) * 1024 if told.isdigit() else _greatest_ever()


def _greatest_ever() -> int:
    """Return the peak of the resident set of this process; macOS counts in bytes, Linux in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back_large_blocks() -> None:
    """Let the C library give large blocks back to the kernel at once.

    It does so when a block is freed. Otherwise it would keep freed blocks of up to 32 MB each.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def release(address: int, size: int) -> None:
    """Give the whole pages of ``size`` bytes from ``address`` on back to the kernel, and keep the addresses.

    The numbers there are lost. The kernel gives a page again when it is written.
    """
    first, end = -(-address // PAGE_BYTES) * PAGE_BYTES, (address + size) // PAGE_BYTES * PAGE_BYTES
    if first < end:
        _madvise(first, end - first, _MADV_DONTNEED)


def trim() -> None:
    """Let the C library give unused memory to the kernel, where it can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory(run: Callable[[], None]) -> int:
    """Run ``run``. Return a bound on the growth of the process's resident set meanwhile.

    The kernel keeps the peak. Where a process may not reset the peak, the peak of its whole life counts instead: it is
    not less.
    """
    before = used_memory()
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError:
        pass
    run()
    peak = _kib(STATUS, "VmHWM:") if STATUS.exists() else None
    if peak is None:
        peak = _greatest_ever()
    return max(peak - before, 0)


def _kib(path: Path, name: str) -> int | None:
    """Return the value of the line ``name`` in a file of the kernel, if there is one.

    The file counts in KiB, the value in bytes.
    """
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
