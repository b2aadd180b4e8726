"""The devices visible to a replica of the engine. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from preheat.errors import SettingsError
from preheat.settings import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(settings: Settings, replica: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that show a replica only its own GPUs.

    A replica gets as many GPUs as it has ranks, in the order of the visible GPUs. Empty where there is one engine, or
    it runs on a CPU. Raises SettingsError for too few GPUs.
    """
    size, ranks, given = settings.data_parallel_size, settings.tensor_parallel_size, environment.get(VISIBLE)
    if size == 1 or settings.device not in ("auto", "cuda") or given == "":
        return {}
    listed = [str(number) for number in range(size * ranks)] if given is None else given.split(",")
    if len(listed) < size * ranks:
        raise SettingsError(
            f"{size} replicas of {ranks} ranks need {size * ranks} GPUs, {VISIBLE} names {len(listed)}: lower "
            "--data-parallel-size or --tensor-parallel-size, or name more",
            param="data_parallel_size",
        )
    return {VISIBLE: ",".join(listed[replica * ranks : (replica + 1) * ranks])}
