"""The CUDA backend without a GPU: its kernels run on the host, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from preheat import startup
from preheat.backends.cpu.backend import CpuBackend
from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.matmul.kernels import KernelConfigs
from preheat.backends.cuda.matmul.lora.slots import CudaAdapters
from preheat.backends.cuda.ranks.sharing import CudaSharing


class InterpretedCuda(CudaBackend):
    """The CUDA backend on the host.

    Operations, packer layout and graph driver are CUDA's; memory, copies and settings are the host's. Nothing is
    proven: there is one implementation of a linear layer in the interpreter. To capture a graph, a test needs a
    stand-in for `torch.cuda.CUDAGraph`.
    """

    fingerprint = "Triton's interpreter"
    _pool = None

    free_memory = CpuBackend.free_memory
    used_memory = CpuBackend.used_memory
    peak_memory = CpuBackend.peak_memory
    kv_cache_memory = CpuBackend.kv_cache_memory
    synchronize = CpuBackend.synchronize
    host_copy = CpuBackend.host_copy
    event = CpuBackend.event
    compiling = CpuBackend.compiling
    select_kernels = CpuBackend.select_kernels
    cold_sources = CpuBackend.cold_sources

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.adapters = CudaAdapters(self.device)
        self._configs, self.sharing = KernelConfigs(), CudaSharing(self.device)

    def prepare(self, settings: Any, mode: Any, cache: Any) -> None:
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)


def boot_on(backend: CudaBackend) -> Callable[..., Any]:
    """Boot engines on ``backend``, or on the CPU if their settings name the CPU."""

    def boot(settings: Any, transport: Any) -> Any:
        return startup.boot_engine(settings, transport, backend=None if settings.device == "cpu" else backend)

    return boot
