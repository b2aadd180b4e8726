"""The boot of an engine, in order: device, weights, memory, limits, plan, cache, warm-up, check, ready."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from preheat.backends.base import Backend, Mode
from preheat.backends.registry import pick_backend
from preheat.core import Ready
from preheat.engine.listeners import STEP_EVENTS, with_step_log
from preheat.engine.loop import EngineSide, Loop, SilentListener
from preheat.errors import NotInvariant
from preheat.execution.build import build
from preheat.limits import Limits, resolve_limits
from preheat.model.files import weight_files
from preheat.model.loader import LoadedModel, load_model
from preheat.plan import lines
from preheat.plan.cost import Costs, ModelSizes
from preheat.plan.dispatcher import WarnOnce
from preheat.plan.modes import check_options, resolve
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.utils.dynamo import compile_seconds
from preheat.utils.trace import Trace
from preheat.verify.boot import BootCheck
from preheat.verify.check_runner import CheckRunner
from preheat.verify.identity import proof_of
from preheat.verify.names import check_names
from preheat.warmup.cold_monitor import ColdMonitor
from preheat.warmup.cold_sources import ColdSources
from preheat.warmup.dummy_requests import warm_up_loop
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.graphs import choose_graphs, divide_memory
from preheat.warmup.record import Record
from preheat.warmup.run import WarmUp
from preheat.warmup.steps import Steps
from preheat.warmup.store import Store, boot_parts, cache_root, fingerprint

logger = logging.getLogger(__name__)


def boot(
    settings: Settings,
    transport: EngineSide,
    before_ready: Callable[[], None],
    *,
    started: float,
    trace: Trace,
    backend: Backend | None = None,
) -> Loop:
    """See :func:`preheat.startup.boot_engine`. ``started`` is when the boot began, in monotonic seconds."""
    backend, mode = _open_device(settings, backend or pick_backend(settings.device))
    overlap = backend.facts.asynchronous if settings.async_scheduling is None else settings.async_scheduling
    steps = Steps(backend, started, trace.span)
    with steps("Loading model weights"):
        model = load_model(settings, backend)
    memory = divide_memory(settings, mode, backend.free_memory(), model.bytes_per_block)
    limits = resolve_limits(
        settings,
        model.spec.max_position_embeddings,
        model.bytes_per_block,
        usable=memory.cache,
        cache_bytes=backend.kv_cache_memory(),
    )
    sizes = ModelSizes.of(model.spec, model.dtype.itemsize)
    plan, record, store = _plan(settings, model, limits, sizes, backend=backend, mode=mode)
    record.memory = {"usable": memory.usable, "kv_cache": limits.num_blocks * model.bytes_per_block}
    scheduler = _scheduler(settings, plan)
    with steps.total("init_cache_engine"):
        with steps("Initializing cache engine"):
            packer, executor = build(settings, backend, model, plan, scheduler.slots, mode=mode, store=store.folder)
        dummies = DummySteps(plan, packer, executor)
        warm = WarmUp(
            plan=plan,
            record=record,
            backend=backend,
            steps=dummies,
            graphs=choose_graphs(settings, backend, dummies, record, split=memory, sizes=sizes),
            check=BootCheck(CheckRunner(scheduler.pool, packer, executor), record, backend.facts),
            reused=frozenset(store.costs()),
            report=transport.put,
            compiled=compile_seconds,
            span=trace.span,
        )
        unobserved = Loop(InlineTransport(), scheduler, packer, executor, SilentListener(), overlap=overlap)
        _warm_up(settings, warm, unobserved, steps)
    record.steps = steps.done
    if not settings.skip_warmup:
        store.save(record)
    monitor = ColdMonitor(record, plan, settings.on_cold, ColdSources(backend))
    listener, call = with_step_log(settings, mode, monitor), trace.calls(STEP_EVENTS)
    loop = Loop(transport, scheduler, packer, executor, listener, overlap=overlap, call=call)
    _judge(settings, record)
    before_ready()
    transport.put(_ready(record, scheduler, model.bytes_per_block, time.monotonic() - started))
    return loop


def _open_device(settings: Settings, backend: Backend) -> tuple[Backend, Mode]:
    """The prepared device and its execution mode. Raises SettingsError for options that it cannot serve."""
    check_options(settings, backend.facts)
    if not settings.batch_invariant:
        logger.warning("batch_invariant is off: the bits of a request may depend on what shares its batch")
    backend.prepare(settings, cache_root(settings))
    return backend, resolve(backend.facts, settings)


def _plan(
    settings: Settings, model: LoadedModel, limits: Limits, sizes: ModelSizes, *, backend: Backend, mode: Mode
) -> tuple[Plan, Record, Store]:
    """The plan, with costs measured by an earlier boot if there was one; its record, all pending; and the store."""
    misses: dict[str, int] = {}
    checks = check_names(settings, limits, mode, backend.facts)
    plan = make_plan(limits, PlanOptions.of(settings), checks=checks, on_miss=WarnOnce(misses))
    parts = boot_parts(
        model.folder,
        [] if settings.load_format == "dummy" else weight_files(model.folder),
        plan,
        dtype=model.dtype_name,
        device=(backend.facts.name, backend.fingerprint),
        threads=torch.get_num_threads(),
        mode=mode,
    )
    store = Store(cache_root(settings), fingerprint(parts))
    plan = plan.with_costs(Costs(sizes, backend.facts.machine, limits.block_size, store.costs()))
    for phase in plan.phases:
        logger.info("%s", lines.bucket_config(phase))
        logger.info("%s", lines.generated(phase.phase, plan.dispatcher.phases[phase.phase].buckets))
    logger.info("# device blocks: %d, # CPU blocks: 0", limits.num_blocks)
    record = Record.of(plan, model=settings.model, platform=backend.facts.name, dtype=model.dtype_name, mode=mode)
    record.fingerprint, record.misses, record.proof = store.fingerprint, misses, proof_of(settings.boot_check, parts)
    return plan, record, store


def _scheduler(settings: Settings, plan: Plan) -> Scheduler:
    return Scheduler(
        plan.limits,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        mixed_steps=plan.policy.mixed_steps,
        mixed_tokens=settings.max_num_mixed_tokens,
        padded=plan.padded,
        defrag_threshold=settings.defrag_threshold if plan.policy.compacts else None,
    )


def _warm_up(settings: Settings, warm: WarmUp, loop: Loop, steps: Steps) -> None:
    """Run the plan, capture graphs, then run dummy requests through ``loop``. Graphs are captured even if warm-up is
    skipped, as in vLLM on Gaudi.
    """
    warm.graphs.compile(steps)
    if settings.skip_warmup:
        warm.graphs.capture()
        return
    with steps("warm-up"):
        warm.run()
    with steps("Running dummy requests"):
        warm_up_loop(loop)


def _judge(settings: Settings, record: Record) -> None:
    """Record whether the boot is invariant. With ``require_invariance``, NotInvariant unless every check has passed."""
    record.invariant = settings.batch_invariant and not record.unproved()
    if settings.require_invariance and (why := record.unproved(dropped=True)):
        raise NotInvariant(f"require_invariance refuses to start: {'; '.join(why)}")


def _ready(record: Record, scheduler: Scheduler, block_bytes: int, seconds: float) -> Ready:
    limits = scheduler.limits
    logger.info(
        "%s on %s, %s, in %s: %d blocks of %d tokens (%.2f GiB), at most %d sequences of %d tokens; ready after %.1f s",
        record.model, record.platform, record.mode, record.dtype, limits.num_blocks, limits.block_size,
        limits.num_blocks * block_bytes / 2**30, limits.max_num_seqs, limits.max_model_len, seconds,
    )  # fmt: skip
    blocked = "; ".join(record.unproved())
    if blocked:
        logger.error("No request is taken: %s", blocked)
    return Ready(
        limits.max_model_len, limits.num_blocks, limits.block_size, seconds, record.to_json(), blocked,
        scheduler.max_prompt_len,
    )  # fmt: skip
