"""Sharing of a model with other ranks at boot.

Only this module knows whether there are any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from preheat.backends.base.backend import Backend
from preheat.backends.base.collective import Collective
from preheat.backends.base.facts import Facts, Mode
from preheat.backends.cold import Counted
from preheat.backends.rendezvous import OneNode
from preheat.execution.build import Build, Select, build, select_linear_kernels
from preheat.execution.contents import Contents
from preheat.execution.executor import Executor
from preheat.execution.weight_transfer import Transfers
from preheat.lora.boot import ReadPacked
from preheat.model.loader import LoadedModel
from preheat.model.shard import sums_k_splits
from preheat.ops.values import k_splits_of
from preheat.parallel.adapters import SharedReads
from preheat.parallel.contents import SharedContents
from preheat.parallel.groups import Groups
from preheat.parallel.leader import ParallelExecutor, build_parallel, select_parallel
from preheat.parallel.ranks import Children, Launcher, Ranks
from preheat.parallel.transfers import SharedTransfers
from preheat.parallel.world import has_groups, world_size
from preheat.plan.plan import Plan
from preheat.settings import Settings
from preheat.utils.caches import cache_root

AllContents = Contents | SharedContents


@dataclass(frozen=True)
class Share:
    """Rank 0's part of a model.

    ``collective`` are the ranks that share its layers (None: layers are whole), and ``everyone`` all ranks. ``build``
    builds an engine on all ``ranks``, and ``select`` chooses their linear layers' kernels.
    """

    collective: Collective | None
    ranks: Ranks | None
    build: Build = build
    select: Select = select_linear_kernels
    everyone: Collective | None = None

    @classmethod
    def open(cls, settings: Settings, backend: Backend, mode: Mode, children: Children | None = None) -> Share:
        """Start the other ranks, if there are any, in ``mode``; they may wait already, as ``children``.

        They load their shards while this one does.
        """
        world = world_size(settings)
        if not has_groups(settings):
            return cls(None, None)
        assert backend.sharing is not None, "its facts say that it lacks ranks"
        if world == 1:
            return cls(backend.sharing.join(OneNode(Path(), 0, 1), lambda: None), None)
        ranks = Ranks(settings, mode, cache_root(settings), children or _launcher(settings, backend))
        groups = Groups.join(settings, backend.sharing, ranks.rendezvous(), ranks.check)
        ranks.on_end(groups.abort)
        ranks.fault = groups.fault
        shares_draws = groups.everyone if backend.facts.asynchronous else None
        made = partial(build_parallel, ranks, shares_draws, groups.pipe)
        return cls(groups.collective, ranks, made, partial(select_parallel, ranks), groups.everyone)

    def reading(self, read: ReadPacked) -> ReadPacked:
        """Return ``read`` for all ranks."""
        return SharedReads(self.ranks, read) if self.ranks else read

    def loaded(self) -> list[int]:
        """Wait until all ranks have loaded their shards.

        Return the free bytes of each other rank.
        """
        return self.ranks.answers() if self.ranks else []

    @property
    def on_a_node(self) -> int:
        """Most ranks on one node; they share the memory of a host."""
        return self.ranks.on_a_node if self.ranks else 1

    def close(self) -> None:
        """End the other ranks."""
        if self.ranks:
            self.ranks.close()

    def agree(self, executor: Executor, plan: Plan) -> None:
        """Raise PreheatError if the ranks do not agree.

        They must have the values of :func:`preheat.parallel.leader.agreed` in common.
        """
        if isinstance(executor, ParallelExecutor):
            executor.agree(plan)

    def contents(self, settings: Settings, backend: Backend, model: LoadedModel, executor: Executor) -> AllContents:
        """Return the weights and caches of all ranks."""
        mine = Contents(settings, backend, model, executor, self.collective)
        if self.ranks is None or self.everyone is None:
            return mine
        return SharedContents(self.ranks, self.everyone, backend.device, mine)

    def transfers(self, settings: Settings, backend: Backend, model: LoadedModel) -> Transfers:
        """Return the transfers of a trainer's tensors to all ranks."""
        parts = settings, backend, model
        return Transfers(*parts) if self.ranks is None else SharedTransfers(self.ranks, *parts)

    def cold_sources(self, executor: Executor) -> Mapping[str, Counted]:
        """Return sources of the other ranks' cold events from now on."""
        return executor.cold_sources() if isinstance(executor, ParallelExecutor) else {}


def for_replica(settings: Settings, facts: Facts) -> Settings:
    """Return ``settings`` with the threads of one replica or model.

    The replicas or models share a host's cores.
    """
    beside = max(settings.data_parallel_size, len(settings.models))
    if beside <= 1:
        return settings
    if not facts.on_host or settings.num_threads:
        return settings
    ranks = k_splits_of(settings.tensor_parallel_size) if sums_k_splits(settings) else 1
    threads = (os.cpu_count() or 1) // (beside * ranks)
    return replace(settings, num_threads=max(threads, 1))


def _launcher(settings: Settings, backend: Backend) -> Launcher:
    """Return the launcher of ranks 1 and up, by ``--distributed-executor-backend``."""
    if settings.distributed_executor_backend == "mp":
        return Children(world_size(settings), settings.device)
    from preheat.parallel.ray_actors import RankActors

    return RankActors(world_size(settings), "CPU" if backend.facts.on_host else "GPU")


def for_ranks(settings: Settings, facts: Facts) -> Settings:
    """Return ``settings`` with the threads of one of several ranks.

    The number of threads is the same on 1, 2 and 4 ranks, because bits depend on it.
    """
    if not sums_k_splits(settings) or not facts.on_host:
        return settings
    threads = max((os.cpu_count() or 1) // k_splits_of(settings.tensor_parallel_size), 1)
    return replace(settings, num_threads=settings.num_threads or threads)


def contract_parts(settings: Settings) -> dict[str, object]:
    """Return the parts of a proof about ranks.

    These are the order of sums in shared layers, and the number of ranks and stages.
    """
    world, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    sums = {"sums": f"{k_splits_of(world)} K splits in a tree", "ranks": world} if sums_k_splits(settings) else {}
    experts = {"experts": "whole, on one rank each"} if settings.enable_expert_parallel else {}
    return {**sums, **experts, **({"stages": stages} if stages > 1 else {})}
