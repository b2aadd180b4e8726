"""The two boots, in order: of the engine (device, weights, cache, warm-up, loop) and of the front door (tokenizer,
template).

The front door's process never imports torch, so everything that needs it is imported inside :func:`boot_engine`.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from preheat.backends import check_settings, facts_of, pick_backend, wake
from preheat.core import Died, Ready, ToEngine
from preheat.errors import NotInvariant
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontdoor import FrontDoor
from preheat.frontend.tokenizer import NoTokenizer, Tokenizer
from preheat.limits import Limits
from preheat.metrics import Metrics, explain, set_up_logging
from preheat.model.files import find_checkpoint, read_config, weight_files
from preheat.model.specs import read_spec, resolve_dtype
from preheat.plan import commands, lines
from preheat.plan.budget import MemorySplit
from preheat.plan.cost import Costs
from preheat.plan.dispatcher import WarnOnce
from preheat.plan.modes import resolve
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.sizing import resolve_limits
from preheat.transport import EngineTransport
from preheat.utils import pycache
from preheat.utils.gc import keep_imports, settle
from preheat.utils.trace import open_trace
from preheat.verify.identity import proof_of
from preheat.verify.names import check_names, check_required
from preheat.warmup.store import cache_root

if TYPE_CHECKING:
    from preheat.backends.base import Backend, Mode
    from preheat.engine.loop import EngineSide, Loop
    from preheat.execution.executor import Executor
    from preheat.runner import LoadedModel
    from preheat.warmup.cold_monitor import ColdMonitor
    from preheat.warmup.record import Record
    from preheat.warmup.run import WarmUp
    from preheat.warmup.steps import Steps
    from preheat.warmup.store import Store

logger = logging.getLogger(__name__)


def boot_front(
    settings: Settings, send: Callable[[ToEngine], None], metrics: Metrics | None = None
) -> tuple[FrontDoor, ChatTemplate]:
    """Everything that speaks text. ``send`` hands a message to the engine."""
    folder = find_checkpoint(settings.model, settings.revision, with_weights=False)
    tokens = find_checkpoint(settings.tokenizer, with_weights=False) if settings.tokenizer else folder
    tokenizer = NoTokenizer(folder) if settings.skip_tokenizer_init else Tokenizer(tokens, folder)
    door = FrontDoor(
        tokenizer,
        send,
        max_logprobs=settings.max_logprobs,
        max_queued=settings.max_queued_requests,
        metrics=metrics,
        seed=settings.seed,
    )
    return door, ChatTemplate(tokenizer, settings.chat_template)


def planned(settings: Settings, *, as_json: bool = False) -> str:
    """The plan of these settings, as text or as JSON, from the model's config alone: no weights, no torch.

    The device is not looked at: it counts as one that computes in bfloat16 and has room for every sequence.
    """
    spec = read_spec(read_config(find_checkpoint(settings.model, settings.revision, with_weights=False)))
    dtype, _ = resolve_dtype(settings.dtype, spec.dtype, native_bfloat16=True)
    facts = facts_of(settings.device)
    return commands.plan(settings, spec, spec.max_position_embeddings, dtype=dtype, facts=facts, as_json=as_json)


def boot_engine(
    settings: Settings,
    transport: EngineSide,
    before_ready: Callable[[], None] = lambda: None,
    backend: Backend | None = None,
) -> Loop:
    """Device, weights, limits, plan, cache, warm-up, loop; then tell the mailbox that it can run, but first call
    ``before_ready``. ``backend`` None: the one of ``--device``.

    Raises SettingsError or ModelError, saying what to change.
    """
    started = time.monotonic()
    check_required(settings)
    explain(settings.debug)
    trace = open_trace(settings.profiler_enabled)
    wake(settings.device)
    with trace.span("Importing torch"), pycache.kept(cache_root(settings)):
        from preheat.engine.listeners import STEP_EVENTS, with_step_log
        from preheat.engine.loop import Loop
        from preheat.engine.rehearsal import Unwatched, rehearse
        from preheat.runner import build, load_model
        from preheat.transport import InlineTransport
        from preheat.utils.dynamo import compile_seconds
        from preheat.verify.boot import BootCheck
        from preheat.verify.check_runner import CheckRunner
        from preheat.warmup.graphs import divide_memory
        from preheat.warmup.run import WarmUp
        from preheat.warmup.steps import Steps
        from preheat.warmup.store import Store, fingerprint
    keep_imports()

    platform = backend or pick_backend(settings.device)
    facts = platform.facts
    check_settings(settings, facts)
    platform.prepare(settings, cache_root(settings))
    ahead = facts.asynchronous if settings.async_scheduling is None else settings.async_scheduling
    mode = resolve(facts, settings)
    steps = Steps(platform, started, trace.span)
    with steps("Loading model weights"):
        model = load_model(settings, platform)
    split = divide_memory(settings, mode, platform.free_memory(), model.bytes_per_block)
    limits = resolve_limits(settings, model.spec, platform, model.bytes_per_block, split.cache)
    parts = _parts(settings, model, limits, platform, mode)
    store = Store(cache_root(settings), fingerprint(parts))
    plan, record = _plan(settings, model, limits, store, usable=split.usable, platform=platform, mode=mode)
    record.proof = proof_of(settings.boot_check, parts)
    scheduler = _scheduler(settings, limits, plan)
    with steps.total("init_cache_engine"):
        with steps("Initializing cache engine"):
            packer, executor = build(settings, platform, model, plan, scheduler.slots, mode=mode, store=store.folder)
        check = BootCheck(CheckRunner(scheduler.pool, packer, executor), record, facts)
        warm = WarmUp(plan, packer, executor, platform, record, check)
        warm.say, warm.compiled, warm.span, warm.reused = transport.put, compile_seconds, trace.span, store.reused()
        stage = Loop(InlineTransport(), scheduler, packer, executor, Unwatched(), overlap=ahead)
        guard = _heat(settings, warm, model, partial(rehearse, stage), split=split, store=store, steps=steps)
    listener, call = with_step_log(settings, mode, guard), trace.calls(STEP_EVENTS)
    loop = Loop(transport, scheduler, packer, executor, listener, overlap=ahead, call=call)
    _judge(settings, record)
    before_ready()
    transport.put(_ready(record, limits, model.bytes_per_block, time.monotonic() - started))
    return loop


def _parts(settings: Settings, model: LoadedModel, limits: Limits, platform: Backend, mode: str) -> dict[str, object]:
    """What tells this boot from others: with equal parts, what is stored can be used and bits are equal."""
    import torch

    from preheat.warmup.store import boot_parts

    return boot_parts(
        model.folder,
        [] if settings.load_format == "dummy" else weight_files(model.folder),
        make_plan(limits, PlanOptions.of(settings)),
        dtype=model.dtype_name,
        device=(platform.facts.name, platform.fingerprint),
        threads=torch.get_num_threads(),
        mode=mode,
    )


def _plan(
    settings: Settings, model: LoadedModel, limits: Limits, store: Store, *, usable: int, platform: Backend, mode: Mode
) -> tuple[Plan, Record]:
    """The plan, with what the store knows of its costs, and the record in which nothing has become of it yet."""
    from preheat.warmup.record import Record

    costs = Costs(model.sizes, platform.facts.machine, limits.block_size, store.costs())
    misses: dict[str, int] = {}
    checks = check_names(settings, limits, mode, platform.facts)
    plan = make_plan(limits, PlanOptions.of(settings), costs, checks=checks, on_miss=WarnOnce(misses))
    for phase in plan.phases:
        logger.info("%s", lines.bucket_config(phase))
        logger.info("%s", lines.generated(phase.phase, plan.table.phases[phase.phase].shapes))
    logger.info("%s", lines.cache_blocks(limits.num_blocks))
    record = Record.of(plan, model=settings.model, platform=platform.facts.name, dtype=model.dtype_name, mode=mode)
    record.fingerprint, record.misses = store.fingerprint, misses
    record.memory = {"usable": usable, "kv_cache": limits.num_blocks * model.bytes_per_block}
    return plan, record


def _scheduler(settings: Settings, limits: Limits, plan: Plan) -> Scheduler:
    """Only unified batches are compacted, as the source has it."""
    unified = settings.bucketing_policy == "unified"
    return Scheduler(
        limits,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        mixed_steps=unified,
        mixed_tokens=settings.max_num_mixed_tokens,
        padded=plan.padded,
        defrag_threshold=settings.defrag_threshold if unified else None,
    )


def _heat(
    settings: Settings,
    warm: WarmUp,
    model: LoadedModel,
    rehearsal: Callable[[], None],
    *,
    split: MemorySplit,
    store: Store,
    steps: Steps,
) -> ColdMonitor:
    """Warm up, capture graphs, rehearse, leave the record to the next boot; from then on the guard watches."""
    from preheat.warmup.cold_monitor import ColdMonitor
    from preheat.warmup.cold_sources import sources_for
    from preheat.warmup.graphs import GRAPHS, Budget, capture_programs, capture_twin

    plan, record, budget = warm.plan, warm.record, Budget(split, model.bytes_per_block)
    if record.mode == GRAPHS and not warm.platform.facts.captures:
        warm.capture = partial(capture_twin, plan, record, settings, budget, model.sizes)
    elif record.mode == GRAPHS:
        executor = cast("Executor", warm.executor)
        with steps("Compiling kernels"):
            executor.compile(plan, os.cpu_count() or 1)
        warm.prepare, warm.keep = executor.prepare, executor.capture_sampling
        warm.capture = partial(capture_programs, warm, executor, settings, budget)
    if settings.skip_warmup:
        warm.capture()  # as in the source, which captures without having run anything
    else:
        with steps("warm-up"):
            warm.run()
        with steps("Rehearsing requests"):
            rehearsal()
    record.steps = steps.done
    if not settings.skip_warmup:
        store.save(record)
    return ColdMonitor(record, plan, settings.on_cold, sources_for(warm.platform.facts.name))


def _judge(settings: Settings, record: Record) -> None:
    """Whether the boot is invariant. With ``require_invariance``, raise NotInvariant unless every check has passed."""
    record.invariant = settings.batch_invariant and not record.unproved()
    if settings.require_invariance and (why := record.unproved(dropped=True)):
        raise NotInvariant(f"require_invariance refuses to start: {'; '.join(why)}")


def _ready(record: Record, limits: Limits, bytes_per_block: int, seconds: float) -> Ready:
    logger.info(
        "%s on %s, %s, in %s: %d blocks of %d tokens (%.2f GiB), at most %d sequences of %d tokens; ready after %.1f s",
        record.model, record.platform, record.mode, record.dtype, limits.num_blocks, limits.block_size,
        limits.num_blocks * bytes_per_block / 2**30, limits.max_num_seqs, limits.max_model_len, seconds,
    )  # fmt: skip
    held = "; ".join(record.unproved())
    if held:
        logger.error("No request is taken: %s", held)
    return Ready(limits.max_model_len, limits.num_blocks, limits.block_size, seconds, record.to_json(), held)


def run_engine(settings: Settings, address: str) -> None:
    """The engine's process: boot, say so, run until drained. A fatal error is told to the front door, then raised.

    Nearly all that a boot makes stays: the garbage collector looks at it once, at the end, and never again.
    """

    def before_ready() -> None:
        settle()
        gc.enable()

    gc.disable()
    set_up_logging(settings.log_level)
    transport = EngineTransport(address)
    try:
        boot_engine(settings, transport, before_ready).run()
    except BaseException as error:
        transport.put(Died(f"{type(error).__name__}: {error}"))
        raise
    finally:
        transport.close()
