"""What a platform must answer, and the choice of one."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from preheat.errors import SettingsError
from preheat.settings import Settings

logger = logging.getLogger(__name__)


class Platform(Protocol):
    """One kind of device. A platform is a small set of facts; kernels live in :mod:`preheat.ops`."""

    name: str
    device: torch.device
    always_invariant: str | None
    """Why there is nothing faster to choose from where bits may depend on the batch; None where there is."""
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


def check_varying(settings: Settings, platform: Platform) -> None:
    """Say in the log that bits may vary, where ``batch_invariant`` is off. Raises SettingsError where nothing would be
    faster for it.
    """
    if settings.batch_invariant:
        return
    if platform.always_invariant:
        raise SettingsError(
            f"batch_invariant cannot be turned off on {platform.name}: {platform.always_invariant}; leave it at true",
            param="batch_invariant",
        )
    logger.warning("batch_invariant is off: the bits of a request may depend on what shares its batch")


def works_ahead(settings: Settings, platform: Platform) -> bool:
    """Whether the host prepares a step while the device still runs the one before it: ``async_scheduling``.

    Raises SettingsError where that is asked for and the device cannot.
    """
    if settings.async_scheduling and not platform.asynchronous:
        raise SettingsError(
            f"async_scheduling: on {platform.name} a step has ended when its call returns, so there is nothing to work "
            "ahead of; leave it unset",
            param="async_scheduling",
        )
    return platform.asynchronous if settings.async_scheduling is None else settings.async_scheduling
