"""What runs an engine's steps: the model on its device, the packer that lays a step out, the executor that runs it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from preheat.backends.base import Backend, Mode
from preheat.execution.buffers import StepBuffers
from preheat.execution.executor import Executor, attention_layers
from preheat.execution.input_batch import Packer
from preheat.execution.kv_cache import KVCache
from preheat.model.decoder import Decoder
from preheat.model.files import find_checkpoint, read_config
from preheat.model.loader import Weights, load_weights
from preheat.model.specs import ModelSpec, read_spec, resolve_dtype
from preheat.plan.buckets import Bucket
from preheat.plan.cost import ModelSizes
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots
from preheat.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint, loaded to run in ``dtype``. ``bytes_per_block`` are those of a block of the KV cache."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    dtype_name: str
    weights: Weights
    bytes_per_block: int

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.spec, self.dtype.itemsize)


def load_model(settings: Settings, backend: Backend) -> LoadedModel:
    """The model that the settings name, on the backend's device."""
    folder = find_checkpoint(settings.model, settings.revision, with_weights=settings.load_format != "dummy")
    spec = read_spec(read_config(folder))
    name, remark = resolve_dtype(settings.dtype, spec.dtype, backend.supports_bfloat16())
    if remark:
        logger.info("%s", remark)
    dtype = getattr(torch, name)
    weights = load_weights(spec, folder, dtype, backend, load_format=settings.load_format, seed=settings.seed or 0)
    return LoadedModel(folder, spec, dtype, name, weights, KVCache.bytes_per_block(spec, settings.block_size, dtype))


def build(
    settings: Settings,
    backend: Backend,
    model: LoadedModel,
    plan: Plan,
    slots: Slots,
    *,
    mode: Mode,
    store: Path | None = None,
) -> tuple[Packer, Executor]:
    """The packer and the executor of a model, with its cache. Linear layers are proven before there is a cache."""
    spec, limits = model.spec, plan.limits
    rows = sorted({item.key.tokens for item in plan.items if isinstance(item.key, Bucket)})
    layers = [(linear, rows) for linear in model.weights.layer_linears()]
    backend.settle([*layers, (model.weights.head, [size for size in plan.sampler_sizes if size])])
    cache = KVCache(spec, limits.num_blocks, limits.block_size, model.dtype, backend.device)
    decoder = Decoder(spec, model.weights, limits.max_model_len, backend.regions(mode, store))
    attention = backend.attention(attention_layers(decoder, cache), limits, contiguous=settings.contiguous_pa)
    buffers = StepBuffers(limits, attention, backend)
    sampler = backend.sampler(
        limits,
        spec.vocab_size,
        max_logprobs=settings.max_logprobs,
        handle_topk_duplicates=settings.handle_topk_duplicates,
    )
    executor = Executor(backend, decoder, cache, sampler, buffers, layers_per_graph=settings.config_hidden_layers)
    return Packer(slots, plan, buffers), executor
