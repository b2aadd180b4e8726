"""What runs a platform's steps: the model on its device, the packer that lays a step out, the executor that runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from preheat.backends.base import Platform
from preheat.backends.cpu.compile import builder
from preheat.execution.kv_cache import KVCache
from preheat.model.decoder import Decoder, project
from preheat.model.files import find_checkpoint, read_config
from preheat.model.loader import MakeLinear, Weights, load_weights
from preheat.model.specs import ModelSpec, read_spec, resolve_dtype
from preheat.plan.cost import ModelSizes
from preheat.plan.items import ForwardItem
from preheat.plan.modes import Mode
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from preheat.warmup.store import cache_root

if TYPE_CHECKING:
    from preheat.execution.device_executor import DeviceExecutor
    from preheat.execution.executor import Executor
    from preheat.execution.flat import FlatPacker
    from preheat.execution.pack import Packer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A checkpoint, loaded to run in ``dtype``. ``bytes_per_block`` are those of a block of the KV cache."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    dtype_name: str
    weights: Weights
    bytes_per_block: int

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.spec, self.dtype.itemsize)


def load_model(settings: Settings, platform: Platform) -> Model:
    """The model that the settings name, on the platform's device."""
    folder = find_checkpoint(settings.model, settings.revision, with_weights=settings.load_format != "dummy")
    spec = read_spec(read_config(folder))
    name, remark = resolve_dtype(settings.dtype, spec.dtype, platform.supports_bfloat16())
    if remark:
        logger.info("%s", remark)
    dtype = getattr(torch, name)
    make_linear = _linear_on_device(settings) if platform.name == "cuda" else None
    weights = load_weights(
        spec,
        folder,
        dtype,
        settings.load_format,
        settings.seed or 0,
        device=platform.device,
        make_linear=make_linear,
    )
    return Model(folder, spec, dtype, name, weights, KVCache.bytes_per_block(spec, settings.block_size, dtype))


def _linear_on_device(settings: Settings) -> MakeLinear:
    from preheat.backends.cuda.linear import CudaLinear
    from preheat.backends.cuda.tuning import choices

    device, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    chosen = choices(device, capability, cache_root(settings), invariant=settings.batch_invariant)
    return partial(CudaLinear, choices=chosen)


def on_host(
    settings: Settings, model: Model, plan: Plan, slots: Slots, *, mode: Mode, store: Path | None
) -> tuple[Packer, Executor]:
    """A CPU's packer and executor, which computes when it is called."""
    from preheat.backends.cpu.sampler import Sampler
    from preheat.execution.executor import Executor
    from preheat.execution.pack import Packer

    limits = plan.limits
    cache = KVCache(model.spec, limits.num_blocks, limits.block_size, model.dtype, model.device)
    decoder = Decoder(model.spec, model.weights, limits.max_model_len, builder(mode, store))
    sampler = Sampler(limits.max_num_seqs, model.spec.vocab_size, settings.handle_topk_duplicates)
    packer = Packer(slots, model.spec, model.dtype, plan, settings.contiguous_pa)
    return packer, Executor(decoder, cache, sampler)


def on_device(
    settings: Settings, model: Model, plan: Plan, slots: Slots, *, mode: Mode, store: Path | None
) -> tuple[FlatPacker, DeviceExecutor]:
    """Those of a device that works on while the host does, by programs over static buffers."""
    from preheat.backends.cuda.attention import prefill_how, query_tile
    from preheat.backends.cuda.sampler import DeviceSampler
    from preheat.backends.cuda.work import SPLIT
    from preheat.execution.buffers import StepBuffers
    from preheat.execution.device_executor import DeviceExecutor
    from preheat.execution.flat import FlatPacker

    spec, limits = model.spec, plan.limits
    _settle_linear(model.weights, plan)
    windows = sorted(set(spec.layer_windows), key=lambda window: window or 0)
    tile = query_tile(spec.num_heads, spec.num_kv_heads, prefill_how(spec.head_dim, model.dtype))
    buffers = StepBuffers(limits, tile=tile, split=SPLIT, windows=windows, device=model.device)
    cache = KVCache(spec, limits.num_blocks, limits.block_size, model.dtype, model.device)
    decoder = Decoder(spec, model.weights, limits.max_model_len, builder(mode, store), before=project)
    sampler = DeviceSampler(
        limits.max_num_seqs,
        spec.vocab_size,
        model.device,
        limits.max_num_seqs,
        settings.handle_topk_duplicates,
        most_logprobs=min(settings.max_logprobs, spec.vocab_size),
    )
    return FlatPacker(slots, plan, buffers), DeviceExecutor(
        decoder, cache, sampler, buffers, settings.config_hidden_layers
    )


def _settle_linear(weights: Weights, plan: Plan) -> None:
    """Which kernel serves each linear map at each size of the plan, proven before there is a cache. Off a GPU, where
    only Triton's interpreter runs these kernels, there is nothing to prove.
    """
    if not weights.embedding.is_cuda:
        return
    from preheat.backends.cuda.prove import settle

    rows = sorted({item.bucket.tokens for item in plan.items if isinstance(item, ForwardItem)})
    maps: list[Any] = [m for layer in weights.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    head: Any = weights.head
    settle(maps, rows, head, [size for size in plan.sampler_sizes if size])


RUNNERS: dict[str, Callable[..., tuple[Any, Any]]] = {"cpu": on_host, "cuda": on_device}
"""By platform."""
