"""The two boots, in order: of the engine (device, weights, cache, loop) and of the front door (tokenizer, template).

The front door's process never imports torch, so everything that needs it is imported inside :func:`boot_engine`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from preheat.core import Died, Ready, ToEngine
from preheat.engine.frontdoor import FrontDoor
from preheat.engine.mailbox import ProcessMailbox
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.metrics import Metrics, explain, set_up_logging
from preheat.model.files import find_checkpoint, read_config
from preheat.model.spec import ModelSpec, read_spec, resolve_dtype
from preheat.ops.tiles import SPLIT
from preheat.plan import commands, lines
from preheat.plan.cost import MACHINES, Costs, ModelSizes
from preheat.plan.modes import resolve
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.text.template import ChatTemplate
from preheat.text.tokenizer import Tokenizer
from preheat.trace import open_trace

if TYPE_CHECKING:
    from preheat.device.base import Platform
    from preheat.engine.loop import EngineSide, Loop

logger = logging.getLogger(__name__)

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 256


def boot_front(
    settings: Settings, send: Callable[[ToEngine], None], metrics: Metrics | None = None
) -> tuple[FrontDoor, ChatTemplate]:
    """Everything that speaks text. ``send`` hands a message to the engine."""
    folder = find_checkpoint(settings.model, settings.revision, with_weights=False)
    tokens = find_checkpoint(settings.tokenizer, with_weights=False) if settings.tokenizer else folder
    tokenizer = Tokenizer(tokens, folder)
    door = FrontDoor(
        tokenizer,
        send,
        max_logprobs=settings.max_logprobs,
        max_queued=settings.max_queued_requests,
        metrics=metrics,
    )
    return door, ChatTemplate(tokenizer, settings.chat_template)


def planned(settings: Settings, *, as_json: bool = False) -> str:
    """The plan of these settings, as text or as JSON, from the model's config alone: no weights, no torch.

    The device is not looked at: it counts as one that computes in bfloat16 and has room for every sequence.
    """
    spec = read_spec(read_config(find_checkpoint(settings.model, settings.revision, with_weights=False)))
    dtype, _ = resolve_dtype(settings.dtype, spec.dtype, native_bfloat16=True)
    device = "cpu" if settings.device == "auto" else settings.device
    return commands.plan(settings, spec, spec.max_position_embeddings, dtype=dtype, device=device, as_json=as_json)


def boot_engine(settings: Settings, mailbox: EngineSide) -> Loop:
    """Device, weights, limits, cache, loop; then tell the mailbox that it can run.

    Raises SettingsError or ModelError, saying what to change.
    """
    started = time.monotonic()
    explain(settings.debug)
    trace = open_trace(settings.profiler_enabled)
    with trace.span("import torch"):
        import torch

    from preheat.batch.pack import Packer
    from preheat.device.base import pick_platform
    from preheat.engine.loop import Loop
    from preheat.engine.observe import trace_steps, with_step_log
    from preheat.execute.compile import builder, compile_seconds
    from preheat.execute.executor import Executor
    from preheat.execute.kv_cache import KVCache
    from preheat.execute.sampler import Sampler
    from preheat.model.decoder import Decoder
    from preheat.model.weights import load_weights
    from preheat.warmup.guard import Guard
    from preheat.warmup.record import Record
    from preheat.warmup.run import WarmUp

    platform = pick_platform(settings.device)
    platform.prepare(settings.num_threads)
    mode = resolve(platform.name, settings)
    build = builder(mode)
    folder = find_checkpoint(settings.model, settings.revision, with_weights=settings.load_format != "dummy")
    spec = read_spec(read_config(folder))
    name = _dtype_name(settings, spec, platform)
    dtype = getattr(torch, name)
    with trace.span("load weights"):
        weights = load_weights(spec, folder, dtype, settings.load_format, settings.seed)
    bytes_per_block = KVCache.bytes_per_block(spec, settings.block_size, dtype)
    limits = resolve_limits(settings, spec, platform, bytes_per_block)
    sizes = ModelSizes.of(spec, dtype.itemsize)
    with trace.span("plan"):
        plan = make_plan(limits, PlanOptions.of(settings), Costs(sizes, MACHINES[platform.name], limits.block_size))
    for phase in plan.phases:
        logger.info("%s", lines.bucket_config(phase))
        logger.info("%s", lines.generated(phase.phase, plan.table.phases[phase.phase].shapes))
    scheduler = _scheduler(settings, limits, plan)
    with trace.span("cache", blocks=limits.num_blocks):
        cache = KVCache(spec, limits.num_blocks, limits.block_size, dtype, platform.device)
    sampler = Sampler(limits.max_num_seqs, spec.vocab_size, handle_topk_duplicates=settings.handle_topk_duplicates)
    executor = Executor(Decoder(spec, weights, limits.max_model_len, build), cache, sampler)
    record = Record.of(plan, model=settings.model, platform=platform.name, dtype=name, mode=mode)
    packer = Packer(scheduler.slots, spec, dtype, plan, settings.contiguous_pa)
    if not settings.skip_warmup:
        WarmUp(
            plan, packer, executor, platform, record, say=mailbox.put, compiled=compile_seconds, span=trace.span
        ).run()
    observer = with_step_log(settings, mode, Guard(record, plan, settings.on_cold))
    loop = Loop(mailbox, scheduler, packer, executor, observer)
    trace_steps(trace, loop)
    seconds = time.monotonic() - started
    logger.info(
        "%s on %s, %s, in %s: %d blocks of %d tokens (%.2f GiB), at most %d sequences of %d tokens; ready after %.1f s",
        settings.model, platform.name, mode, name, limits.num_blocks, limits.block_size,
        limits.num_blocks * bytes_per_block / 2**30, limits.max_num_seqs, limits.max_model_len, seconds,
    )  # fmt: skip
    mailbox.put(Ready(limits.max_model_len, limits.num_blocks, limits.block_size, seconds, record.to_json()))
    return loop


def _dtype_name(settings: Settings, spec: ModelSpec, platform: Platform) -> str:
    name, remark = resolve_dtype(settings.dtype, spec.dtype, platform.supports_bfloat16())
    if remark:
        logger.info("%s", remark)
    return name


def _scheduler(settings: Settings, limits: Limits, plan: Plan) -> Scheduler:
    """Only unified batches are compacted, as the source has it."""
    unified = settings.bucketing_policy == "unified"
    return Scheduler(
        limits,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        mixed_steps=unified,
        padded=plan.padded,
        defrag_threshold=settings.defrag_threshold if unified else None,
    )


def resolve_limits(settings: Settings, spec: ModelSpec, platform: Platform, bytes_per_block: int) -> Limits:
    """What is possible: the model's length, and the blocks that the memory left after loading the weights holds."""
    length = settings.max_model_len or spec.max_position_embeddings
    if length > spec.max_position_embeddings:
        raise SettingsError(
            f"max_model_len {length} exceeds the {spec.max_position_embeddings} positions that the model was made for",
            param="max_model_len",
        )
    if not MIN_BLOCK_SIZE <= settings.block_size <= MAX_BLOCK_SIZE:
        raise SettingsError(
            f"block_size must be from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, got {settings.block_size}",
            param="block_size",
        )
    if settings.contiguous_pa and settings.block_size != SPLIT:
        raise SettingsError(
            f"contiguous_pa reads whole blocks of {SPLIT} tokens, and block_size is {settings.block_size}: set "
            f"block_size to {SPLIT}, or contiguous_pa to false",
            param="contiguous_pa",
        )
    if settings.defrag_with_graphs and platform.name == "cpu":
        raise SettingsError(
            "defrag_with_graphs: there are no graphs on a CPU; leave it unset, or set it to false",
            param="defrag_with_graphs",
        )
    return Limits(
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_prefill_seqs=settings.max_num_prefill_seqs,
        block_size=settings.block_size,
        num_blocks=_num_blocks(settings, platform, bytes_per_block, length),
    )


def _num_blocks(settings: Settings, platform: Platform, bytes_per_block: int, length: int) -> int:
    """Blocks of the cache, the pad block included; never more than all sequences at full length could hold."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    usable = int(platform.free_memory() * settings.gpu_memory_utilization)
    asked = settings.kv_cache_memory_bytes or min(platform.kv_cache_memory() or usable, usable)
    if asked > usable:
        raise SettingsError(
            f"kv_cache_memory_bytes {asked} is more than the {usable} bytes that gpu_memory_utilization "
            f"{settings.gpu_memory_utilization} of the free memory allows",
            param="kv_cache_memory_bytes",
        )
    most = settings.max_num_seqs * -(-length // settings.block_size) + 1
    return min(asked // bytes_per_block, most)


def run_engine(settings: Settings, address: str) -> None:
    """The engine's process: boot, say so, run until drained. A fatal error is told to the front door, then raised."""
    set_up_logging(settings.log_level)
    mailbox = ProcessMailbox(address)
    try:
        boot_engine(settings, mailbox).run()
    except BaseException as error:
        mailbox.put(Died(f"{type(error).__name__}: {error}"))
        raise
    finally:
        mailbox.close()
