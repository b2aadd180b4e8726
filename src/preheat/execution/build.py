"""Building packer and executor: one lays a step out, one runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Mode
from preheat.backends.base.layers import LayerRows
from preheat.backends.base.sampling import Sampler
from preheat.execution.buffers import StepBuffers
from preheat.execution.encoder import Encoder, Given
from preheat.execution.executor import Executor
from preheat.execution.grid_encoder import GridEncoder
from preheat.execution.input_batch import Packer
from preheat.execution.kv_cache import KVCache
from preheat.execution.layer_parts import attention_layers, layer_parts
from preheat.execution.mixers import HostRecurrences, Mixers
from preheat.execution.pooler import Pooler
from preheat.execution.sleep import CACHE, sleepable
from preheat.limits import Limits
from preheat.model.decoder import Decoder
from preheat.model.grid_specs import GridVisionSpec
from preheat.model.grid_vision import GridTower, GridVisionWeights
from preheat.model.loader import LoadedModel
from preheat.model.turns import AXES
from preheat.model.vision import VisionTower, VisionWeights
from preheat.model.vision_specs import VisionSpec
from preheat.plan.plan import Plan
from preheat.plan.step_items import EncoderItem, ForwardItem
from preheat.schedule.slots import Slots
from preheat.settings import Settings

Build = Callable[..., tuple[Packer, Executor]]
"""A function like :func:`build`."""

Select = Callable[[Backend, LoadedModel, Plan], None]
"""A function like :func:`select_linear_kernels`."""


def linear_rows(plan: Plan) -> tuple[list[int], list[int]]:
    """Return the row counts of a plan's linear layers, and its head's."""
    rows = sorted({item.bucket.tokens for item in plan.items if isinstance(item, ForwardItem)})
    return rows, [size for size in plan.sampler_sizes if size]


def select_linear_kernels(backend: Backend, model: LoadedModel, plan: Plan) -> None:
    """Choose and prove the kernels of the model's linear layers.

    They are proved at the plan's sizes. Proofs need memory for the largest layer, so this comes before the cache.
    """
    backend.select_kernels(layer_rows(model, plan))


def layer_rows(model: LoadedModel, plan: Plan) -> list[LayerRows]:
    """Return the model's linear layers and experts with their numbers of rows in ``plan``."""
    rows, head_rows = linear_rows(plan)
    linears = [(linear, head_rows if path == "head" else rows) for path, linear in model.weights.linears()]
    return [*linears, *_vision_linears(model, plan)]


def _vision_linears(model: LoadedModel, plan: Plan) -> Iterator[LayerRows]:
    """Yield the linear layers of vision tower and projector.

    Each comes with its numbers of rows.
    """
    spec, weights = model.spec.vision, model.weights.vision
    if spec is None or weights is None:
        return
    if isinstance(spec, GridVisionSpec):
        assert isinstance(weights, GridVisionWeights)
        cells = list(plan.limits.rungs)
        patches = [count * spec.cell_patches for count in cells]
        yield weights.patches, patches
        yield from ((linear, patches) for _, linear in weights.layer_linears())
        yield from ((linear, cells) for _, linear in weights.merger_linears())
        return
    assert isinstance(weights, VisionWeights)
    images = [item.images for item in plan.items if isinstance(item, EncoderItem)]
    yield weights.patches, [count * spec.num_patches for count in images]
    for _, linear in weights.layer_linears():
        yield linear, [count * spec.num_positions for count in images]
    for _, linear in weights.projector.linears():
        yield linear, [count * spec.tokens for count in images]


def _encoder(
    settings: Settings, backend: Backend, model: LoadedModel, limits: Limits, dtype: torch.dtype
) -> Encoder | GridEncoder | None:
    """Return the encoder of images, or of embeddings that are given in ``dtype``.

    None without either.
    """
    spec, weights, size = model.spec.vision, model.weights.vision, model.spec.hidden_size
    if isinstance(spec, GridVisionSpec) and isinstance(weights, GridVisionWeights):
        return GridEncoder(backend, GridTower(spec, weights), limits, size, dtype)
    if isinstance(spec, VisionSpec) and isinstance(weights, VisionWeights):
        return Encoder(backend, VisionTower(spec, weights), limits, size, dtype)
    return Encoder(backend, Given.of(size, dtype), limits, size, dtype) if settings.enable_prompt_embeds else None


class Assembly(NamedTuple):
    """How an engine is built of its model, in a mode.

    ``store`` keeps compiled code. ``num_blocks`` replaces the plan's number of blocks, and there is one state slot.
    ``masked``: rows may have a grammar.
    """

    mode: Mode
    store: Path | None = None
    num_blocks: int | None = None
    masked: bool = False


def build(
    settings: Settings,
    backend: Backend,
    model: LoadedModel,
    plan: Plan,
    slots: Slots,
    *,
    how: Assembly,
    sampler: Sampler | None = None,
    executor: Callable[..., Executor] = Executor,
) -> tuple[Packer, Executor]:
    """Build the packer and the executor of a model, with its cache.

    ``sampler`` is by default the backend's.
    """
    spec, limits = model.spec, plan.limits
    mode, store, num_blocks, masked = how
    blocks = limits.num_blocks if num_blocks is None else num_blocks
    with nullcontext() if num_blocks is not None else sleepable(settings, backend, CACHE):
        cache = KVCache(spec, blocks, limits.block_size, model.dtype, backend.device, groups=limits.groups)
    dtype = backend.activation_dtype(model.dtype)
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs, backend.facts.min_tokens)
    decoder = Decoder(spec, model.weights, limits.max_model_len, backend.regions(mode, store), dtype, max_tokens=tokens)
    layers, contiguous = attention_layers(decoder, cache), settings.contiguous_pa is not False
    norm, others = model.weights.final_norm, [*model.outer_linears, *(each for each, _ in _vision_linears(model, plan))]
    mixes = spec.has_states or any(each.gated for each in spec.attentions)
    if not mixes:  # no layer with a state or gates is a function
        decoder.functions = backend.functions(layer_parts(decoder, layers), norm, others, limits)
    if decoder.functions is None:
        attention = backend.attention(layers, limits, contiguous=contiguous)
    else:
        attention = decoder.functions.attention
    if mixes:
        by = backend.recurrences(limits) or HostRecurrences(backend)  # its table does not sleep
        with nullcontext() if num_blocks is not None else sleepable(settings, backend, CACHE):
            state_slots = 1 if num_blocks is not None else limits.state_slots
            attention = Mixers(attention, decoder, state_slots, dtype=model.dtype, by=by, gate=backend.gated)
    buffers = StepBuffers(limits, attention, backend, AXES if decoder.turns is not None else 0)
    if spec.head is None:
        sampler = Pooler(backend, limits, spec.hidden_size, model.dtype)
    sampler = sampler or backend.sampler(
        limits,
        spec.vocab_size,
        max_logprobs=settings.max_logprobs,
        handle_topk_duplicates=settings.handle_topk_duplicates,
        masked=masked,
    )
    encoder = _encoder(settings, backend, model, limits, dtype)
    per_graph = settings.config_hidden_layers if backend.facts.captures else None  # without graphs a step is one piece
    made = executor(
        backend, decoder, cache, sampler, buffers, encoder=encoder, adapters=model.adapters, layers_per_graph=per_graph
    )
    return Packer(slots, plan, buffers, first=spec.pools_first), made
