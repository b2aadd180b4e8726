"""Detection of a usable NVIDIA GPU, and the fixed arithmetic of cuBLAS. No Triton."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

from preheat.backends.cuda.device.card import PORTABLE, Card, card_of, text, unknown

DRIVER = Path("/proc/driver/nvidia/version")


def obstacle(rank: int = 0) -> str | None:
    """Return why GPU number ``rank`` cannot be used here and how to change that; None where it can."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA; install its wheel for CUDA, or use --device cpu"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
    number = min(rank, torch.cuda.device_count() - 1)
    found = torch.cuda.get_device_capability(number)
    if reason := unknown(found):
        return (
            f"{torch.cuda.get_device_name(number)} has compute capability {text(found)}, and {reason}; name another "
            "GPU in CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    if find_spec("triton") is None:
        return "Triton is not installed; install the version that torch asks for, or use --device cpu"
    return None


def card_at(device: torch.device | None = None) -> Card:
    """Return the card of ``device``, by default of the current GPU, with its own memory and processors.

    Triton's interpreter has no GPU: kernels get the card for choices without one.
    """
    if device is not None and device.type != "cuda":
        return PORTABLE
    found = card_of(torch.cuda.get_device_capability(device))
    assert found is not None, "obstacle refuses other cards"
    gpu = torch.cuda.get_device_properties(device)
    shared = min(getattr(gpu, "shared_memory_per_block_optin", found.shared_bytes), found.shared_bytes)
    return found._replace(shared_bytes=shared, processors=gpu.multi_processor_count)


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
