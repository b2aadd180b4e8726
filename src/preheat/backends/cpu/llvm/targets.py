"""Processors that functions are compiled for: this machine's, and others by name."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm

_LINUX = "x86_64-unknown-linux-gnu"
_WIDE = "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,-prefer-256-bit"


class Target(NamedTuple):
    """A processor as LLVM names it: ``features`` are switched on by "+" and off by "-", between commas."""

    triple: str
    processor: str
    features: str

    @property
    def bits(self) -> int:
        """Bits of a vector register. LLVM cuts vectors of 16 floats to this size."""
        if self.arm:
            return 128
        return 512 if self.has("avx512f") else 256 if self.has("avx") else 128

    @property
    def registers(self) -> tuple[int, int]:
        """Vector registers, and the bits of each."""
        return 32 if self.arm or self.has("avx512f") else 16, self.bits

    @property
    def arm(self) -> bool:
        return self.triple.startswith(("aarch64", "arm64"))

    @property
    def fused(self) -> bool:
        """Whether there are fused multiply-adds. Elsewhere :mod:`.fused` has the same bits, slowly."""
        return self.arm or self.has("fma") or self.has("fma4")

    @property
    def title(self) -> str:
        """The name for people, with LLVM's version."""
        return f"LLVM {version()} for {self.processor}, vectors of {self.bits} bits"

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    @property
    def runs_here(self) -> bool:
        """Whether this machine runs the target's code."""
        mine = here()
        needed = [each[1:] for each in self.features.split(",") if each.startswith("+")]
        return self.triple.split("-")[0] == mine.triple.split("-")[0] and all(map(mine.has, needed))


TARGETS = {
    "avx512": Target(_LINUX, "x86-64-v4", f"+avx,+avx2,+fma,{_WIDE}"),
    "avx2": Target(_LINUX, "x86-64-v3", "+avx,+avx2,+fma"),
    "sse": Target(_LINUX, "x86-64-v2", "+sse4.2"),
    "neon": Target("aarch64-unknown-linux-gnu", "generic", ""),
    "macos": Target("arm64-apple-macosx12.0", "apple-m1", ""),
}
"""Processors by name, for tests and tools: an engine compiles for :func:`here`."""


@cache
def here() -> Target:
    """Return the processor of this machine."""
    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM asks this processor for nothing: its name says all
        features = ""
    found = Target(llvm.get_default_triple(), llvm.get_host_cpu_name(), features)
    return found if found.arm else found._replace(features=f"{features},-prefer-256-bit")


def version() -> str:
    """Return LLVM's version."""
    return ".".join(map(str, llvm.llvm_version_info))
