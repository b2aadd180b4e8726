"""The backends by name, and the choice of one. No torch until one is picked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from preheat.backends.cpu import environment as cpu_environment
from preheat.backends.cpu.facts import FACTS as CPU
from preheat.backends.cuda import environment as cuda_environment
from preheat.backends.cuda.facts import FACTS as CUDA
from preheat.backends.hpu import environment as hpu_environment
from preheat.backends.hpu.detect import detected
from preheat.backends.hpu.facts import FACTS as HPU
from preheat.errors import SettingsError
from preheat.utils.finding import Finding

if TYPE_CHECKING:
    from preheat.backends.base.backend import Backend
    from preheat.backends.base.facts import Facts

logger = logging.getLogger(__name__)

AUTO = "auto"

FACTS: Mapping[str, Facts] = {facts.name: facts for facts in (CPU, CUDA, HPU)}
"""Facts of every platform, by name."""

ENVIRONMENTS: Mapping[str, Callable[[], Iterable[Finding]]] = {
    CPU.name: cpu_environment.findings,
    CUDA.name: cuda_environment.findings,
    HPU.name: hpu_environment.findings,
}
"""Findings for `preheat doctor`, by platform."""


def facts_of(device: str) -> Facts:
    """Return the facts used for a plan before anybody has looked at the machine.

    ``auto`` counts as a CPU, unless there is a Gaudi, visible without torch.
    """
    if device == AUTO:
        return HPU if detected() else CPU
    return FACTS[device]


def wake(device: str, rank: int = 0) -> None:
    """Begin slow work that needs no torch, such as waking a GPU, while torch is still being imported.

    ``rank`` is the number of the device among the devices that the process sees.
    """
    if device in (AUTO, CUDA.name):
        from preheat.backends.cuda.device.early import wake_gpu

        wake_gpu(rank)


def preload(device: str) -> None:
    """Import the modules of a rank on a GPU, where :func:`pick_backend` will most likely pick one."""
    from preheat.backends.cuda.device.early import has_driver

    if device == CUDA.name or (device == AUTO and not detected() and has_driver()):
        import preheat.backends.cuda.backend
        import preheat.backends.cuda.ranks.peer  # noqa: F401


def rest(device: str) -> None:
    """End the processes that only a boot needs; :func:`wake` and the boot started them."""
    if device in (AUTO, CUDA.name):
        from preheat.backends.cuda.device import early

        early.rest()


def pick_backend(device: str, rank: int = 0) -> Backend:
    """Return the backend for ``--device``, on GPU number ``rank``.

    ``auto`` takes a Gaudi or an NVIDIA GPU where it can be used, and warns of a GPU that cannot be used. Raises
    SettingsError, with the reason, if a device is asked for by name and cannot be used.
    """
    if device == HPU.name or (device == AUTO and detected()):
        from preheat.backends.hpu.backend import HpuBackend

        return HpuBackend()
    if device != CPU.name:
        from preheat.backends.cuda.device.detect import has_gpu, obstacle

        if (reason := obstacle(rank)) is None:
            from preheat.backends.cuda.backend import CudaBackend

            return CudaBackend(rank)
        if device == CUDA.name:
            raise SettingsError(reason, param="device")
        level = logging.WARNING if has_gpu() else logging.DEBUG
        logger.log(level, "The GPU is not used, and the model runs on the CPU: %s", reason)
    from preheat.backends.cpu.backend import CpuBackend

    return CpuBackend()
