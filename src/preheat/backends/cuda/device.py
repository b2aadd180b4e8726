"""Detection of a usable NVIDIA GPU, and the fixed arithmetic of cuBLAS. No Triton."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

NEEDED = (9, 0)
"""Compute capability of Hopper: the kernels use its matrix unit and its launches that depend on each other."""

DRIVER = Path("/proc/driver/nvidia/version")


def obstacle() -> str | None:
    """Return why CUDA cannot be used here and how to change that; None where it can."""
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
    """Let cuBLAS keep one fp32 accumulator: no TF32, no sums in bfloat16, no K split among blocks.

    cuBLAS would choose a K split by the number of rows, and a row's bits would depend on the other rows of the batch.
    Only cublasLt can be told not to split; `CudaBackend.prepare` selects it.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_bf16_reduced_precision_reduction = (False, False)


def driver_version() -> str:
    """Return the version of the kernel module."""
    try:
        first = DRIVER.read_text().partition("\n")[0]
    except OSError:
        first = ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", first)
    return found.group() if found else "of unknown version"
