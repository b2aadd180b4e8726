"""What runs an engine's steps: the packer that lays a step out, and the executor that runs it."""

from __future__ import annotations

from pathlib import Path

from preheat.backends.base import Backend, Mode
from preheat.execution.buffers import StepBuffers
from preheat.execution.executor import Executor, attention_layers
from preheat.execution.input_batch import Packer
from preheat.execution.kv_cache import KVCache
from preheat.model.decoder import Decoder
from preheat.model.loader import LoadedModel
from preheat.plan.buckets import Bucket
from preheat.plan.plan import Plan
from preheat.schedule.slots import Slots
from preheat.settings import Settings


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
    rows = sorted({item.program.tokens for item in plan.items if isinstance(item.program, Bucket)})
    *layers, head = (linear for _, linear in model.weights.linears())
    backend.settle([*((linear, rows) for linear in layers), (head, [size for size in plan.sampler_sizes if size])])
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
    per_graph = settings.config_hidden_layers if backend.facts.captures else None  # without graphs a step is one piece
    executor = Executor(backend, decoder, cache, sampler, buffers, layers_per_graph=per_graph)
    return Packer(slots, plan, buffers), executor
