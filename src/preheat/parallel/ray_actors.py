"""Ranks that are Ray actors.

They fill the engine's node first, then others. A placement group reserves the resources of each rank, the engine's own
included. An actor does the work of a rank's process.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from preheat.errors import RankDied, SettingsError
from preheat.parallel.ranks import Started
from preheat.parallel.remote import be_rank, callers
from preheat.parallel.wire import Address, Door

try:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise SettingsError(
        "distributed_executor_backend ray needs Ray: pip install preheat[ray]", param="distributed_executor_backend"
    ) from error

logger = logging.getLogger(__name__)

_PLACE_SECONDS = 300.0  # nodes may still have to join
_HINT_SECONDS = 5.0
_LEAVE_SECONDS = 5.0


class _Rank:
    """The actor's class; it runs in the actor's process."""

    def run(self, rank: int, leader: Address, key: bytes) -> None:
        be_rank(rank, leader, key)


class RankActors:
    """A :class:`preheat.parallel.ranks.Launcher` of ``world`` ranks.

    Each rank has one ``resource`` (CPU or GPU) of Ray's. Raises SettingsError without Ray, or without enough of the
    resource.
    """

    def __init__(self, world: int, resource: str) -> None:
        _connect()
        here = ray.get_runtime_context().get_node_id()
        self._bundle = {resource: 1}
        self._group = placement_group(
            [self._bundle] * world,
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": here}] + [{}] * (world - 1),
        )
        self._reserved(f"{world} {resource}, one of them on this node ({ray.util.get_node_ip_address()})")
        node_of: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        # Neighbors are on one node; the first ones are on the engine's.
        self._bundles = sorted(node_of, key=lambda bundle: (node_of[bundle] != here, node_of[bundle], bundle))
        self.nodes: Sequence[object] = [node_of[bundle] for bundle in self._bundles]
        self.door: Door = Door(ray.util.get_node_ip_address(), secrets.token_bytes(32))
        if (several := len(set(self.nodes))) > 1:
            logger.info("%d ranks are on %d nodes: they exchange by the network", world, several)

    def _reserved(self, what: str) -> None:
        """Wait until Ray has reserved ``what``. Raises SettingsError if it does not."""
        if self._group.wait(_HINT_SECONDS):
            return
        logger.warning("Waiting for Ray to reserve %s, for %g s", what, _PLACE_SECONDS)
        if not self._group.wait(_PLACE_SECONDS):
            remove_placement_group(self._group)
            raise SettingsError(
                f"distributed_executor_backend ray: Ray could not reserve {what} in {_PLACE_SECONDS:g} s: lower "
                "tensor_parallel_size or pipeline_parallel_size, add nodes, or end the jobs that hold their resources",
                param="tensor_parallel_size",
            )

    def launch(self) -> list[Started]:
        actors = [self._start(rank) for rank in range(1, len(self.nodes))]

        def check() -> None:
            for rank, actor in enumerate(actors, 1):
                if actor.poll() is not None:
                    raise RankDied(f"Rank {rank} ended before its start was complete{actor.reason}")

        try:
            return self._met(actors, check)
        except BaseException:
            for actor in actors:
                actor.leave()
            self.door.close()
            raise

    def _met(self, actors: list[RankActor], check: Callable[[], None]) -> list[Started]:
        """Return the actors once all have called."""
        found = callers(self.door, len(actors), check)
        # Elsewhere Ray shows an actor its own GPU alone.
        devices = [rank if node == self.nodes[0] else 0 for rank, node in enumerate(self.nodes)]
        return [Started(actor, *found[rank], devices[rank]) for rank, actor in enumerate(actors, 1)]

    def _start(self, rank: int) -> RankActor:
        """Start the actor of ``rank``.

        On the engine's node it sees the same devices as the engine; Ray does not know of them.
        """
        seen: dict[str, str] = {}
        if self.nodes[rank] == self.nodes[0]:
            seen = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            seen |= {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        actor = ray.remote(_Rank).options(
            num_cpus=self._bundle.get("CPU", 0), num_gpus=self._bundle.get("GPU", 0), max_restarts=0,
            scheduling_strategy=place, runtime_env={"env_vars": seen},
        ).remote()  # fmt: skip
        return RankActor(actor, actor.run.remote(rank, self.door.address, self.door.key), self._group)


class RankActor:
    """The actor of a rank, as a :class:`preheat.parallel.ranks.RankProcess`."""

    def __init__(self, actor: Any, running: Any, group: Any) -> None:
        self._actor, self._running, self._group = actor, running, group
        self.reason = ""

    def poll(self) -> int | None:
        done, _ = ray.wait([self._running], timeout=0)
        if not done:
            return None
        try:
            ray.get(self._running)
        except ray.exceptions.RayError as error:
            self.reason = f": {' '.join(str(error).split())}"
        return 1

    def kill(self) -> None:
        ray.kill(self._actor)

    def leave(self) -> None:
        if ray.is_initialized():
            self.kill()
            ray.wait([self._running], timeout=_LEAVE_SECONDS)
            remove_placement_group(self._group)


def _connect() -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        raise SettingsError(
            "distributed_executor_backend ray: no Ray runs on this machine: start it by `ray start --head`, or name "
            "its address in RAY_ADDRESS",
            param="distributed_executor_backend",
        ) from None
