"""One engine or several replicas, behind one :meth:`Replicas.send` and :meth:`Replicas.receive`.

Each replica is a process with devices of its own. A request goes to one replica (:mod:`preheat.server.routing`), any
other message to all. The replies look like one engine's: :class:`Ready` comes when all replicas are ready.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

import msgspec

from preheat.backends.visible import visible_devices
from preheat.core import Cancel, Delta, Died, FromEngine, Progress, Ready, Report, Request, ResetPrefixCache, ToEngine
from preheat.errors import PreheatError, WireError
from preheat.server.process import ENGINE, EngineProcess
from preheat.server.routing import Router
from preheat.settings import Settings
from preheat.utils.contract import first_difference
from preheat.warmup.record import Record


class Replicas:
    """The engines of ``settings``: ``data_parallel_size`` processes that run ``entry``.

    The field ``engine`` of Stats, Ready and Report has the replica's number. Raises SettingsError if there are not
    enough devices.
    """

    def __init__(self, settings: Settings, entry: str = ENGINE) -> None:
        size = settings.data_parallel_size
        variables = [visible_devices(settings, replica, os.environ) for replica in range(size)]
        self.engines = [EngineProcess(settings, entry, each) for each in variables]
        self.router = Router(size)
        self._caches = settings.enable_prefix_caching
        self._ready: dict[int, Ready] = {}
        self._progress: dict[int, Progress] = {}

    def send(self, message: ToEngine) -> None:
        """Send a message to its engine, or to all. Never blocks."""
        match message:
            case Request():
                self.engines[self.router.route(message)].transport.send(message)
            case Cancel():
                if (replica := self.router.end(message.id)) is not None:
                    self.engines[replica].transport.send(message)
            case _:
                if isinstance(message, ResetPrefixCache):
                    self.router.forget()
                for engine in self.engines:
                    engine.transport.send(message)

    def receive(self, replica: int) -> list[FromEngine]:
        """Return the messages of one replica since the last call, adapted for the frontend. Never waits."""
        return [seen for message in self.engines[replica].transport.receive() for seen in self._seen(replica, message)]

    def named(self, replica: int, said: str) -> str:
        """Return ``said`` with the replica's number before it if there are several."""
        return said if len(self.engines) == 1 else f"Engine {replica} of {len(self.engines)}: {said}"

    def watch(self, on_message: Callable[[], None], on_exit: Callable[[int, int], None]) -> None:
        """Call back for messages and exits of the replicas.

        ``on_message`` is called when there may be messages, ``on_exit`` with a replica and its status.
        """
        for replica, engine in enumerate(self.engines):
            engine.watch(on_message, partial(on_exit, replica))

    async def stop(self, now: bool) -> None:
        """Drain all engines, and kill them after a timeout, or at once if ``now``."""
        await asyncio.gather(*(engine.stop(now) for engine in self.engines))

    def _seen(self, replica: int, message: FromEngine) -> list[FromEngine]:
        match message:
            case Delta():
                self.router.handle(message)
                if message.stats is not None:
                    message.stats.engine = replica
            case Report():
                message.engine = replica
            case Progress():
                self._progress[replica] = message
                return [together(list(self._progress.values()), message.current)]
            case Ready():
                message.engine = replica
                self._ready[replica] = message
                return self._all_ready() if len(self._ready) == len(self.engines) else []
            case Died():
                message.error.message = self.named(replica, message.error.message)
        return [message]

    def _all_ready(self) -> list[FromEngine]:
        """Return the records of the replicas, then Ready with the smallest limits.

        If the replicas differ, return Died.
        """
        ready = [self._ready[replica] for replica in range(len(self.engines))]
        if error := disagreement(ready):
            return [Died(WireError.of(error))]
        self.router.open(ready[0].block_size, [each.num_blocks if self._caches else 0 for each in ready])
        prompts = [each.max_prompt_len for each in ready if each.max_prompt_len is not None]
        blocked = (self.named(each.engine, each.blocked_reason) for each in ready if each.blocked_reason)
        joint = msgspec.structs.replace(
            ready[0],
            max_model_len=min(each.max_model_len for each in ready),
            max_prompt_len=min(prompts, default=None),
            num_blocks=min(each.num_blocks for each in ready),
            seconds=max(each.seconds for each in ready),
            blocked_reason="; ".join(blocked),
        )
        return [*(Report(each.record, each.engine) for each in ready[1:]), joint]


def together(progress: list[Progress], current: str) -> Progress:
    """Return the joint progress of several starting engines.

    The slowest one sets the remaining time.
    """
    times = [each.eta_s for each in progress]
    left = None if None in times else max(time for time in times if time is not None)
    return Progress(sum(each.done for each in progress), sum(each.total for each in progress), current, left)


def disagreement(ready: list[Ready]) -> PreheatError | None:
    """Return an error if answers would depend on the replica.

    It names two engines that differ.
    """
    first, *others = ready
    for other in others:
        mine, theirs = _facts(first), _facts(other)
        if first.contract and other.contract and (part := first_difference(first.contract, other.contract)):
            mine[part.name], theirs[part.name] = part.one, part.other
        if different := [name for name, value in mine.items() if theirs[name] != value]:
            said = "; ".join(
                f"{name}: {mine[name]} on engine {first.engine}, {theirs[name]} on engine {other.engine}"
                for name in different
            )
            return PreheatError(
                f"The engines do not agree, so the server takes no requests: {said}. Give all of them equal devices, "
                "or lower --data-parallel-size"
            )
    return None


def _facts(ready: Ready) -> dict[str, object]:
    """Return the facts that all replicas must share."""
    record = Record.from_json(ready.record)
    return {
        "platform": record.platform, "dtype": record.dtype, "mode": record.mode, "digest": ready.digest,
        "block size": ready.block_size,
    }  # fmt: skip
