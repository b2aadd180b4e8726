"""Limits and a plan that fit into the free memory.

They are made once the needs of a step are known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from preheat.backends.base.backend import Backend
from preheat.backends.base.facts import Mode
from preheat.execution.build import Build, Select, build, linear_rows, select_linear_kernels
from preheat.limits import Limits, more_states, resolve_limits
from preheat.model.loader import LoadedModel
from preheat.plan import lines
from preheat.plan.budget import MemorySplit
from preheat.plan.dispatcher import WarnOnce
from preheat.plan.functions import functions_of
from preheat.plan.options import PlanOptions
from preheat.plan.plan import Plan, make_plan
from preheat.pooling.encoders import SPARE
from preheat.settings import Settings
from preheat.warmup.graphs import divide_memory, log_division
from preheat.warmup.profile import profile_run
from preheat.warmup.steps import Steps
from preheat.warmup.trial import compile_kernels

logger = logging.getLogger(__name__)

PROFILING_RUN = "profiling_run"
"""The name of a step's most memory in the record."""


@dataclass(frozen=True)
class Fitted:
    """A plan that fits into the memory as divided by ``split``.

    ``memory`` are bytes by use, for the record. ``misses`` gets the plan's counts of steps beyond its buckets.
    ``first_logits`` are the logits of the process's first step, None if nothing has run yet.
    """

    plan: Plan
    split: MemorySplit
    memory: dict[str, int]
    misses: dict[str, int]
    first_logits: Tensor | None


@dataclass(frozen=True)
class Fitting:
    """The fitting of ``model``, which is loaded already.

    ``checks`` names the cross-checks that are possible within limits. ``others_free`` is the free memory of the other
    ranks in bytes; ``on_a_host`` ranks share a host. ``build`` makes an engine on all ranks, and ``select`` chooses
    their linear layers' kernels. ``known_peak`` returns the bytes that an earlier boot measured for the largest step of
    a plan, None if there was none.
    """

    settings: Settings
    backend: Backend
    model: LoadedModel
    mode: Mode
    checks: Callable[[Limits], Sequence[str]]
    on_a_host: int = 1
    others_free: Sequence[int] = ()
    build: Build = build
    select: Select = select_linear_kernels
    known_peak: Callable[[Plan], int | None] = lambda plan: None

    def fit(self, steps: Steps) -> Fitted:
        """Plan for all free memory, and again after a measurement.

        The plan's largest step is measured; the second plan is for the rest of the memory. Raises SettingsError if too
        little is left.
        """
        misses: dict[str, int] = {}
        count = WarnOnce(misses)
        free = self._free()
        split, limits = self._divide(free)
        plan, more, first = self._plan(limits, count), {}, list[Tensor]()
        kernels = self._compile(plan, steps)
        self.select(self.backend, self.model, plan)
        if self._depends:
            peak = self.known_peak(plan)
            if peak is None:
                run = partial(profile_run, self.settings, self.backend, self.model, plan, first.append, self.build)
                peak = steps.peak("Model profiling run", run)
            else:
                logger.info("%s", lines.known_peak(peak))
            more[PROFILING_RUN] = peak
            split, limits = self._divide(max(free - kernels - peak, 0))
            if limits != plan.limits:
                plan = self._plan_again(plan, limits, count)
        log_division(self.settings, self.mode, split, limits.num_blocks)
        memory = {"usable": split.usable, "kv_cache": limits.num_blocks * self.model.bytes_per_block}
        if self._state_bytes:
            memory["states"] = self._state_bytes
        return Fitted(plan, split, memory | more, misses, first[0] if first else None)

    def _compile(self, plan: Plan, steps: Steps) -> int:
        """Compile the kernels of ``plan``, and return the bytes of the device that they take from now on."""
        if self.backend.compiling(1) is None:
            return 0
        before = self.backend.free_memory()
        run = partial(compile_kernels, self.settings, self.backend, self.model, plan, self.build)
        steps.peak("Compiling kernels", partial(self.backend.peak_memory, run))
        return max(before - self.backend.free_memory(), 0)

    def _free(self) -> int:
        """Return the free bytes of the rank with the least, as this rank's share."""
        return self._shared(min([self.backend.free_memory(), *self.others_free])) or 0

    def _shared(self, size: int | None) -> int | None:
        """Return this rank's part of ``size``, if it shares the host's memory with others."""
        return size // self.on_a_host if size and self.backend.facts.on_host else size

    @property
    def _depends(self) -> bool:
        """Whether anything depends on a step's needs.

        Nothing does with a set cache size and skipped warm-up.
        """
        settings = self.settings
        sized = settings.num_gpu_blocks_override or settings.kv_cache_memory_bytes or self.backend.kv_cache_memory()
        return not (settings.skip_warmup and sized)

    @property
    def _state_bytes(self) -> int:
        """Bytes of all states: of sequences with their tapes, kept ones, and of padding.

        The profiling run has one state slot, so they are counted once.
        """
        spec, sequences = self.model.spec, 1 + (self.settings.max_num_seqs or 0)
        tapes = sequences * sum(self.backend.tape_bytes(each) for each in spec.recurrences)
        return (sequences + self._more_states) * spec.state_bytes(self.model.dtype.itemsize) + tapes

    @property
    def _more_states(self) -> int:
        return more_states(self.settings) if self.model.spec.has_states else 0

    def _divide(self, free: int) -> tuple[MemorySplit, Limits]:
        block_bytes = self.model.bytes_per_block
        split = divide_memory(self.settings, self.mode, max(free - self._state_bytes, 0), block_bytes)
        limits = resolve_limits(
            self.settings,
            self.model.spec.max_position_embeddings,
            block_bytes,
            usable=split.cache,
            cache_bytes=self._shared(self.backend.kv_cache_memory()),
            image_tokens=self.model.spec.image_tokens,
            any_size=self.model.spec.any_size,
            spare=SPARE * self.model.spec.encodes,
            groups=self.model.groups,
            states=self._more_states,
        )
        return split, replace(limits, pools=self.model.spec.head is None)

    def _plan_again(self, before: Plan, limits: Limits, on_miss: WarnOnce) -> Plan:
        plan = self._plan(limits, on_miss)
        if linear_rows(plan) != linear_rows(before):
            self.select(self.backend, self.model, plan)
        return plan

    def _plan(self, limits: Limits, on_miss: WarnOnce) -> Plan:
        facts, spec = self.backend.facts, self.model.spec
        functions = functions_of(spec, facts)
        options = PlanOptions.of(self.settings, facts, pools=spec.head is None, functions=functions)
        return make_plan(limits, options, checks=self.checks(limits), on_miss=on_miss)
