"""Ranks that are actors of Ray. They do what a rank's process does, and talk through the same shared memory, so all of
them are on the engine's node: a placement group reserves there what each rank needs, the engine's own included.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from preheat.errors import SettingsError
from preheat.settings import Settings

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise SettingsError(
        "distributed_executor_backend ray needs Ray: pip install preheat[ray]", param="distributed_executor_backend"
    ) from error

_PLACE_SECONDS = 30.0
_LEAVE_SECONDS = 5.0


class _Rank:
    """Runs in the actor's process."""

    def run(self, settings: Settings, cache: str | None, folder: str, rank: int, answers: str) -> None:
        from preheat.parallel import worker

        connection = Connection(os.open(answers, os.O_WRONLY), readable=False)
        worker.run(settings, None if cache is None else Path(cache), Path(folder), rank, connection)


class RankActors:
    """A place for each of ``world`` ranks, each with one ``resource`` (CPU or GPU) of Ray's. Raises SettingsError
    where there is no Ray, or where this node has not so much.
    """

    def __init__(self, world: int, resource: str) -> None:
        _connect()
        here = ray.util.get_node_ip_address()
        self._bundle = {resource: 1}
        self._group = placement_group([{resource: 1, f"node:{here}": 0.001}] * world, strategy="STRICT_PACK")
        if not self._group.wait(_PLACE_SECONDS):
            remove_placement_group(self._group)
            raise SettingsError(
                f"distributed_executor_backend ray: this node ({here}) has not {world} {resource} that Ray could "
                "reserve. Ranks talk through the memory of one node, so several nodes cannot share a model: lower "
                "tensor_parallel_size, or run preheat on a node that has them",
                param="tensor_parallel_size",
            )

    def start(self, folder: Path, rank: int, settings: Settings, cache: Path | None) -> tuple[RankActor, Connection]:
        """As :data:`preheat.parallel.ranks.Start`. The rank sees the devices that the engine sees."""
        pipe = folder / f"answers-{rank}"
        os.mkfifo(pipe, 0o600)
        ours = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for the other end
        os.set_blocking(ours, True)
        seen = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        seen |= {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        actor = ray.remote(_Rank).options(
            num_cpus=self._bundle.get("CPU", 0), num_gpus=self._bundle.get("GPU", 0), max_restarts=0,
            scheduling_strategy=place, runtime_env={"env_vars": seen},
        ).remote()  # fmt: skip
        running = actor.run.remote(settings, None if cache is None else str(cache), str(folder), rank, str(pipe))
        return RankActor(actor, running, self._group), Connection(ours, writable=False)


class RankActor:
    """The actor of a rank, as a process: :class:`preheat.parallel.ranks.RankProcess`."""

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
