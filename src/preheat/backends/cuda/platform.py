"""The CUDA platform: one NVIDIA GPU of the Hopper generation or later, the first that the process sees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch

from preheat.backends.cuda.work import SPLIT
from preheat.errors import SettingsError

NEEDED = (9, 0)
"""Compute capability of Hopper: the kernels use its matrix unit and its launches that depend on each other."""

DRIVER = Path("/proc/driver/nvidia/version")


class CUDA:
    """torch and Triton on a GPU. Raises SettingsError, saying what to change, where there is none that can be used."""

    name = "cuda"
    refused: Mapping[str, str] = MappingProxyType(
        {
            "contiguous_pa": "attention reads every block where it lies",
            "defrag_with_graphs": "blocks are swapped operation by operation",
        }
    )
    kv_split = SPLIT
    captures_graphs = True
    asynchronous = True

    def __init__(self) -> None:
        if reason := obstacle():
            raise SettingsError(reason, param="device")
        self.device = torch.device("cuda", 0)
        self._held_before = 0

    @cached_property
    def fingerprint(self) -> str:
        """Name, capability, multiprocessors and memory of the GPU, and its driver."""
        gpu = torch.cuda.get_device_properties(self.device)
        return (
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
            f"{gpu.total_memory / 2**30:.1f} GiB, driver {driver_version()}, CUDA {torch.version.cuda}"
        )

    def free_memory(self) -> int:
        """What the driver can still give; what torch's allocator holds and does not use is not in it."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def used_memory(self) -> int:
        """What the GPU holds above what it held when this process came: graphs and libraries count, unlike in torch's
        own figures, and so does what others take meanwhile.
        """
        return self._held() - self._held_before

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def kv_cache_memory(self) -> int | None:
        """A share of the free memory."""
        return None

    def supports_bfloat16(self) -> bool:
        """True for every GPU that is accepted."""
        return True

    def prepare(self, num_threads: int | None) -> None:
        """Fix what decides bits, and leave the legacy stream, which every other stream would wait for.

        The host's threads are kept to one unless a number is asked for: they would only spin beside the one that
        feeds the GPU.
        """
        torch.set_num_threads(num_threads or 1)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self._held_before = self._held()
        fix_arithmetic()
        if torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:  # see backends/cuda/early.py
            torch.backends.cuda.preferred_blas_library("cublaslt")

    def _held(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


def obstacle() -> str | None:
    """Why CUDA cannot be used here and what to change; None where it can."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA; install its wheel for CUDA, or use --device cpu"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
    found = torch.cuda.get_device_capability(0)
    if found < NEEDED:
        return (
            f"{torch.cuda.get_device_name(0)} has compute capability {found[0]}.{found[1]}, and the kernels need "
            f"{NEEDED[0]}.{NEEDED[1]} (Hopper) or later; name another GPU in CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    if find_spec("triton") is None:
        return "Triton is not installed; install the version that torch asks for, or use --device cpu"
    return None


def has_gpu() -> bool:
    """Whether the system has a driver for an NVIDIA GPU, whatever torch can do with it."""
    return DRIVER.exists()


def fix_arithmetic() -> None:
    """cuBLAS keeps one fp32 accumulator: no TF32, no sums in bfloat16, and K is not split among blocks.

    Splitting K is left to cuBLAS's choice by the number of rows, so a row's bits would depend on its neighbours. Only
    cublasLt can be told not to, see `CUDA.prepare`.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_bf16_reduced_precision_reduction = (False, False)


def driver_version() -> str:
    """The kernel module's version."""
    try:
        first = DRIVER.read_text().partition("\n")[0]
    except OSError:
        first = ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", first)
    return found.group() if found else "of unknown version"
