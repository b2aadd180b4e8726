"""One engine or several replicas, behind one :meth:`Replicas.send` and :meth:`Replicas.receive`.

Each replica is a member: a process with devices of its own. A request goes to one replica
(:mod:`preheat.server.replicas.routing`), any other message to all. The replies look like one engine's: :class:`Ready`
comes when all replicas are ready. The requests of a lost member go on at others, behind the tokens that their clients
have.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from preheat.backends.visible import visible_devices
from preheat.core import (
    AdapterReport,
    Cancel,
    Command,
    Declined,
    Delta,
    Died,
    Finish,
    FromEngine,
    Leaving,
    LoadAdapter,
    Outcome,
    Progress,
    Ready,
    Report,
    Request,
    ResetPrefixCache,
    ToEngine,
)
from preheat.errors import EngineDead, PreheatError, WireError
from preheat.frontend.journal import MOST_MOVES, Journal, Lost
from preheat.server.replicas.member import EngineMember, Process, State
from preheat.server.replicas.process import ENGINE, EngineProcess
from preheat.server.replicas.routing import Router
from preheat.settings import Settings
from preheat.utils.contract import Contract, first_difference
from preheat.warmup.record import Record


def processes(settings: Settings, entry: str) -> list[Callable[[], Process]]:
    """Return functions that start the engines' processes. Raises SettingsError if devices are missing."""
    size = range(settings.data_parallel_size)
    variables = [visible_devices(settings, replica, os.environ) for replica in size]
    return [partial(EngineProcess, settings, entry, each) for each in variables]


class Moved(NamedTuple):
    """The outcome of a lost member: the number of requests that go on, and the ids that end."""

    requests: int
    ended: list[int]


class Replicas:
    """The engines of ``settings``: ``data_parallel_size`` members whose processes run ``entry``.

    ``spawns`` makes other members than processes of this machine; the server is then ready with the first one.

    The field ``engine`` of Stats, Ready and Report has the replica's number. ``journal`` has the requests in flight, so
    that they go on elsewhere when a member is lost (:meth:`lose`). Raises SettingsError if devices are missing.
    """

    def __init__(
        self, settings: Settings, entry: str = ENGINE, spawns: Sequence[Callable[[], Process]] | None = None
    ) -> None:
        size = settings.data_parallel_size
        places = enumerate(spawns or processes(settings, entry))
        self.members = [EngineMember(number, spawn) for number, spawn in places]
        self.router, self.journal = Router(size), Journal()
        self._any = spawns is not None  # the first engine makes the server ready, the others may come later
        self._caches = settings.enable_prefix_caching
        self._joint: Ready | None = None  # once all are ready for the first time
        self._reference: Ready | None = None  # the facts that every later member must share
        self._progress: dict[int, Progress] = {}
        self._commanded: dict[int, set[int]] = {}  # members that have not carried out a command, by its id
        self._watch: Callable[[EngineMember], None] = lambda member: None
        self.prepare: Callable[[], Iterable[LoadAdapter]] = tuple
        """Called when a member is back; returns the adapters that it must load before its first request."""
        self.parts: Callable[[], dict[str, str]] = dict
        """Returns the frontend's parts of the contract, which pods must share."""

    @property
    def joined(self) -> bool:
        """Whether all members have been ready once."""
        return self._joint is not None

    @property
    def takers(self) -> list[int]:
        """The members that take requests."""
        return [member.number for member in self.members if member.state is State.SERVING]

    def send(self, message: ToEngine) -> None:
        """Send a message to its engine, or to all. Never blocks. A request waits while no member takes it."""
        match message:
            case Request():
                self._give(message)
            case Cancel():
                self.journal.forget(message.id)
                if (replica := self.router.end(message.id)) is not None:
                    self.members[replica].send(message)
            case _:
                if isinstance(message, ResetPrefixCache):
                    self.router.forget()
                if isinstance(message, Command):
                    self._commanded[message.id] = {member.number for member in self.members if member.alive}
                for member in self.members:
                    if member.alive:
                        member.send(message)

    def _give(self, request: Request, among: Sequence[int] | None = None) -> None:
        """Send ``request`` to a member, by default any that takes requests, or let it wait for one."""
        takers = self.takers if among is None else among
        if not takers:
            self.journal.sent(request, None)
            return
        member = self.members[self.router.route(request, takers)]
        self.journal.sent(request, member.owner)
        member.send(request)

    def _decline(self, member: EngineMember, message: Declined) -> list[FromEngine]:
        """Give a request that ``member`` declines to another member, or to ``member`` again.

        A request that was lost too often ends; its end is returned.
        """
        id, takers = message.id, self.takers
        if id not in self.router.requests(member.number):
            return []  # its client has left
        self.router.end(id)
        request = self.journal.again(id) if message.lost else self.journal.resumed([id])[0]
        if request is None:
            said = f"The engines of this request have ended {MOST_MOVES + 1} times, so it may be the reason"
            return [Delta(finished={id: Finish("error", error=WireError.of(EngineDead(said)))})]
        self._give(request, [each for each in takers if each != member.number] or takers)
        return []

    def receive(self, replica: int) -> list[FromEngine]:
        """Return the messages of one replica since the last call, adapted for the frontend. Never waits."""
        member = self.members[replica]
        return [seen for message in member.receive() for seen in self._seen(member, message)]

    def named(self, replica: int, said: str) -> str:
        """Return ``said`` with the replica's number before it if there are several."""
        return said if len(self.members) == 1 else f"Engine {replica} of {len(self.members)}: {said}"

    def watch(self, on_message: Callable[[], None], on_exit: Callable[[int, int | None], None]) -> None:
        """Call back for messages and exits of the replicas.

        ``on_message`` is called when there may be messages, ``on_exit`` with a replica and its status,
        before with None if the replica dies and has not exited yet.
        """

        def watched(member: EngineMember) -> None:
            epoch = member.epoch

            def exited(code: int | None) -> None:
                if member.epoch == epoch:
                    on_exit(member.number, code)

            member.process.watch(on_message, exited)

        self._watch = watched
        for member in self.members:
            watched(member)

    def lose(self, replica: int, *, trusted: bool) -> Moved:
        """Take a member out, kill its process, and let its requests go on at others.

        Requests that have moved too often end. All end if the member's results are not ``trusted``.
        """
        member = self.members[replica]
        member.state = State.DEAD
        self._commanded.clear()  # the server ends the commands of all
        self.router.clear(replica)
        lost = self.journal.lost(member.owner) if trusted else Lost(ended=self.journal.drop(member.owner))
        member.process.kill()
        for request in lost.again:
            self._give(request)
        return Moved(len(lost.again), lost.ended)

    def restart(self, replica: int) -> None:
        """Start a member again whose process has exited."""
        self.members[replica].restart()
        self._watch(self.members[replica])

    def update(self, contract: Contract | None) -> None:
        """Note the contract of the engine after a command; members that join later must share it."""
        if self._reference is not None and contract is not None and contract != self._reference.contract:
            self._reference = msgspec.structs.replace(self._reference, contract=contract, digest="")

    async def stop(self, now: bool) -> None:
        """Drain all engines, and kill them after a timeout, or at once if ``now``."""
        await asyncio.gather(*(member.process.stop(now) for member in self.members))

    def _seen(self, member: EngineMember, message: FromEngine) -> list[FromEngine]:
        match message:
            case Delta():
                message = self.journal.seen(message, member.owner)
                self.router.handle(message)
                if message.stats is not None:
                    message.stats.engine = member.number
            case Outcome():
                return self._carried_out(member, message)
            case Report():
                message.engine = member.number
            case Progress():
                if self.joined:
                    return []
                self._progress[member.number] = message
                return [together(list(self._progress.values()), message.current)]
            case Ready():
                message.engine = member.number
                return self._rejoin(member, message) if self.joined else self._join(member, message)
            case Died():
                message.error.message = self.named(member.number, message.error.message)
            case AdapterReport() if member.owed:
                member.owed -= 1
                if not member.owed:
                    self._admit(member)
            case Declined():
                return [message, *self._decline(member, message)]
            case Leaving():
                if member.state is State.SERVING:
                    member.leave()
                elif member.state is State.STARTING:
                    member.process.kill()
        return [message]

    def _carried_out(self, member: EngineMember, outcome: Outcome) -> list[FromEngine]:
        """Return the outcome of a command once all members have carried it out, or of the first that fails."""
        left = self._commanded.get(outcome.id, set())
        left.discard(member.number)
        if outcome.error is None and left:
            return []
        self._commanded.pop(outcome.id, None)
        return [outcome]

    def _join(self, member: EngineMember, ready: Ready) -> list[FromEngine]:
        if self._any and (error := self._foreign(ready)):
            member.state = State.GONE
            return [Died(WireError.of(error))]
        member.ready = ready
        missing = not self._any and any(each.ready is None for each in self.members)
        return [] if missing else self._all_ready()

    def _foreign(self, ready: Ready) -> PreheatError | None:
        """Return an error if a pod has another tokenizer, template or defaults than this frontend."""
        theirs = ready.contract or Contract()
        mine = msgspec.structs.replace(theirs, **self.parts())
        if (part := first_difference(mine, theirs)) is None:
            return None
        said = f"{part.name}: {part.one} here, {part.other} at engine {ready.engine}"
        return PreheatError(f"The front and its pods do not agree: {said}. Give both the same model and options")

    def _rejoin(self, member: EngineMember, ready: Ready) -> list[FromEngine]:
        """Let a member that has started again take requests, or refuse it by the first part that differs."""
        joint, reference = self._joint, self._reference
        assert joint is not None and reference is not None
        if not reference.digest:  # the weights have been replaced since
            reference = msgspec.structs.replace(reference, digest=ready.digest)
        foreign = self._foreign(ready) if self._any else None
        if error := foreign or disagreement([reference, ready]) or _smaller(joint, ready):
            member.state = State.GONE
            return [Died(WireError.of(error))]
        member.ready, messages = ready, [*self.prepare()]
        member.owed = len(messages)
        for message in messages:
            member.send(message)
        if not messages:
            self._admit(member)
        return [Report(ready.record, member.number)]

    def _admit(self, member: EngineMember) -> None:
        """Let ``member`` take requests, first of all those that wait."""
        member.state = State.SERVING
        self._open()
        for request in self.journal.waiting():
            self._give(request)

    def _open(self) -> None:
        """Set the sizes of the members' caches for the router."""
        readies = [each.ready for each in self.members]
        size = next(ready.block_size for ready in readies if ready is not None)
        self.router.open(size, [ready.num_blocks if ready and self._caches else 0 for ready in readies])

    def _all_ready(self) -> list[FromEngine]:
        """Return the records of the replicas, then Ready with the smallest limits.

        If the replicas differ, return Died.
        """
        ready = [member.ready for member in self.members if member.ready is not None]
        if error := disagreement(ready):
            return [Died(WireError.of(error))]
        for member in self.members:
            if member.ready is not None:
                member.state = State.SERVING
        self._open()
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
        self._joint, self._reference = joint, ready[0]
        here = {each.engine for each in ready}
        absent = [Report(joint.record, member.number) for member in self.members if member.number not in here]
        return [*(Report(each.record, each.engine) for each in ready[1:]), *absent, joint]


def _smaller(joint: Ready, ready: Ready) -> PreheatError | None:
    """Return an error if an engine that has started again does not take every request that others take."""
    if ready.blocked_reason:
        return PreheatError(f"Engine {ready.engine} has started again and fails its check: {ready.blocked_reason}")
    for name in ("max_model_len", "max_prompt_len"):
        had, has = getattr(joint, name), getattr(ready, name)
        if has is not None and (had is None or has < had):
            return PreheatError(f"Engine {ready.engine} has started again with a smaller {name}: {had}, now {has}")
    return None


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
