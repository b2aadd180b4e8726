"""Findings of `preheat doctor` for the CUDA backend, by asking nvidia-smi. No torch, and no memory of a GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from preheat.backends.cuda.device.card import Capability, card_of, experience, unknown
from preheat.utils.finding import Finding

MIN_DRIVER = 580

MUCH = 300
"""MiB of a GPU's memory that other programs hold before it is worth a remark."""

KERNEL = Path("/proc/sys/kernel/osrelease")


class Gpu(NamedTuple):
    """A line of nvidia-smi's answer; field names write a point as two underscores."""

    name: str
    compute_cap: str
    driver_version: str
    memory__free: str
    memory__total: str
    clocks__sm: str
    clocks__max__sm: str
    power__limit: str
    power__default_limit: str
    ecc__mode__current: str
    mig__mode__current: str
    compute_mode: str


def findings() -> Iterator[Finding]:
    """Yield findings about the driver, each GPU, and the compiler needed by Triton.

    Of a GPU: capability, memory, clocks, power, ECC, MIG.
    """
    if shutil.which("nvidia-smi") is None:
        yield Finding("NVIDIA driver", "no nvidia-smi", "note", "without a GPU models run on the CPU")
        return
    query = ",".join(field.replace("__", ".") for field in Gpu._fields)
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stdout", "") or str(error)).strip().splitlines()[-1]
        yield Finding("NVIDIA driver", f"nvidia-smi failed: {said}", "fail", "reinstall or restart the driver")
        return
    if in_wsl(KERNEL):
        yield Finding("WSL2", "yes", "note", WSL2)
    for number, line in enumerate(answer.splitlines()):
        yield from of_gpu(f"GPU {number}", Gpu(*(field.strip() for field in line.split(","))))
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        yield Finding("C compiler", "none", "fail", "Triton builds its launchers with one: install gcc")


WSL2 = (
    "the driver of Windows serves the GPU, so install none inside of WSL2; Windows holds a part of the GPU's memory: "
    "lower --gpu-memory-utilization if the engine runs out of it"
)


def in_wsl(kernel: Path) -> bool:
    """Return whether the release in the file ``kernel`` is that of Windows' Linux subsystem."""
    try:
        return "microsoft" in kernel.read_text().lower()
    except OSError:
        return False


def _kernels(what: str, capability: Capability) -> Iterator[Finding]:
    """Say whether kernels ran on this kind of card, and what the card lacks."""
    card = card_of(capability)
    if card is None or unknown(capability):
        return
    lacks = "" if card.float8 else "; no W8A8, no weights and no KV cache in e4m3"
    ran = card.ran and card.capability == capability
    advice = "" if ran else "run preheat verify, which compares the answers of all paths on this card"
    yield Finding(f"{what} kernels", experience(capability) + lacks, "ok" if ran else "note", advice)


def _memory(what: str, gpu: Gpu) -> Finding:
    """Return the free memory, and the memory that other programs hold."""
    found = f"{gpu.memory__free} of {gpu.memory__total} MiB free"
    if not (gpu.memory__free.isdigit() and gpu.memory__total.isdigit()):
        return Finding(f"{what} memory", found)
    taken = int(gpu.memory__total) - int(gpu.memory__free)
    if taken <= max(MUCH, int(gpu.memory__total) // 50):
        return Finding(f"{what} memory", found)
    advice = "other programs, or a display, hold the rest; the engine takes its share of the free memory alone"
    return Finding(f"{what} memory", f"{found}, {taken} MiB taken", "note", advice)


def of_gpu(what: str, gpu: Gpu) -> Iterator[Finding]:
    """Yield the findings about one GPU, called ``what``."""
    major, _, minor = gpu.compute_cap.partition(".")
    capability = int(major), int(minor or 0)
    found = f"{gpu.name}, compute capability {gpu.compute_cap}, driver {gpu.driver_version}"
    if reason := unknown(capability):
        yield Finding(what, found, "fail", f"{reason}: use --device cpu")
    elif int(gpu.driver_version.split(".")[0]) < MIN_DRIVER:
        yield Finding(
            what, found, "note", f"CUDA 13 wants driver {MIN_DRIVER} or later; an older one may not load torch"
        )
    else:
        yield Finding(what, found)
    yield from _kernels(what, capability)
    yield _memory(what, gpu)
    yield Finding(f"{what} clock", f"{gpu.clocks__sm} MHz now, {gpu.clocks__max__sm} MHz at most")
    if gpu.power__limit != gpu.power__default_limit:
        advice = "timings differ from a card at its default limit"
        yield Finding(f"{what} power", f"{gpu.power__limit} W, by default {gpu.power__default_limit} W", "note", advice)
    if gpu.ecc__mode__current == "Disabled":
        yield Finding(f"{what} ECC", "off", "note", "a flipped bit in memory would go unnoticed")
    if gpu.mig__mode__current == "Enabled":
        yield Finding(
            f"{what} MIG", "on", "note", "an instance has fewer multiprocessors: `preheat tune` measures for it"
        )
    if gpu.compute_mode == "Prohibited":
        yield Finding(f"{what} compute mode", gpu.compute_mode, "fail", "nvidia-smi --compute-mode=0 allows it")
