"""Wake the GPU while torch is still being imported. No torch here.

Both take about a second, and neither needs the other. The driver builds its context for the process in a thread of its
own; torch finds the context built.
"""

from __future__ import annotations

import ctypes
import os
import threading

from preheat.backends.cuda.device.builders import CREW
from preheat.backends.cuda.device.triton_key import ASKED

DRIVER = "libcuda.so.1"

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink's switch adds in an unknown order, so ranks never use its multicast."""


def wake_gpu(rank: int = 0) -> None:
    """Begin to build the context of the GPU of ``rank``, the number of a visible GPU.

    A failure is left to torch: it will meet the same failure and name its cause. The environment also gets torch's
    BLAS library. torch reads this choice only before its import, and a later choice causes a warning.
    """
    CREW.join()
    os.environ.update(NO_MULTICAST)
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    threading.Thread(target=_wake, args=(rank,), name="wake-gpu", daemon=True).start()


def _wake(rank: int) -> None:
    if _driver() is not None:
        CREW.start_if_cold()
        ASKED.begin()
        build_context(rank)


def rest() -> None:
    """End the processes that only a boot needs."""
    CREW.leave()
    ASKED.leave()


def has_driver() -> bool:
    """Return whether this machine has NVIDIA's driver."""
    return _driver() is not None


def _driver() -> ctypes.CDLL | None:
    """Return the driver's library; None where there is none."""
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        return None


def build_context(number: int = 0) -> bool:
    """Build the context of GPU ``number`` for torch, and wait for it; False without that GPU or a driver."""
    if (driver := _driver()) is None:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), number)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    ]
    return all(getattr(driver, name)(*arguments) == 0 for name, arguments in calls)
