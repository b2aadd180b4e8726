"""The backends by name, and the choice of one. No torch until one is picked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.errors import SettingsError

if TYPE_CHECKING:
    from preheat.backends.base import Backend, Facts

logger = logging.getLogger(__name__)

FACTS: Mapping[str, Facts] = {facts.name: facts for facts in (CPU, CUDA, HPU)}
"""What is known of every platform, by name."""


def facts_of(device: str) -> Facts:
    """What a plan is made for before anybody has looked at the machine: ``auto`` counts as a CPU."""
    return CPU if device == "auto" else FACTS[device]


def wake(device: str) -> None:
    """Begin what takes time and needs no torch, such as waking a GPU, while torch is still being imported."""
    if device != CPU.name:
        from preheat.backends.cuda.early import wake_gpu

        wake_gpu()


def pick_backend(device: str) -> Backend:
    """The backend for ``--device``; ``auto`` takes an NVIDIA GPU where it can be used, and logs why not elsewhere.

    Raises SettingsError, with the reason, where a device is asked for by name and cannot be used.
    """
    if device != CPU.name:
        from preheat.backends.cuda.device import has_gpu, obstacle

        if (reason := obstacle()) is None:
            from preheat.backends.cuda.backend import CudaBackend

            return CudaBackend()
        if device == CUDA.name:
            raise SettingsError(reason, param="device")
        logger.log(logging.INFO if has_gpu() else logging.DEBUG, "Running on the CPU: %s", reason)
    from preheat.backends.cpu.backend import CpuBackend

    return CpuBackend()
