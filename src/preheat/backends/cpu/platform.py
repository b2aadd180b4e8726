"""The CPU platform."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from preheat.backends.cpu.tiles import SPLIT

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KV_CACHE_BYTES = 1 << 30


class CPU:
    """torch on the host's processors. Thread count and instruction set are part of what fixes the bits."""

    name = "cpu"
    device = torch.device("cpu")
    refused: Mapping[str, str] = MappingProxyType(
        {
            "batch_invariant": "torch's own kernels serve, at sizes that were proven to keep their bits, and none is "
            "faster without that",
            "async_scheduling": "a step has ended when its call returns, so there is nothing to work ahead of",
            "defrag_with_graphs": "there are no graphs on a CPU",
        }
    )
    kv_split = SPLIT
    captures_graphs = False
    asynchronous = False

    @property
    def fingerprint(self) -> str:
        """The instruction set that torch's kernels use here."""
        return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"

    def free_memory(self) -> int:
        """What the kernel says is available without swapping."""
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        raise OSError("/proc/meminfo has no MemAvailable line; set --kv-cache-memory-bytes")

    def used_memory(self) -> int:
        """The resident set."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES

    def synchronize(self) -> None:
        """Nothing runs on when a call returns."""

    def kv_cache_memory(self) -> int | None:
        """1 GiB: a host's memory is shared with everything else on it, so the default takes no share of it."""
        return KV_CACHE_BYTES

    def supports_bfloat16(self) -> bool:
        """True with AVX512-BF16 or AMX; without them bfloat16 is emulated and slower than float32."""
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

    def prepare(self, num_threads: int | None) -> None:
        """Fix the thread count."""
        if num_threads:
            torch.set_num_threads(num_threads)
