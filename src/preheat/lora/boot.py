"""The steps of a boot for adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from preheat.configs.adapters import lora_modules
from preheat.lora.adapter import read_adapter
from preheat.lora.service import NO_ADAPTERS, Adapters
from preheat.model.adapters import Packed
from preheat.model.loader import LoadedModel
from preheat.settings import Settings

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
    """Return a reader of adapters for ``model``, or for a rank's shard, with adapter slots."""
    slots = model.adapters
    assert slots is not None, "there are no adapter slots"

    def read(name: str, path: str) -> PackedAdapter:
        adapter = read_adapter(
            name, path, model.spec, slots.max_rank, slots.dtype, without_experts=slots.without_experts
        )
        return PackedAdapter(name, adapter.digest, slots.pack(adapter.factors))

    return read


def open_adapters(settings: Settings, model: LoadedModel, share: Callable[[ReadPacked], ReadPacked]) -> Adapters | str:
    """Return the adapters served from the start, or the reason for none.

    ``share`` makes all ranks read the adapters that one rank reads. Raises the errors of reading an adapter.
    """
    slots = model.adapters
    if slots is None:
        return NO_ADAPTERS
    adapters = Adapters(share(adapter_reader(model)), settings.max_cpu_loras or settings.max_loras)
    for module in lora_modules(settings.lora_modules):
        adapter = adapters.serve(module.name, module.path)
        logger.info("Adapter %s from %s: %s", module.name, module.path, adapter.digest)
    logger.info("%d adapter slots of rank %d at most: %.1f MiB", slots.count, slots.max_rank, slots.bytes / 2**20)
    return adapters


def adapter_parts(settings: Settings, adapters: Adapters | str = NO_ADAPTERS) -> dict[str, object]:
    """Return the adapters' part of the key of a boot's caches.

    With ``adapters``, their digests are in it too, for the boot's proof.
    """
    if not settings.enable_lora:
        return {}
    served = {} if isinstance(adapters, str) else {"adapters": adapters.digests}
    sizes = {"places": settings.max_loras, "max_rank": settings.max_lora_rank, "dtype": settings.lora_dtype}
    return {"lora": {**sizes, **served}}
