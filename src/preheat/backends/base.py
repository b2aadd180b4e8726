"""What a platform must answer, and the choice of one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import torch

from preheat.errors import SettingsError

logger = logging.getLogger(__name__)


class Platform(Protocol):
    """One kind of device. A platform is a small set of facts; kernels live in :mod:`preheat.ops`."""

    name: str
    device: torch.device
    refused: Mapping[str, str]
    """Options that must stay at their default here, each with the reason (see `preheat.limits.check_options`)."""
    kv_split: int
    """Tokens of the context that attention reads as one unit."""
    captures_graphs: bool
    """Whether programs can be captured as graphs; if not, execution mode graphs counts what they would take."""
    asynchronous: bool
    """Whether the device goes on by itself after a call returns, so that the host can work ahead of it."""

    @property
    def fingerprint(self) -> str:
        """All that tells this device from another one whose compiled code or bits may differ."""

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
    """The platform for ``--device``; ``auto`` takes CUDA where it can be used, and says in the log why not elsewhere.

    Raises SettingsError, with the reason, where ``cuda`` is asked for and cannot be used.
    """
    if device != "cpu":
        from preheat.backends.cuda.platform import CUDA, has_gpu

        try:
            return CUDA()
        except SettingsError as error:
            if device == "cuda":
                raise
            logger.log(logging.INFO if has_gpu() else logging.DEBUG, "Running on the CPU: %s", error)
    from preheat.backends.cpu.platform import CPU

    return CPU()
