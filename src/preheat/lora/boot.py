"""What a boot does for adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from preheat.lora.adapter import read_adapter
from preheat.lora.service import NO_ADAPTERS, Adapters
from preheat.model.adapters import Packed
from preheat.model.loader import LoadedModel
from preheat.settings import Settings
from preheat.utils.adapters import lora_modules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedAdapter:
    """See :class:`preheat.schedule.adapters.Adapter`."""

    name: str
    digest: str
    packed: Packed
    source: int | None = None


ReadPacked = Callable[[str, str], PackedAdapter]
"""``read(name, path)``: see :data:`preheat.lora.service.Read`."""


def adapter_reader(model: LoadedModel) -> ReadPacked:
    """What reads adapters for ``model``, or a rank's shard, which has places for them."""
    seats = model.adapters
    assert seats is not None, "there are no places for adapters"

    def read(name: str, path: str) -> PackedAdapter:
        adapter = read_adapter(
            name, path, model.spec, seats.max_rank, seats.dtype, without_experts=seats.without_experts
        )
        return PackedAdapter(name, adapter.digest, seats.pack(adapter.factors))

    return read


def open_adapters(
    settings: Settings, model: LoadedModel, share: Callable[[ReadPacked], ReadPacked] = lambda read: read
) -> Adapters | str:
    """The adapters that are served from the start, or why there are none. ``share`` has all ranks read what one reads.
    Raises what reading one raises.
    """
    seats = model.adapters
    if seats is None:
        return NO_ADAPTERS
    adapters = Adapters(share(adapter_reader(model)), settings.max_cpu_loras or settings.max_loras)
    for module in lora_modules(settings.lora_modules):
        adapter = adapters.serve(module.name, module.path)
        logger.info("Adapter %s from %s: %s", module.name, module.path, adapter.digest)
    logger.info("%d adapter slots of rank %d at most: %.1f MiB", seats.places, seats.max_rank, seats.bytes / 2**20)
    return adapters


def adapter_parts(settings: Settings, adapters: Adapters | str = NO_ADAPTERS) -> dict[str, object]:
    """What a boot's caches depend on; with ``adapters``, for its proof, their digests too."""
    if not settings.enable_lora:
        return {}
    served = {} if isinstance(adapters, str) else {"adapters": adapters.digests}
    sizes = {"places": settings.max_loras, "max_rank": settings.max_lora_rank, "dtype": settings.lora_dtype}
    return {"lora": {**sizes, **served}}
