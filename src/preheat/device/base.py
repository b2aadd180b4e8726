"""What a platform must answer, and the choice of one."""

from __future__ import annotations

from typing import Protocol

import torch

from preheat.errors import SettingsError


class Platform(Protocol):
    """One kind of device. A platform is a small set of facts; kernels live in :mod:`preheat.ops`."""

    name: str
    device: torch.device

    def free_memory(self) -> int:
        """Bytes that may still be allocated on the device."""

    def used_memory(self) -> int:
        """Bytes that this process holds on the device."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told."""

    def kv_cache_memory(self) -> int | None:
        """Bytes of KV cache when nobody asked for a size; None means a share of the free memory."""

    def supports_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16 natively."""

    def prepare(self, num_threads: int | None) -> None:
        """Set process-wide state once, before anything is computed."""


def pick_platform(device: str) -> Platform:
    """The platform for ``--device``; ``auto`` picks the best one that preheat has kernels for."""
    if device not in ("auto", "cpu"):
        raise SettingsError(f"--device {device} is not supported yet; use --device cpu", param="device")
    from preheat.device.cpu import CPU

    return CPU()
