"""The boot of an engine.

Its order: device, weights, memory, limits, plan, cache, warm-up, check, ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Mode
from preheat.boot.device import open_device
from preheat.boot.loop import address_of, serving_loop
from preheat.boot.parts import build_parts
from preheat.boot.values import Device, Given, Loaded, Parts, Planned
from preheat.cache_groups import WHOLE
from preheat.configs.structured import library_version
from preheat.core import Ready
from preheat.engine.loop import EngineSide, Loop
from preheat.engine.step_listener import SilentListener
from preheat.errors import NotInvariant
from preheat.execution.draft_model import DraftModel
from preheat.execution.drafting import load_draft, make_drafting, make_proposer
from preheat.execution.sleep import sleepable_weights
from preheat.grammar.service import Grammars, open_grammars
from preheat.lora.boot import adapter_parts, open_adapters
from preheat.model.families import read_spec
from preheat.model.files import find_model, find_tokenizer, read_config, weight_files
from preheat.model.loader import LoadedModel, load_model
from preheat.model.weights_digest import WeightsDigest
from preheat.parallel.ranks import Children
from preheat.parallel.share import Share, contract_parts
from preheat.plan import lines
from preheat.plan.cost import Costs
from preheat.plan.groups import choose
from preheat.plan.modes import with_defaults
from preheat.plan.plan import Plan
from preheat.plan.step_times import StepTimes
from preheat.schedule.scheduler import Scheduler
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.utils.caches import cache_root
from preheat.utils.contract import Contract
from preheat.utils.dynamo import compile_seconds
from preheat.utils.memory import trim
from preheat.utils.trace import Trace
from preheat.verify.identity import contract_of, proof_of
from preheat.verify.names import check_names
from preheat.warmup.detail import detail_level
from preheat.warmup.draft import DraftWarmUp
from preheat.warmup.dummy_requests import warm_up_loop
from preheat.warmup.dummy_steps import DummySteps
from preheat.warmup.fitting import PROFILING_RUN, Fitted, Fitting
from preheat.warmup.graphs import choose_graphs
from preheat.warmup.record import Record
from preheat.warmup.run import WarmUp
from preheat.warmup.steps import Steps
from preheat.warmup.store import DevicePart, ModelPart, Store, boot_parts, fingerprint, last_record

logger = logging.getLogger(__name__)


def boot(
    settings: Settings,
    transport: EngineSide,
    before_ready: Callable[[], None],
    *,
    started: float,
    trace: Trace,
    backend: Backend,
    children: Children | None,
) -> Loop:
    """Boot an engine; see :func:`preheat.startup.boot_engine`.

    ``started`` is the time when the boot began, in monotonic seconds. ``children`` are other ranks that wait already.
    """
    device = open_device(settings, backend)
    threads = torch.get_num_threads()  # before compiled functions leave torch one
    share = Share.open(*device, children)
    try:
        device = device._replace(settings=with_defaults(device.settings, device.backend.facts))
        steps = Steps(device.backend, started, trace.span, level=detail_level(device.settings, device.backend.facts))
        return _boot(Given(device, share, steps, transport, trace, threads), before_ready)
    except BaseException:
        share.close()
        raise


def _boot(given: Given, before_ready: Callable[[], None]) -> Loop:
    """Boot on an open device. Other ranks are already loading their shards."""
    with _hashing(given.device.settings) as digest:
        return _boot_hashing(given, before_ready, digest)


def _boot_hashing(given: Given, before_ready: Callable[[], None], digest: WeightsDigest | None) -> Loop:
    """Boot while threads hash the weights that the loader reads."""
    opening = _open_grammars(given.device)
    loaded = _load(given, digest)
    fitted = _fit(given, loaded)
    planned = _recorded(given, loaded, fitted)
    grammars = "nothing is generated" if loaded.pools else opening.result()
    with given.steps.log("init_cache_engine", in_total=True):
        parts = build_parts(given, loaded, planned, grammars)
        warm = _warming(given, loaded, fitted, planned, parts)
        _warm_up(given, loaded, parts, warm)
    _keep(given, planned)
    given.share.agree(parts.executor, planned.plan)
    _judge(given.device.settings, planned.record)
    contract = _contract(given, planned, digest)
    loop = serving_loop(given, loaded, planned, parts, contract)
    before_ready()
    _trim(given.device.backend)  # of the profiling run and of warm-up
    ready = _ready(planned.record, parts.scheduler, loaded.model, given.steps.elapsed, contract)
    ready.sends = address_of(given.device.settings, loop)
    given.transport.put(ready)
    return loop


def _trim(backend: Backend) -> None:
    """Give freed memory of the host back."""
    if backend.facts.on_host:
        trim()


def _load(given: Given, digest: WeightsDigest | None) -> Loaded:
    """Load the weights of the model, the draft model and the adapters."""
    (settings, backend, mode), share, steps, *_ = given
    loading = f"Pre-loading model weights on {backend.device}"
    with steps("Loading model weights", in_total=True), steps.log(loading, detail=True):
        with sleepable_weights(settings, backend):
            model = load_model(settings, backend, share.collective, read=digest.read if digest else None)
        if digest is not None:
            digest.loaded()
        draft = load_draft(settings, backend, model)
        others_free = share.loaded()
        adapters = open_adapters(settings, model, share.reading)
    if draft is not None:  # the draft's cache has the same blocks
        model = replace(model, bytes_per_block=model.bytes_per_block + draft.bytes_per_block)
    grouping = choose(settings, backend.facts, model.spec, mode)
    if grouping.reason:
        logger.info("Cache groups are off: %s", grouping.reason)
    elif grouping.groups != WHOLE:
        logger.info("Cache groups: %s", grouping)
    model = replace(model, groups=grouping.groups, bytes_per_block=grouping.of_bytes(model.bytes_per_block))
    return Loaded(model, draft, adapters, others_free)


def _fit(given: Given, loaded: Loaded) -> Fitted:
    """Plan for the memory that the weights leave."""
    (settings, backend, mode), share, steps, *_ = given
    _trim(backend)  # the originals of prepared weights
    model, pools = loaded.model, loaded.pools
    windows = {each for each in model.spec.layer_windows if each is not None}
    checks = partial(
        check_names,
        settings,
        mode=mode,
        facts=backend.facts,
        pools=pools,
        windows=windows,
        encodes=model.spec.encodes,
        states=model.spec.has_states,
    )
    fitting = Fitting(
        settings, backend, model, mode, checks, share.on_a_node, loaded.others_free, share.build, share.select,
        partial(_known_peak, given, loaded),
    )  # fmt: skip
    fitted = fitting.fit(steps)
    _log_plan(fitted.plan, steps.level)
    return fitted


@contextmanager
def _hashing(settings: Settings) -> Iterator[WeightsDigest | None]:
    """Hash the checkpoint's weights in threads during a block; None for random weights."""
    if settings.load_format == "dummy":
        yield None
        return
    with closing(WeightsDigest(weight_files(find_model(settings)))) as digest:
        yield digest


def _contract(given: Given, planned: Planned, digest: WeightsDigest | None) -> Contract:
    """Return the engine's parts of the contract; the digest of the weights is mostly there."""
    settings = given.device.settings
    with given.steps("Waiting for the digest of the weights", detail=True):
        weights = f"random, seed {settings.seed or 0}" if digest is None else digest.result()
    contract = contract_of(settings, planned.record.proof.parts, weights)
    logger.info("Contract %s: weights %s, sampler %s", contract.id, contract.weights, contract.sampler)
    return contract


def _open_grammars(device: Device) -> Future[Grammars | str]:
    """Read the tokenizer for grammars while weights are loaded; a large one takes seconds."""
    settings, idle = device.settings, device.backend.facts.asynchronous
    vocab_size = read_spec(read_config(find_model(settings, with_weights=False), settings.hf_overrides)).vocab_size
    opener = ThreadPoolExecutor(1, "grammars")
    opening = opener.submit(open_grammars, settings, find_tokenizer, vocab_size, idle=idle)
    opener.shutdown(wait=False)  # the thread ends after this call
    return opening


def _recorded(given: Given, loaded: Loaded, fitted: Fitted) -> Planned:
    """Return the plan with its record and store.

    The plan has costs that an earlier boot measured, if there was one.
    """
    settings, backend, mode = given.device
    model, plan = loaded.model, fitted.plan
    parts = _identity(given, loaded, plan)
    store = Store(cache_root(settings), fingerprint(parts))
    plan = plan.with_costs(Costs(loaded.sizes, backend.facts.machine, plan.limits.block_size, store.costs()))
    record = Record.of(plan, model=settings.model, platform=backend.facts.name, dtype=model.dtype_name, mode=mode)
    record.simulated = backend.facts.simulated
    record.fingerprint = store.fingerprint
    record.proof = proof_of(settings.boot_check, {**parts, **adapter_parts(settings, loaded.adapters)})
    record.misses, record.memory = fitted.misses, fitted.memory
    return Planned(plan, record, store)


def _identity(given: Given, loaded: Loaded, plan: Plan) -> dict[str, object]:
    """Return everything that the caches of a boot with ``plan`` depend on."""
    (settings, backend, mode), model = given.device, loaded.model
    files = [] if settings.load_format == "dummy" else weight_files(model.folder)
    return boot_parts(
        ModelPart(model.folder, files, model.dtype_name, settings.hf_overrides, model.numerics),
        DevicePart((backend.facts.name, backend.fingerprint), given.threads, mode),
        plan,
        grammars=library_version(settings) if plan.options.grammars else None,
        more={**contract_parts(settings), **adapter_parts(settings)},
    )


def _known_peak(given: Given, loaded: Loaded, plan: Plan) -> int | None:
    """Return the bytes that an earlier boot measured for the largest step of ``plan``, None if there was none.

    On another device than the host the profiling run is also the first use of its libraries, so it always runs.
    """
    if not given.device.backend.facts.on_host:
        return None
    if (root := cache_root(given.device.settings)) is None:
        return None
    last = last_record(root, fingerprint(_identity(given, loaded, plan)))
    found = -1 if last is None else last.memory.get(PROFILING_RUN, -1)
    return found if found >= 0 else None


def _log_plan(plan: Plan, level: int) -> None:
    """Log the ranges and numbers of buckets, and all buckets at ``level``."""
    for phase in plan.phases:
        buckets = plan.dispatcher.phases[phase.phase].buckets
        logger.info("%s", lines.bucket_config(phase))
        logger.info("%s", lines.generated(phase.phase, buckets, whole=level >= logging.INFO))
        if level < logging.INFO:
            logger.log(level, "%s", lines.generated(phase.phase, buckets))
    logger.info("# device blocks: %d, # CPU blocks: 0", plan.limits.num_blocks)


def _draft_steps(drafter: DraftModel | None, backend: Backend, mode: Mode) -> DraftWarmUp | None:
    if drafter is None:
        return None
    steps = DummySteps(drafter.packer.plan, drafter.packer, drafter.executor)
    return DraftWarmUp(steps, captures=backend.facts.captures and mode == "graphs")


def _warming(given: Given, loaded: Loaded, fitted: Fitted, planned: Planned, parts: Parts) -> WarmUp:
    """Return the warm-up of the engine. Drafts are chosen by the times that it measures."""
    device, _, steps, transport, *_ = given
    settings, backend, mode = device
    plan, record, store = planned
    dummies = DummySteps(plan, parts.packer, parts.executor)
    warm = WarmUp(
        plan=plan,
        record=record,
        backend=backend,
        steps=dummies,
        graphs=choose_graphs(settings, backend, dummies, record, split=fitted.split, sizes=loaded.sizes),
        check=parts.check(device, record),
        reused=frozenset(store.costs()),
        report=transport.put,
        compiled=compile_seconds,
        span=steps.span,
        level=steps.level,
        first_logits=partial(_first_logits, device, fitted, dummies),
        grammars=parts.grammars,
        offload=parts.offload,
        draft_steps=_draft_steps(parts.drafter, backend, mode),
        overlap=device.overlap,
    )
    if (speculates := settings.speculation) is not None:
        proposer, times = make_proposer(speculates, parts.drafter), StepTimes(plan, warm.seconds)
        parts.scheduler.drafting = make_drafting(speculates, plan, proposer, times, waits=device.overlap)
    return warm


def _first_logits(device: Device, fitted: Fitted, steps: DummySteps) -> Tensor | None:
    """Return the logits of the process's first step, which may be run now; None if later ones are not compared."""
    settings, _, mode = device
    if not settings.batch_invariant or settings.skip_warmup or mode == "compile":
        return None  # the profiling run compiles no regions
    return steps.logits() if fitted.first_logits is None else fitted.first_logits


def _warm_up(given: Given, loaded: Loaded, parts: Parts, warm: WarmUp) -> None:
    """Run the plan, capture graphs, then run dummy requests through a loop that nobody observes.

    Functions are compiled and graphs are captured even if warm-up is skipped, as graphs are in vLLM on Gaudi.
    """
    device, _, steps, *_ = given
    unobserved = parts.loop(InlineTransport(), device, listener=SilentListener())
    warm.graphs.compile(steps)
    if device.settings.skip_warmup:
        warm.build()
        warm.graphs.capture()
        return
    with steps("warm-up", detail=True):
        warm.run()
    with steps("Running dummy requests", detail=True):
        warm_up_loop(unobserved, pools=loaded.pools)


def _keep(given: Given, planned: Planned) -> None:
    """Record the steps, and store the record for the next boot."""
    planned.record.steps = given.steps.done
    if not given.device.settings.skip_warmup:
        planned.store.save(planned.record)


def _judge(settings: Settings, record: Record) -> None:
    """Record whether the boot is invariant.

    With ``require_invariance``, raise NotInvariant unless every check has passed.
    """
    record.invariant = settings.batch_invariant and not record.unproved()
    if settings.require_invariance and (why := record.unproved(dropped=True)):
        raise NotInvariant(f"require_invariance refuses to start: {'; '.join(why)}")


def _ready(record: Record, scheduler: Scheduler, model: LoadedModel, seconds: float, contract: Contract) -> Ready:
    limits, kv_dtype = scheduler.limits, model.spec.kv_dtype
    logger.info(
        "%s on %s, %s, in %s: %d blocks of %d tokens (%.2f GiB%s), at most %d sequences of %d tokens; ready after "
        "%.1f s",
        record.model, record.platform, record.mode, record.dtype, limits.num_blocks, limits.block_size,
        limits.num_blocks * model.bytes_per_block / 2**30, "" if kv_dtype == "auto" else f" of {kv_dtype}",
        limits.max_num_seqs, limits.max_model_len - limits.spare, seconds,
    )  # fmt: skip
    blocked = "; ".join(record.unproved())
    if blocked:
        logger.error("The engine takes no requests: %s", blocked)
    return Ready(
        limits.max_model_len - limits.spare, limits.columns + 1, limits.block_size, seconds, record.to_json(), blocked,
        scheduler.budget.max_prompt_len, record.proof.digest, spare=limits.spare, contract=contract,
    )  # fmt: skip
