"""The parts of an engine before its warm-up: scheduler, packer, executors and host tier."""

from __future__ import annotations

from functools import partial

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Mode
from preheat.boot.values import Given, Loaded, Parts, Planned
from preheat.elastic import cache_contents
from preheat.execution.build import Assembly, build, select_linear_kernels
from preheat.execution.draft_head import make_drafter
from preheat.execution.draft_model import DraftModel
from preheat.execution.executor import Executor
from preheat.execution.input_batch import Packer
from preheat.execution.offload import HostTier
from preheat.grammar.service import Grammars
from preheat.model.draft_head import LoadedHead
from preheat.model.loader import LoadedModel
from preheat.model.pooled_head import through
from preheat.parallel.leader import ParallelExecutor
from preheat.plan.plan import Plan
from preheat.schedule.scheduler import Caching, Scheduler
from preheat.schedule.states import Ends
from preheat.settings import Settings


def build_parts(given: Given, loaded: Loaded, planned: Planned, grammars: Grammars | str) -> Parts:
    """Build the engine with its caches on all ranks."""
    (settings, backend, mode), share, steps, *_ = given
    plan, model = planned.plan, loaded.model
    scheduler = _scheduler(settings, plan, model)
    with steps("Initializing cache engine"):
        how = Assembly(mode, planned.store.folder, masked=not isinstance(grammars, str))
        packer, executor = share.build(settings, backend, model, plan, scheduler.slots, how=how)
        drafter = _drafter(settings, backend, loaded.draft, (packer, executor), mode)
    offload = scheduler.pool.tier = _host_tier(settings, backend, executor)
    return Parts(scheduler, packer, executor, drafter, offload, grammars, loaded.adapters)


def _scheduler(settings: Settings, plan: Plan, model: LoadedModel) -> Scheduler:
    return Scheduler(
        plan.limits,
        caching=Caching(settings.enable_prefix_caching, cache_contents(model), Ends.of(settings)),
        enable_chunked_prefill=settings.enable_chunked_prefill,
        mixed_steps=plan.policy.mixed_steps,
        mixed_tokens=settings.max_num_mixed_tokens,
        padded=plan.padded,
        defrag_threshold=settings.defrag_threshold if plan.policy.compacts else None,
        max_loras=settings.max_loras if settings.enable_lora else 0,
        head=partial(through, head, model.spec.hidden_size) if (head := model.weights.pooled_head) else None,
    )


def _drafter(
    settings: Settings, backend: Backend, draft: LoadedModel | None, target: tuple[Packer, Executor], mode: Mode
) -> DraftModel | None:
    """Return the draft model or draft head, if one drafts.

    It shares the target's slots and blocks.
    """
    packer, executor = target
    plan, speculates = packer.plan.draft, settings.speculation
    if draft is None or plan is None or speculates is None:
        return None
    select_linear_kernels(backend, draft, plan)
    make = partial(build, settings, backend, draft, plan, packer.slots, how=Assembly(mode))
    if isinstance(draft, LoadedHead):
        return make_drafter(draft, target, plan, speculates.tokens, make)
    own = DraftModel(speculates.tokens, *make())
    executor.other_caches.append(own.executor.cache)
    return own


def _host_tier(settings: Settings, backend: Backend, executor: Executor) -> HostTier | None:
    """Return the host tier of evicted blocks, if the settings give it room."""
    size, caches = settings.kv_offloading_size, (executor.cache, *executor.other_caches)
    others = executor if isinstance(executor, ParallelExecutor) else None
    return None if size is None else HostTier(backend, caches, int(size * 2**30), others)
