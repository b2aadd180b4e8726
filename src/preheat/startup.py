"""The two boots, in order: of the engine (device, weights, cache, loop) and of the front door (tokenizer, template).

The front door's process never imports torch, so everything that needs it is imported inside :func:`boot_engine`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core import Died, Ready, ToEngine
from preheat.engine.frontdoor import FrontDoor
from preheat.engine.mailbox import ProcessMailbox
from preheat.errors import SettingsError
from preheat.limits import Limits
from preheat.metrics import Metrics, set_up_logging
from preheat.model.files import find_checkpoint, read_config, weight_files
from preheat.model.spec import ModelSpec, read_spec, resolve_dtype
from preheat.plan import lines
from preheat.plan.cost import MACHINES, Costs, ModelSizes
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.settings import Settings
from preheat.text.template import ChatTemplate
from preheat.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from preheat.device.base import Platform
    from preheat.engine.loop import EngineSide, Loop
    from preheat.warmup.guard import Guard
    from preheat.warmup.record import Record
    from preheat.warmup.run import WarmUp
    from preheat.warmup.steps import Steps
    from preheat.warmup.store import Store

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


def boot_engine(settings: Settings, mailbox: EngineSide) -> Loop:
    """Device, weights, limits, cache, loop; then tell the mailbox that it can run.

    Raises SettingsError or ModelError, saying what to change.
    """
    started = time.monotonic()
    import torch

    from preheat.batch.pack import Packer
    from preheat.device.base import pick_platform
    from preheat.engine.loop import Loop
    from preheat.execute.executor import Executor
    from preheat.execute.kv_cache import KVCache
    from preheat.execute.sampler import Sampler
    from preheat.model.decoder import Decoder
    from preheat.model.weights import load_weights
    from preheat.schedule.scheduler import Scheduler
    from preheat.warmup.graphs import GRAPHS, capture_twin, divide_memory
    from preheat.warmup.record import Record
    from preheat.warmup.run import WarmUp
    from preheat.warmup.steps import Steps

    platform = pick_platform(settings.device)
    platform.prepare(settings.num_threads)
    mode = "eager"
    steps = Steps(platform, started)
    folder = find_checkpoint(settings.model, settings.revision, with_weights=settings.load_format != "dummy")
    spec = read_spec(read_config(folder))
    name = _dtype_name(settings, spec, platform)
    dtype = getattr(torch, name)
    with steps("Loading model weights"):
        weights = load_weights(spec, folder, dtype, settings.load_format, settings.seed)
    bytes_per_block = KVCache.bytes_per_block(spec, settings.block_size, dtype)
    split = divide_memory(settings, mode, platform.free_memory(), bytes_per_block)
    limits = resolve_limits(settings, spec, platform, bytes_per_block, split.cache)
    sizes = ModelSizes.of(spec, dtype.itemsize)
    store = open_store(settings, folder, limits, platform, dtype=name, mode=mode)
    plan = _plan(settings, limits, Costs(sizes, MACHINES[platform.name], limits.block_size, store.costs()))
    scheduler = Scheduler(
        limits,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        mixed_steps=settings.bucketing_policy == "unified",
        padded=plan.padded,
    )
    with steps("Initializing cache engine"):
        cache = KVCache(spec, limits.num_blocks, limits.block_size, dtype, platform.device)
    sampler = Sampler(limits.max_num_seqs, spec.vocab_size, handle_topk_duplicates=settings.handle_topk_duplicates)
    executor = Executor(Decoder(spec, weights, limits.max_model_len), cache, sampler)
    record = Record.of(plan, model=settings.model, platform=platform.name, dtype=name, fingerprint=store.fingerprint)
    packer = Packer(scheduler.slots, spec, dtype, plan)
    warm = WarmUp(plan, packer, executor, platform, record, say=mailbox.put, reused=store.reused())
    graphs = partial(capture_twin, plan, record, settings, split=split, sizes=sizes, block_bytes=bytes_per_block)
    guard = _heat(settings, warm, graphs if mode == GRAPHS else None, store, steps)
    loop = Loop(mailbox, scheduler, packer, executor, guard)
    seconds = time.monotonic() - started
    _say_ready(record, limits, bytes_per_block, seconds)
    mailbox.put(Ready(limits.max_model_len, limits.num_blocks, limits.block_size, seconds, record.to_json()))
    return loop


def _dtype_name(settings: Settings, spec: ModelSpec, platform: Platform) -> str:
    name, remark = resolve_dtype(settings.dtype, spec.dtype, platform.supports_bfloat16())
    if remark:
        logger.info("%s", remark)
    return name


def _say_ready(record: Record, limits: Limits, bytes_per_block: int, seconds: float) -> None:
    logger.info(
        "%s on %s in %s: %d blocks of %d tokens (%.2f GiB), at most %d sequences of %d tokens; ready after %.1f s",
        record.model, record.platform, record.dtype, limits.num_blocks, limits.block_size,
        limits.num_blocks * bytes_per_block / 2**30, limits.max_num_seqs, limits.max_model_len, seconds,
    )  # fmt: skip


def _plan(settings: Settings, limits: Limits, costs: Costs) -> Plan:
    plan = make_plan(limits, PlanOptions.of(settings), costs)
    for phase in plan.phases:
        logger.info("%s", lines.bucket_config(phase))
        logger.info("%s", lines.generated(phase.phase, plan.table.phases[phase.phase].shapes))
    logger.info("%s", lines.cache_blocks(limits.num_blocks))
    return plan


def _heat(settings: Settings, warm: WarmUp, graphs: Callable[[], object] | None, store: Store, steps: Steps) -> Guard:
    """Warm up, capture ``graphs``, leave the record to the next boot; from then on the guard watches."""
    from preheat.warmup.guard import Guard
    from preheat.warmup.sources import sources_for

    if not settings.skip_warmup:
        with steps("warm-up"):
            warm.run()
    if graphs is not None:  # as in the source, also where warm-up is skipped
        graphs()
    warm.record.steps = steps.done
    if not settings.skip_warmup:
        store.save(warm.record)
    return Guard(warm.record, warm.plan, settings.on_cold, sources_for(warm.platform.name))


def open_store(settings: Settings, folder: Path, limits: Limits, platform: Platform, *, dtype: str, mode: str) -> Store:
    """What an earlier boot like this one has left."""
    import torch

    from preheat.warmup.store import Store, boot_parts, cache_root, fingerprint

    parts = boot_parts(
        folder,
        [] if settings.load_format == "dummy" else weight_files(folder),
        make_plan(limits, PlanOptions.of(settings)),
        dtype=dtype,
        device=(platform.name, torch.backends.cpu.get_cpu_capability()),
        threads=torch.get_num_threads(),
        mode=mode,
    )
    return Store(cache_root(settings), fingerprint(parts))


def resolve_limits(
    settings: Settings, spec: ModelSpec, platform: Platform, bytes_per_block: int, usable: int
) -> Limits:
    """What is possible: the model's length, and the blocks that fit into the ``usable`` bytes of memory."""
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
    return Limits(
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_prefill_seqs=settings.max_num_prefill_seqs,
        block_size=settings.block_size,
        num_blocks=_num_blocks(settings, platform, bytes_per_block, length, usable),
    )


def _num_blocks(settings: Settings, platform: Platform, bytes_per_block: int, length: int, usable: int) -> int:
    """Blocks of the cache, the pad block included; never more than all sequences at full length could hold."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    asked = settings.kv_cache_memory_bytes or min(platform.kv_cache_memory() or usable, usable)
    if asked > usable:
        raise SettingsError(
            f"kv_cache_memory_bytes {asked} is more than the {usable} bytes that gpu_memory_utilization "
            f"{settings.gpu_memory_utilization} of the free memory, less what graphs reserve, allows",
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
