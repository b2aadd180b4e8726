"""The CPU backend's part of `preheat doctor`. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from preheat.utils.finding import Finding
from preheat.utils.memory import free_memory, total_memory
from preheat.utils.processors import memory_nodes, physical_cores, usable

MIN_MEMORY = 2 * 2**30
CPUINFO = Path("/proc/cpuinfo")
WIDE = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")
"""Instruction sets by how much they help, best first."""


def findings() -> Iterator[Finding]:
    """Yield findings on cores, nodes of memory, threads, instruction set, memory and compilers."""
    processors, allowed, physical = os.cpu_count() or 1, len(usable()), physical_cores()
    found = f"{allowed} of {processors} processors may be used" if allowed < processors else f"{processors} processors"
    yield Finding("CPU cores", f"{found}, {physical} physical cores")
    nodes = memory_nodes()
    advice = "threads read memory of all nodes; for a small model, numactl --cpunodebind=0 --membind=0 is faster"
    yield Finding("NUMA nodes", "1") if nodes == 1 else Finding("NUMA nodes", str(nodes), "note", advice)
    yield Finding("threads", f"{physical} in execution mode llvm, one a core; --num-threads sets another number")
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > allowed:
        advice = "more threads than cores slow each other down: unset it, or set --num-threads"
        yield Finding("OMP_NUM_THREADS", f"{asked}, more than the cores", "note", advice)
    yield _instructions()
    free, total = free_memory(), total_memory()
    found = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    if free < MIN_MEMORY:
        yield Finding("memory", found, "note", "only small models fit; a container's limit counts")
    else:
        yield Finding("memory", found)
    yield _llvm()
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        yield Finding("C++ compiler", "none", "note", "execution mode compile needs one: install g++ or set CXX")


def _instructions() -> Finding:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return Finding("instruction set", "unknown")
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    best = next((name for name in WIDE if name in flags), None)
    if best is None:
        return Finding("instruction set", "none that torch can use to be fast", "note", "expect a slow engine here")
    dtype = "bfloat16" if best in WIDE[:2] else "float32, as there are no bfloat16 instructions"
    return Finding("instruction set", f"{best}; models run in {dtype} by default")


def _llvm() -> Finding:
    """Return the processor that LLVM compiles for, as execution mode llvm would."""
    try:
        from preheat.backends.cpu.llvm import targets
    except ImportError:
        advice = "execution mode llvm needs llvmlite: pip install llvmlite"
        return Finding("LLVM", "not installed", "note", advice)
    here = targets.here()
    if here.fused:
        return Finding("LLVM", here.title.removeprefix("LLVM "))
    advice = "many instructions take the place of one in execution mode llvm: --execution-mode eager may be faster"
    return Finding("LLVM", f"{here.title.removeprefix('LLVM ')}, no fused multiply-add", "note", advice)
