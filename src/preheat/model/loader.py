"""Loading a model: its spec, then its weights.

Weights come from a checkpoint's files, or are random. Tensors are read one at a time straight to their place on the
device. So there is never a second copy of the model, neither on the device nor on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.collective import Collective
from preheat.backends.names import HOST
from preheat.cache_groups import WHOLE, CacheGroup
from preheat.errors import ModelError
from preheat.model.adapters import ModelAdapterSlots, make_adapter_slots
from preheat.model.config import RunDtype, resolve_dtype
from preheat.model.dummy_tensors import DummyTensors
from preheat.model.files import find_model
from preheat.model.formats import FORMATS, LinearFormat
from preheat.model.kv_scales import identity, resolve_scales, with_kv_dtype
from preheat.model.quantization import bytes_by_scheme
from preheat.model.quantize import quantize
from preheat.model.shard import shard
from preheat.model.sources import Read, SafetensorsFiles, check_tensors
from preheat.model.specs import ModelSpec
from preheat.model.stage import stage_of
from preheat.model.stated import stated_spec
from preheat.model.ties import with_stored_head
from preheat.model.values import check_supported
from preheat.model.weight_loader import WeightLoader
from preheat.model.weights import Weights
from preheat.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint loaded in ``dtype``.

    ``bytes_per_block`` is the size of a block of the KV cache. ``numerics``, plain data, are dtypes and scales of cache
    and linear layers that decide bits, where they are not the model's own. ``adapters`` are the adapter slots of its
    layers; None without. ``formats`` are the formats used for its linear layers. Its cache has ``groups``, and a block
    is for the layers of one group. Where ``spec`` is a part, ``whole`` is the checkpoint's.
    """

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    dtype_name: str
    weights: Weights
    bytes_per_block: int
    numerics: Mapping[str, object] = field(default_factory=dict)
    adapters: ModelAdapterSlots | None = None
    formats: Mapping[str, LinearFormat] = field(default_factory=lambda: FORMATS)
    groups: tuple[CacheGroup, ...] = WHOLE
    whole: ModelSpec | None = None

    @property
    def stored(self) -> ModelSpec:
        """The spec of all that the checkpoint has."""
        return self.whole or self.spec

    @property
    def outer_linears(self) -> list[object]:
        """The linear layers outside of decoder layers and towers."""
        return [self.weights.head]


def load_model(
    settings: Settings,
    backend: Backend,
    collective: Collective | None = None,
    stage: int = 0,
    read: Read | None = None,
) -> LoadedModel:
    """Load the settings' model on the backend's device.

    ``stage`` is the stage to load of a pipeline. With a ``collective`` only its rank's shard is loaded. ``read`` is
    told of each stored tensor that is read.
    """
    folder = find_model(settings, with_weights=settings.load_format != "dummy")
    spec, name, remark = _stated(settings, backend, folder)
    if remark:
        logger.info("%s", remark)
    dtype: torch.dtype = getattr(torch, name)
    if spec.tied and settings.load_format != "dummy":
        spec = with_stored_head(spec, SafetensorsFiles(folder, plain_copy, spec.renames), dtype)
    spec, quantized = quantize(settings, with_kv_dtype(spec, settings.kv_cache_dtype, name), backend.facts)
    if settings.kv_cache_dtype != "fp8_inc":
        spec = _with_scales(settings, folder, spec)
    whole = spec
    spec = stage_of(spec, stage, settings.pipeline_parallel_size)
    if collective is not None:
        spec = shard(spec, collective.rank, collective.world)
    check_supported(spec, name, backend.supports)
    adapter_slots = make_adapter_slots(settings, backend, name)
    sizes = bytes_by_scheme(spec, backend.facts, dtype.itemsize)
    _check_room(sum(sizes.values()), dtype, backend.free_memory())
    scales: list[str] = []
    weights = load_weights(
        whole, folder, dtype, backend,
        Reading(settings.load_format, settings.seed or 0, settings.weights_load_device == HOST, read),
        formats=quantized.formats, scales=scales, collective=collective, adapter_slots=adapter_slots,
        stage=(stage, settings.pipeline_parallel_size),
    )  # fmt: skip
    bytes_per_block = (settings.block_size or backend.facts.block_size) * spec.kv_bytes_per_token(dtype.itemsize)
    kv = identity(spec)
    sizes = bytes_by_scheme(whole, backend.facts, dtype.itemsize)
    numerics = {**quantized.numerics, **_numerics(sizes, scales), **({"kv_cache": kv} if kv else {})}
    return LoadedModel(
        folder, spec, dtype, name, weights, bytes_per_block, numerics, adapter_slots, quantized.formats, whole=whole
    )


def _with_scales(settings: Settings, folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the checkpoint's scales of the KV cache."""
    if settings.load_format == "dummy":
        return resolve_scales(spec, (), lambda _: 1.0)
    files = SafetensorsFiles(folder, plain_copy, spec.renames)

    def read(name: str) -> float:
        if prod(files.shapes[name]) != 1:
            raise ModelError(
                f"tensor {name} has shape {list(files.shapes[name])}: only one scale for each layer is supported"
            )
        scale = torch.empty(files.shapes[name], dtype=torch.float32)
        files.fill(name, scale)
        return scale.item()

    return resolve_scales(spec, files.shapes, read)


def _numerics(sizes: Mapping[str, int], scales: Sequence[str]) -> dict[str, object]:
    """Return the bytes and scales that decide a quantized checkpoint's bits.

    Empty for another checkpoint.
    """
    return {"weights": {"bytes": dict(sizes), "scales": list(scales)}} if len(sizes) > 1 else {}


def obstacle(settings: Settings, backend: Backend) -> str | None:
    """Return why the backend cannot run a layer of the settings' model, by its config.json alone; None if it can."""
    spec, name, _ = _stated(settings, backend, find_model(settings, with_weights=False))
    spec, _ = quantize(settings, with_kv_dtype(spec, settings.kv_cache_dtype, name), backend.facts)
    try:
        check_supported(spec, name, backend.supports)
    except ModelError as error:
        return str(error)
    return None


def _stated(settings: Settings, backend: Backend, folder: Path) -> tuple[ModelSpec, RunDtype, str | None]:
    """Return the model that the ``folder`` states, the dtype in which it runs, and a remark on the dtype."""
    spec = stated_spec(settings, folder)
    return spec, *resolve_dtype(settings.dtype, spec.dtype, backend.supports_bfloat16(), float16=backend.facts.float16)


def _check_room(needed: int, dtype: torch.dtype, free: int) -> None:
    """Raise ModelError if ``needed`` bytes do not fit into ``free``.

    Called before any allocation.
    """
    if needed > free:
        raise ModelError(
            f"the weights take {needed / 2**30:,.1f} GiB and {free / 2**30:,.1f} GiB of memory are free: free some, or "
            "use a smaller model" + (" or --dtype bfloat16" if dtype.itemsize > 2 else "")
        )


class Reading(NamedTuple):
    """How tensors are read: from a checkpoint, or with the ``load_format`` dummy at random from ``seed``.

    ``on_host``: each layer is read and prepared on the host, and then copied to the device in its final form. ``read``
    is told of each stored tensor that is read.
    """

    load_format: str = "auto"
    seed: int = 0
    on_host: bool = False
    read: Read | None = None


READING = Reading()


def load_weights(
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    backend: Backend,
    how: Reading = READING,
    *,
    formats: Mapping[str, LinearFormat] = FORMATS,
    scales: list[str] | None = None,
    collective: Collective | None = None,
    adapter_slots: ModelAdapterSlots | None = None,
    stage: tuple[int, int] = (0, 1),
) -> Weights:
    """Return the weights of ``spec`` in ``dtype`` on the backend's device.

    They are read from ``directory``, or drawn at random. Linear layers may be stored in any of the ``formats``. If the
    checkpoint has scales, a digest of them is appended to ``scales``. With a ``collective`` only its rank's shard is
    read and returned. Linear layers get ``adapter_slots``. ``stage`` is the number of a pipeline's stage and the number
    of stages.

    Raises ModelError, naming the tensors, if any is missing, unexpected or of the wrong shape.
    """
    mine = stage_of(spec, *stage)
    if collective is not None:
        mine = shard(mine, collective.rank, collective.world)
    if how.load_format == "dummy":
        source, from_host = DummyTensors(how.seed), how.on_host and plain_copy
        return WeightLoader(
            source, dtype, backend, formats, from_host=from_host, collective=collective, adapter_slots=adapter_slots
        ).model(mine)
    if how.load_format not in ("auto", "safetensors"):
        message = f"load format {how.load_format!r} is not supported; use auto, safetensors or dummy"
        raise ModelError(message, param="load_format")
    with backend.uploading() as upload:
        copy = plain_copy if how.on_host else upload
        files = SafetensorsFiles(directory, copy, spec.renames, folders=spec.folders, read=how.read, task=spec.task)
        check_tensors(spec, files.shapes, formats)
        weights = WeightLoader(
            files,
            dtype,
            backend,
            formats,
            from_host=how.on_host and upload,
            collective=collective,
            adapter_slots=adapter_slots,
        ).model(mine)
        files.check_finite()
        if scales is not None and files.scales_digest is not None:
            scales.append(files.scales_digest)
        return weights


def plain_copy(source: Tensor, out: Tensor) -> None:
    """Copy a stored tensor to its destination, on the host or to a device."""
    out.copy_(source)
