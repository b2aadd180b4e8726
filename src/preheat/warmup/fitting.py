"""Limits and a plan that fit into the memory that there is, once it is known what a step needs of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from preheat.backends.base import Backend, Mode
from preheat.execution.build import Build, build, linear_rows, settle_linears
from preheat.limits import Limits, resolve_limits
from preheat.model.loader import LoadedModel
from preheat.plan.budget import MemorySplit
from preheat.plan.dispatcher import WarnOnce
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.settings import Settings
from preheat.warmup.graphs import divide_memory, log_division
from preheat.warmup.profile import profile_run
from preheat.warmup.steps import Steps


@dataclass(frozen=True)
class Fitted:
    """``plan`` fits into the memory, which is divided by ``split``. ``memory`` are bytes by use, for the record;
    ``misses`` is where the plan counts steps beyond its buckets; ``first_logits`` are those of the process's first
    step, None if nothing has run.
    """

    plan: Plan
    split: MemorySplit
    memory: dict[str, int]
    misses: dict[str, int]
    first_logits: Tensor | None


@dataclass(frozen=True)
class Fitting:
    """Fits ``model``, which is loaded already. ``checks`` names the cross-checks that are possible within limits.
    Of several ranks the others have so much memory free, and so many are on one host; ``build`` makes an engine on all
    of them.
    """

    settings: Settings
    backend: Backend
    model: LoadedModel
    mode: Mode
    checks: Callable[[Limits], Sequence[str]]
    on_a_host: int = 1
    others_free: Sequence[int] = ()
    build: Build = build

    def fit(self, steps: Steps) -> Fitted:
        """Plan for all memory that is free, measure what the plan's largest step needs, and plan again for what that
        leaves. Raises SettingsError if it leaves too little.
        """
        misses: dict[str, int] = {}
        count = WarnOnce(misses)
        free = self._free()
        split, limits = self._divide(free)
        plan, more, first = self._plan(limits, count), {}, list[Tensor]()
        settle_linears(self.backend, self.model, plan)
        if self._depends:
            run = partial(profile_run, self.settings, self.backend, self.model, plan, first.append, self.build)
            peak = more["profiling_run"] = steps.peak("Model profiling run", run)
            split, limits = self._divide(max(free - peak, 0))
            if limits != plan.limits:
                plan = self._plan_again(plan, limits, count)
        log_division(self.settings, self.mode, split, limits.num_blocks)
        memory = {"usable": split.usable, "kv_cache": limits.num_blocks * self.model.bytes_per_block}
        return Fitted(plan, split, memory | more, misses, first[0] if first else None)

    def _free(self) -> int:
        """Bytes that are free on the device that has the least of all ranks."""
        return self._shared(min([self.backend.free_memory(), *self.others_free])) or 0

    def _shared(self, size: int | None) -> int | None:
        """This rank's part of ``size``, if it shares the host's memory with others."""
        return size // self.on_a_host if size and self.backend.facts.on_host else size

    @property
    def _depends(self) -> bool:
        """Whether anything depends on what a step needs: not if the cache's size is set and nothing is warmed up."""
        settings = self.settings
        sized = settings.num_gpu_blocks_override or settings.kv_cache_memory_bytes or self.backend.kv_cache_memory()
        return not (settings.skip_warmup and sized)

    def _divide(self, free: int) -> tuple[MemorySplit, Limits]:
        block_bytes = self.model.bytes_per_block
        split = divide_memory(self.settings, self.mode, free, block_bytes)
        limits = resolve_limits(
            self.settings,
            self.model.spec.max_position_embeddings,
            block_bytes,
            usable=split.cache,
            cache_bytes=self._shared(self.backend.kv_cache_memory()),
            image_tokens=self.model.spec.image_tokens,
        )
        return split, limits

    def _plan_again(self, before: Plan, limits: Limits, on_miss: WarnOnce) -> Plan:
        plan = self._plan(limits, on_miss)
        if linear_rows(plan) != linear_rows(before):
            settle_linears(self.backend, self.model, plan)
        return plan

    def _plan(self, limits: Limits, on_miss: WarnOnce) -> Plan:
        options = PlanOptions.of(self.settings, self.backend.facts, pools=self.model.spec.head is None)
        return make_plan(limits, options, checks=self.checks(limits), on_miss=on_miss)
