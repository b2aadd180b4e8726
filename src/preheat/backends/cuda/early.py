"""Wake the GPU while torch is still being imported: both take about a second, and neither needs the other. No torch
here.

The driver builds its context for the process in a thread of its own; torch finds it built.
"""

from __future__ import annotations

import ctypes
import os
import threading

DRIVER = "libcuda.so.1"


NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Sums in NVLink's switch have an order that nobody knows, so ranks never use its multicast."""


def wake_gpu() -> None:
    """Begin to build the first GPU's context. A failure is left to torch, which will meet the same and say why.

    torch is told which of NVIDIA's libraries to multiply with: it only listens to this before it is imported, and
    warns that the choice is new when it is told later.
    """
    os.environ.update(NO_MULTICAST)
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    threading.Thread(target=build_context, name="wake-gpu", daemon=True).start()


def build_context() -> bool:
    """Build the context that torch will use, and wait for it; False where there is no GPU or no driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    ]
    return all(getattr(driver, name)(*arguments) == 0 for name, arguments in calls)
